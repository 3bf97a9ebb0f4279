"""Adapters on a frozen base: field notes 16 and 31."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import policies
from tests.toys import same_bits

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from rekindle.integrations import peft as ours  # noqa: E402

STEPS = 3
LAYERS = {"llama": 3, "t5": 2 + 3}
WHATS: dict[str, Any] = {"recompute": "recompute", "policy": policies.keep_matmuls_and_attention}
every_what = pytest.mark.parametrize("what", WHATS.values(), ids=WHATS)
every_base = pytest.mark.parametrize("name", LAYERS)


def base(name: str) -> nn.Module:
    """Frozen by peft; without a cache, as `apply` has it."""
    torch.manual_seed(1)
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def adapted(name: str, **options: Any) -> Any:
    targets = ["q_proj", "v_proj"] if name == "llama" else ["q", "v"]
    config = peft.LoraConfig(
        r=2, lora_dropout=0.1, target_modules=targets, init_lora_weights=False, **options
    )
    return peft.get_peft_model(base(name), config).train()


def tokens() -> Tensor:
    return torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(2))


def train(model: nn.Module) -> list[Tensor]:
    """The loss of each step, then every gradient of the last one, then every parameter."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == sum(p.requires_grad for p in model.parameters())
    return [*losses, *grads, *(p.detach() for p in model.parameters())]


@functools.cache
def plain(name: str) -> list[Tensor]:
    return train(adapted(name))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))


@every_what
@every_base
def test_adapters_train_without_input_require_grads(name: str, what: Any) -> None:
    model = adapted(name)
    ours.apply(model, what)
    assert not model.get_input_embeddings()(tokens()).requires_grad
    with rekindle.observe() as seen:
        curve = train(model)
    assert same(curve, plain(name))
    regions = LAYERS[name] * STEPS
    assert (seen.total.forwards, seen.total.replays) == (regions, regions)


def test_layers_below_the_first_adapter_are_not_replayed() -> None:
    model = adapted("llama", layers_to_transform=[2])
    ours.apply(model)
    with rekindle.observe() as seen:
        train(model)
    assert (seen.total.forwards, seen.total.replays) == (3 * STEPS, STEPS)


def parameters_held(layer: nn.Module, positions: Any) -> int:
    """How many of a layer's parameters autograd holds from its forward to its backward."""
    held: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(1, 4, 32, requires_grad=True), position_embeddings=positions)
    return len({p.data_ptr() for p in layer.parameters()}.intersection(held))


def test_no_parameter_is_held_for_a_replay() -> None:
    """Field note 31: one that is gathered for a forward, and let go after it, stays let go."""
    model = adapted("llama").get_base_model()
    positions = model.model.rotary_emb(torch.randn(1, 4, 32), torch.arange(4)[None])
    layer = model.model.layers[0]
    assert parameters_held(layer, positions) == len(list(layer.parameters()))
    ours.apply(model)
    assert parameters_held(layer, positions) == 0


def test_modules_have_the_paths_that_the_base_has_by_itself() -> None:
    model = adapted("llama")
    applied = ours.apply(model, {"model.layers.*": "recompute"})
    assert str(applied) == "LlamaForCausalLM\n  model.layers.0-2: 3 x LlamaDecoderLayer: recompute"


def test_a_base_that_has_strategies_already_can_be_adapted() -> None:
    model = base("llama")
    ours.apply(model)
    config = peft.LoraConfig(
        r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(model, config).train()
    with rekindle.observe() as seen:
        assert same(train(model), plain("llama"))
    assert (seen.total.forwards, seen.total.replays) == (3 * STEPS, 3 * STEPS)


def test_strategies_stay_when_adapters_are_merged_until_they_are_removed() -> None:
    model = adapted("llama")
    ours.apply(model)
    merged = model.merge_and_unload().train().requires_grad_()
    for count in (3, 0):
        with rekindle.observe() as seen:
            merged(input_ids=tokens(), labels=tokens()).loss.backward()
        assert (seen.total.forwards, seen.total.replays) == (count, count)
        ours.remove(merged)


def test_prompt_tuning_trains_as_without_strategies() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)

    def build() -> Any:
        return peft.get_peft_model(base("llama"), config).train()

    model = build()
    ours.apply(model)
    with rekindle.observe() as seen:
        curve = train(model)
    assert same(curve, train(build()))
    assert (seen.total.forwards, seen.total.replays) == (3 * STEPS, 3 * STEPS)


def test_prefix_tuning_is_refused() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(base("llama"), config)
    with pytest.raises(ValueError, match="PREFIX_TUNING, which gives the model a cache"):
        ours.apply(model)
