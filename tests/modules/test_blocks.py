"""`blocks_of`: which modules of a model are its blocks."""

from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from benchmarks.decoder import SHAPES, Decoder
from rekindle.modules.blocks import blocks_of
from tests.toys import Block, Mlp, Stack


def paths(model: nn.Module) -> list[str]:
    return list(blocks_of(model))


def in_a(name: str, module: nn.Module) -> nn.Module:
    """A model with a module under a name."""
    model = nn.Module()
    model.add_module(name, module)
    return model


def blocks(count: int) -> list[nn.Module]:
    return [Block() for _ in range(count)]


def test_the_members_of_a_list_that_are_alike_are_blocks() -> None:
    assert paths(Stack(3)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_path_leads_to_its_block() -> None:
    model = Stack(3)
    assert all(model.get_submodule(path) is block for path, block in blocks_of(model).items())


def test_a_sequential_model_has_blocks() -> None:
    assert paths(nn.Sequential(nn.Linear(8, 8), *blocks(2), nn.Linear(8, 8))) == ["1", "2"]


def test_a_dict_of_modules_has_blocks() -> None:
    model = in_a("h", nn.ModuleDict({"one": Block(), "other": Block()}))
    assert paths(model) == ["h.one", "h.other"]


def test_a_model_without_lists_is_one_block() -> None:
    model = Mlp()
    assert blocks_of(model) == {"": model}


def test_lone_layers_are_no_blocks() -> None:
    assert paths(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == [""]


def test_modules_that_learn_nothing_are_no_blocks() -> None:
    pairs = [nn.Sequential(nn.ReLU(), nn.Tanh()) for _ in range(3)]
    assert paths(nn.Sequential(*pairs)) == [""]


def test_one_of_a_kind_is_no_block() -> None:
    assert paths(nn.Sequential(Block(), nn.Linear(8, 8))) == [""]


def test_blocks_of_two_kinds_in_turn_are_found() -> None:
    model = in_a("layers", nn.ModuleList([Block(), Mlp(), Block(), Mlp()]))
    assert paths(model) == [f"layers.{i}" for i in range(4)]


def test_blocks_are_the_outermost_ones() -> None:
    model = nn.ModuleList([nn.Sequential(*blocks(2)), nn.Sequential(*blocks(2))])
    assert paths(in_a("stages", model)) == ["stages.0", "stages.1"]


def test_blocks_inside_one_of_a_kind_are_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Stack(2))
    assert paths(model) == ["1.blocks.0", "1.blocks.1"]


def test_an_encoder_and_a_decoder_each_have_their_blocks() -> None:
    model = nn.ModuleDict({"encoder": Stack(2), "decoder": nn.Sequential(Stack(2))})
    assert paths(model) == [
        *("encoder.blocks.0", "encoder.blocks.1"),
        *("decoder.0.blocks.0", "decoder.0.blocks.1"),
    ]


def test_blocks_of_a_decoder_are_its_layers() -> None:
    assert paths(Decoder(SHAPES["tiny"])) == ["blocks.0", "blocks.1"]


def test_torchs_transformer_has_its_layers_as_blocks() -> None:
    model = nn.Transformer(8, 2, 2, 3, 8, batch_first=True)
    assert paths(model) == [
        *(f"encoder.layers.{i}" for i in range(2)),
        *(f"decoder.layers.{i}" for i in range(3)),
    ]


def test_a_list_inside_a_list_is_looked_into_since_it_is_never_called() -> None:
    """As the levels of many a U-Net: `ModuleList([ModuleList([block, block, up]), ...])`."""
    model = in_a("downs", nn.ModuleList(nn.ModuleList(blocks(2)) for _ in range(2)))
    assert paths(model) == ["downs.0.0", "downs.0.1", "downs.1.0", "downs.1.1"]


def test_a_dict_inside_a_list_is_looked_into_since_it_is_never_called() -> None:
    level = [nn.ModuleDict({"a": Block(), "b": Block()}) for _ in range(2)]
    model = in_a("levels", nn.ModuleList(level))
    assert paths(model) == ["levels.0.a", "levels.0.b", "levels.1.a", "levels.1.b"]


def test_one_block_that_a_list_holds_several_times_is_a_block_once() -> None:
    """As in models that share their layers."""
    model = in_a("layers", nn.ModuleList([Block()] * 3))
    assert paths(model) == ["layers.0"]


def test_a_block_in_two_lists_is_a_block_once() -> None:
    one, other, third = blocks(3)
    model = in_a("a", nn.ModuleList([one, other]))
    model.b = nn.ModuleList([one, third])
    found = blocks_of(model)
    assert [id(block) for block in found.values()] == [id(b) for b in (one, other, third)]


def test_a_place_without_a_module_is_no_block() -> None:
    model = Stack(2)
    model.register_module("head", None)
    assert paths(model) == ["blocks.0", "blocks.1"]


def test_frozen_blocks_are_blocks() -> None:
    assert len(paths(Stack(2).requires_grad_(False))) == 2


def test_blocks_on_the_meta_device_are_found() -> None:
    with torch.device("meta"):
        assert len(paths(Stack(2))) == 2


def test_compiled_blocks_are_blocks() -> None:
    layers: list[Any] = [torch.compile(block, backend="eager") for block in blocks(2)]
    assert paths(in_a("layers", nn.ModuleList(layers))) == ["layers.0", "layers.1"]


def test_looking_for_blocks_changes_nothing() -> None:
    model = Stack(2)
    before = [dict(vars(module)) for module in model.modules()]
    blocks_of(model)
    assert [vars(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
)
def test_layers_of_transformers_models_are_blocks(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    sizes = {
        "LlamaForCausalLM": {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8},
        "GPT2LMHeadModel": {"n_layer": 2, "n_embd": 8, "n_head": 2},
        "T5ForConditionalGeneration": {"num_layers": 2, "d_model": 8, "d_ff": 8, "d_kv": 4},
    }
    where = {
        "LlamaForCausalLM": ["model.layers.0", "model.layers.1"],
        "GPT2LMHeadModel": ["transformer.h.0", "transformer.h.1"],
        "T5ForConditionalGeneration": [
            f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(2)
        ],
    }
    heads = {} if "GPT2" in name else {"num_attention_heads": 2, "num_heads": 2}
    with torch.device("meta"):
        model = kind(kind.config_class(vocab_size=16, **sizes[name], **heads))
    assert paths(model) == where[name]


def test_every_block_that_is_found_is_a_region_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Stack(3), Stack(2))
    rekindle.apply(model, "recompute")
    with rekindle.observe() as seen:
        model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert seen.total.forwards == seen.total.replays == len(paths(model)) == 2
