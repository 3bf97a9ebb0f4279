"""`apply` and `remove`: what each strategy does to a model, in exact counts."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from benchmarks.decoder import SHAPES, Decoder
from rekindle import Counts, policies
from tests.modules.applying import (
    BLOCKS,
    HIDDEN,
    PER_BLOCK,
    SPILL_ONLY,
    every_way,
    managed,
    seen_with,
    step,
    times,
    total_with,
)
from tests.toys import Mlp, Stack, assert_same_step, leaf

# Gradients


@every_way
def test_outputs_gradients_and_random_numbers_are_those_of_the_plain_model(what: Any) -> None:
    model, x = Stack(BLOCKS, drop=0.3), leaf()
    plain = copy.deepcopy(model)
    rekindle.apply(model, what)

    def run(this: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
        for parameter in this.parameters():
            parameter.grad = None
        out: Tensor = this(x)
        torch.autograd.backward(out.sum(), inputs=list(this.parameters()))
        return out, [p.grad for p in this.parameters()]

    for _ in range(2):  # the second step uses what was learnt in the first
        assert_same_step(lambda: run(plain), lambda: run(model), [x], backward=lambda _: None)


@every_way
def test_a_second_backward_gives_the_gradients_again(what: Any) -> None:
    model, x = Stack(BLOCKS), leaf()
    rekindle.apply(model, what)
    loss = model(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


@every_way
def test_a_decoder_with_attention_has_the_plain_gradients(what: Any) -> None:
    model = Decoder(SHAPES["tiny"], dtype=torch.float32)
    renamed = {
        key.replace("norm", "*_norm").replace("mlp.up", "mlp.gate"): value
        for key, value in what.items()
    } if isinstance(what, dict) else what  # fmt: skip
    if isinstance(renamed, dict):
        renamed.pop("blocks.2", None)
    plain = copy.deepcopy(model)
    rekindle.apply(model, renamed)
    x = model.shape.hidden_states(dtype=torch.float32).requires_grad_()
    assert_same_step(lambda: plain(x), lambda: model(x), [x])


# What each word does


def test_recompute_holds_a_blocks_input_and_replays_it_once() -> None:
    assert total_with("recompute") == times(PER_BLOCK["recompute"])


def test_keep_leaves_everything_to_autograd() -> None:
    model = Stack(BLOCKS)
    assert total_with("keep", model) == Counts()
    assert managed(model) == []


def test_offload_leaves_what_is_in_host_memory_where_it_is() -> None:
    seen = seen_with("offload")
    assert (seen.total, seen.offload.tensors_out, seen.spill.tensors_out) == (Counts(), 0, 0)


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_spill_sends_large_activations_to_disk() -> None:
    """Of the five of each chain of linear layers, of 1 MiB each, the last two stay."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    rekindle.apply(model, "spill")
    spilled = step(model, leaf(1024, 256)).spill
    assert (spilled.tensors_out, spilled.bytes_out) == (3, 3 * 2**20)
    assert (spilled.tensors_in, spilled.bytes_in) == (3, 3 * 2**20)


def test_spill_leaves_small_activations_where_they_are() -> None:
    assert seen_with("spill").spill.tensors_out == 0


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_offload_with_options_does_what_they_say(tmp_path: Path) -> None:
    option = rekindle.offload(tier="disk", directory=tmp_path, quota=1.0, min_bytes=HIDDEN)
    spilled = seen_with(option).spill
    assert spilled.bytes_out == spilled.tensors_out * HIDDEN > 0


def test_a_policy_decides_by_op_in_every_block() -> None:
    assert total_with(policies.keep_matmuls) == times(PER_BLOCK["matmuls kept"])


def test_a_model_without_blocks_is_one_region() -> None:
    assert total_with("recompute", Mlp()).forwards == 1


def test_counts_are_those_of_checkpointing_each_block_by_hand() -> None:
    model = Stack(BLOCKS)
    with rekindle.observe() as seen:
        model(leaf(), run=rekindle.checkpoint).sum().backward()
    assert total_with("recompute", model) == seen.total


def test_each_region_is_counted_under_the_name_of_its_class() -> None:
    assert [name.split(".")[0] for name in seen_with("recompute").regions] == ["Block"]


# Applying again, removing


@every_way
def test_removing_restores_the_variables_of_every_module(what: Any) -> None:
    model = Stack(BLOCKS)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    rekindle.apply(model, what)
    rekindle.remove(model)
    after = {path: vars(module) for path, module in model.named_modules()}
    assert after == before
    assert step(model).total == Counts()


@every_way
def test_applying_again_replaces_what_was_applied(what: Any) -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, what)
    assert total_with("recompute", model) == times(PER_BLOCK["recompute"])
    rekindle.remove(model)
    assert managed(model) == []


def test_applying_twice_is_as_applying_once() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, "recompute")
    assert total_with("recompute", model) == times(PER_BLOCK["recompute"])


def test_removing_what_was_never_applied_does_nothing() -> None:
    model = Stack(BLOCKS)
    before = [dict(vars(module)) for module in model.modules()]
    rekindle.remove(model)
    assert [vars(module) for module in model.modules()] == before


def test_removing_twice_does_no_harm() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, "recompute")
    rekindle.remove(model)
    rekindle.remove(model)
    assert managed(model) == []


def test_strategies_can_be_removed_from_a_part() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, "recompute")
    rekindle.remove(model.blocks[0])
    assert step(model).total == times(PER_BLOCK["recompute"], 2)


def test_a_backward_after_remove_still_replays() -> None:
    model, x = Stack(BLOCKS), leaf()

    def removed() -> Tensor:
        rekindle.apply(model, {"blocks.*": "recompute", "blocks.*.mlp": "keep"})
        out: Tensor = model(x)
        rekindle.remove(model)
        return out

    assert_same_step(lambda: model(x), removed, [x, *model.parameters()])


def test_a_backward_after_another_apply_is_that_of_its_forward() -> None:
    model, x = Stack(BLOCKS), leaf()

    def changed() -> Tensor:
        rekindle.apply(model, "recompute")
        out: Tensor = model(x)
        rekindle.apply(model, SPILL_ONLY)
        return out

    plain = copy.deepcopy(model)
    assert_same_step(lambda: plain(x), changed, [x])
