"""Every decision in eager on the CPU: what is held, run again, and sent to disk, exactly."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rekindle
from benchmarks.decoder import SHAPES, Block
from rekindle import CheckpointPolicy, policies
from rekindle.policies import (
    ATTENTION,
    MATMULS,
    Policy,
    first,
    keep,
    of,
    recompute,
    recompute_cheap,
    spill,
)
from tests.regions.selective.toy_regions import (
    DECISIONS,
    LENGTH,
    SIZE,
    answering,
    assert_plain,
    eight_waves,
    step,
)
from tests.toys import Mlp, leaf

aten = torch.ops.aten


KEPT = ("keep", True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
OFFLOADED = ("offload", CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
RECOMPUTED = (
    *("recompute", False, None),
    *(CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE),
)


@pytest.mark.parametrize("answer", KEPT, ids=repr)
def test_what_is_kept_is_held_and_not_run_again(answer: Any) -> None:
    seen = step(eight_waves, leaf(64), answering(answer)).total
    assert (seen.replays, seen.ops_replayed) == (0, 0)
    assert (seen.activations_held, seen.bytes_held) == (LENGTH, LENGTH * SIZE)  # `x` is one
    assert (seen.activations_dropped, seen.bytes_dropped) == (0, 0)


@pytest.mark.parametrize("answer", RECOMPUTED, ids=repr)
def test_what_is_recomputed_is_dropped_and_run_again_once(answer: Any) -> None:
    seen = step(eight_waves, leaf(64), answering(answer)).total
    assert (seen.replays, seen.ops_replayed) == (1, LENGTH - 1)
    assert (seen.activations_held, seen.bytes_held) == (1, SIZE)
    assert (seen.activations_dropped, seen.bytes_dropped) == (LENGTH - 1, (LENGTH - 1) * SIZE)


@pytest.mark.parametrize("answer", OFFLOADED, ids=repr)
def test_what_is_offloaded_from_the_cpu_is_not_moved_nor_run_again(answer: Any) -> None:
    seen = step(eight_waves, leaf(64), answering(answer))
    assert seen.offload.tensors_out == 0
    assert seen.total.ops_replayed == 0


@pytest.mark.parametrize("answer", OFFLOADED, ids=repr)
def test_what_is_offloaded_from_the_cpu_is_held_as_if_it_was_kept(answer: Any) -> None:
    assert (
        step(eight_waves, leaf(64), answering(answer)).total
        == step(eight_waves, leaf(64), keep()).total
    )


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
@pytest.mark.parametrize("policy", [answering("spill"), spill(), spill("aten::sin")], ids=repr)
def test_what_is_spilled_goes_to_disk_and_comes_back(policy: Policy) -> None:
    """The two that backward wants first stay."""
    gone = LENGTH - 1 - 2
    for _ in range(3):
        seen = step(eight_waves, leaf(64), policy)
        assert (seen.spill.tensors_out, seen.spill.bytes_out) == (gone, gone * SIZE)
        assert (seen.spill.tensors_in, seen.spill.bytes_in) == (gone, gone * SIZE)
        assert (seen.offload.tensors_out, seen.total.ops_replayed) == (0, 0)


@pytest.mark.parametrize("answer", [*KEPT, *RECOMPUTED, *OFFLOADED, "spill"], ids=repr)
def test_every_decision_has_the_plain_gradients(answer: Any) -> None:
    model, x = Mlp(), leaf(4, 8)
    assert_plain(model, answering(answer), x, *model.parameters())


def test_decisions_may_be_mixed() -> None:
    answers = ["keep", "recompute", "spill", "offload", None, True, "spill", "recompute"]

    def policy(ctx: Any, op: Any, *args: Any) -> Any:
        return answers[ctx.index]

    x = leaf(64)
    assert_plain(eight_waves, of(policy), x)
    assert step(eight_waves, x, of(policy)).total.ops_replayed == 2


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_first_so_many_are_held_and_the_others_run_again(count: int) -> None:
    seen = step(eight_waves, leaf(64), first(count, keep())).total
    assert seen.ops_replayed == LENGTH - 1 - count
    assert seen.bytes_held == (1 + count) * SIZE


def test_a_kept_result_is_held_once_however_often_it_is_used() -> None:
    def region(x: Tensor) -> Tensor:
        y = x.exp()
        return y.sin() * y.cos() * y.t().tanh() * y[:4].sum()

    seen = step(region, leaf(8, 8), keep("aten::exp")).total
    assert (seen.activations_held, seen.bytes_held) == (1, SIZE)  # `exp` does not need `x`


def test_a_view_of_what_is_kept_is_neither_held_twice_nor_run_again(ran: Counter[Any]) -> None:
    def region(x: Tensor) -> Tensor:
        return x.exp().view(4, 16).t()[2:].sin().exp()

    seen = step(region, leaf(64), keep("aten::exp")).total
    assert ran == {}
    assert seen.activations_held == 2  # both `exp`


def test_only_what_backward_asks_for_is_run_again(ran: Counter[Any]) -> None:
    x, mask = leaf(3), torch.ones(3)

    def region(x: Tensor) -> Tensor:
        for_the_log = x.sin().mean()
        assert for_the_log.detach().cos() <= 1
        needed = (x * mask).exp()  # `mul` saves its inputs, `exp` its result
        return needed + x.tanh().detach().log1p().abs()

    step(region, x, recompute())
    assert ran == {aten.mul.Tensor: 1, aten.exp.default: 1}


def test_of_two_branches_each_is_run_again_once_and_what_they_share_too(ran: Counter[Any]) -> None:
    def region(x: Tensor) -> Tensor:
        shared = x.exp()
        return shared.sin().cos() * shared.tanh().sinh()

    step(region, leaf(3), recompute())
    assert ran == {op.default: 1 for op in (aten.exp, aten.sin, aten.cos, aten.tanh, aten.sinh)}


def test_only_the_branch_whose_gradient_is_asked_for_is_run_again(ran: Counter[Any]) -> None:
    x, y = leaf(3), leaf(3)

    def region(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp(), y.cos().exp()

    left, right = rekindle.checkpoint(region, x, y, context_fn=recompute())
    left.sum().backward()
    assert ran == {aten.sin.default: 1, aten.exp.default: 1}
    right.sum().backward()
    assert ran == {aten.sin.default: 1, aten.exp.default: 2, aten.cos.default: 1}


def test_frozen_parts_are_not_run_again(ran: Counter[Any]) -> None:
    model, x = Mlp(), torch.randn(4, 8)
    model.up.requires_grad_(False)
    rekindle.checkpoint(model, x, context_fn=keep("aten::gelu")).sum().backward()
    assert aten.addmm.default not in ran
    assert aten.gelu.default not in ran


def test_a_second_backward_runs_everything_again(ran: Counter[Any]) -> None:
    x = leaf(3)
    loss = rekindle.checkpoint(eight_waves, x, context_fn=recompute()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert ran == {aten.sin.default: 2 * (LENGTH - 1)}


def decoder() -> tuple[Block, Tensor]:
    return Block(SHAPES["tiny"], dtype=torch.float32), leaf(1, 8, 32)


def forward_ops(block: Block, x: Tensor) -> Counter[Any]:
    """How often each op runs in forward."""
    found = Counter[Any]()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        found[op] += 1

    rekindle.checkpoint(block, x, context_fn=of(policy))
    return found


@pytest.mark.parametrize(
    "policy",
    [keep(MATMULS, ATTENTION), policies.keep_matmuls_and_attention, recompute_cheap],
    ids=["by hand", "keep_matmuls_and_attention", "recompute_cheap"],
)
def test_a_decoder_block_runs_no_product_and_no_attention_again(
    policy: Policy, ran: Counter[Any]
) -> None:
    block, x = decoder()
    forward = forward_ops(block, x)
    rekindle.checkpoint(block, x, context_fn=policy).sum().backward()
    assert forward[aten.mm.default] == 7
    assert not [op for op in ran if op.overloadpacket in MATMULS | ATTENTION]


@pytest.mark.parametrize(
    "policy",
    [recompute(), keep(MATMULS), policies.keep_matmuls_and_attention, recompute_cheap],
    ids=["recompute", "by hand", "keep_matmuls_and_attention", "recompute_cheap"],
)
def test_a_decoder_block_runs_no_op_again_twice(policy: Policy, ran: Counter[Any]) -> None:
    block, x = decoder()
    forward = forward_ops(block, x)
    rekindle.checkpoint(block, x, context_fn=policy).sum().backward()
    assert not ran - forward


def test_a_decoder_block_that_keeps_products_and_attention_runs_these_ops_again(
    ran: Counter[Any],
) -> None:
    """Of its two residuals the second is not needed, and views of what is held are held."""
    block, x = decoder()
    rekindle.checkpoint(block, x, context_fn=keep(MATMULS, ATTENTION)).sum().backward()
    assert (ran[aten.silu.default], ran[aten.rsqrt.default], ran[aten.mean.dim]) == (1, 2, 2)
    assert (ran[aten.cat.default], ran[aten.add.Tensor]) == (2, 5)
    assert ran[aten.mul.Tensor] == 13


@pytest.mark.parametrize(
    "policy",
    [
        *DECISIONS.values(),
        policies.keep_matmuls,
        policies.keep_attention,
        policies.keep_matmuls_and_attention,
        policies.keep_routing,
        recompute_cheap,
        spill(MATMULS) | keep(ATTENTION),
    ],
    ids=lambda policy: repr(policy)[:24],
)
def test_a_decoder_block_has_the_plain_gradients(policy: Policy) -> None:
    block, x = decoder()
    assert_plain(block, policy, x, *block.parameters())


@pytest.mark.parametrize("answer", ["keep", "offload", "spill"])
def test_what_nobody_needs_in_backward_is_never_held(answer: str) -> None:
    """Autograd saves nothing of an addition."""
    seen = step(lambda x: x + 1 + 2 + 3 + 4 + 5, leaf(64), answering(answer))
    assert (seen.total.activations_held, seen.spill.tensors_out) == (0, 0)


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_what_only_led_to_something_that_is_spilled_is_not_spilled() -> None:
    def region(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x + 1 + 2 + 3).exp()
        return x

    seen = step(region, leaf(64), spill())
    assert (seen.spill.tensors_out, seen.spill.bytes_out) == (4 - 2, (4 - 2) * SIZE)


def test_what_only_a_loss_of_no_gradient_needs_is_never_held() -> None:
    seen = step(lambda x: x * 2 + x.detach().sin().cos().exp(), leaf(64), keep())
    assert seen.total.activations_held == 0


def test_what_nobody_needs_is_let_go_while_the_region_still_runs() -> None:
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    def region(x: Tensor) -> Tensor:
        for _ in range(100):
            x = x + 1
            made.append(StorageWeakRef(x.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in made))
        return x

    rekindle.checkpoint(region, leaf(64), context_fn=keep())
    assert alive[0] <= 32  # looked through now and then, not after every op


def test_a_parameter_is_no_activation_and_neither_is_a_view_of_it() -> None:
    linear, x = nn.Linear(8, 8), leaf(4, 8)
    seen = step(lambda x: linear(x.sin()), x, keep()).total
    assert (seen.activations_held, seen.bytes_held) == (2, 2 * 4 * 8 * 4)  # `x` and its `sin`
