"""Every decision in eager on the CPU: what is held, run again, and sent to disk, exactly."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import rekindle
from benchmarks.decoder import SHAPES, Block
from rekindle import CheckpointPolicy, policies
from rekindle.policies import (
    ATTENTION,
    MATMULS,
    Policy,
    every,
    first,
    keep,
    of,
    offload,
    recompute,
    recompute_cheap,
    spill,
)
from rekindle.regions.selective.op_graph import RecordedOp
from tests.toys import Mlp, assert_same_step, same_bits

aten = torch.ops.aten
SIZE = 256
"""The bytes of every activation of `waves`: 64 numbers."""
LENGTH = 8
KEPT = ("keep", True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
OFFLOADED = ("offload", CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
RECOMPUTED = (
    *("recompute", False, None),
    *(CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE),
)
DECISIONS = {"keep": keep(), "recompute": recompute(), "offload": offload(), "spill": spill()}
DECISIONS["every second"] = every(2, keep())


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def waves(x: Tensor) -> Tensor:
    """Backward needs `x` and all results but the last."""
    for _ in range(LENGTH):
        x = x.sin()
    return x


def answering(answer: Any) -> Policy:
    return of(lambda *args, **kwargs: answer)


def step(function: Callable[..., Any], x: Tensor, policy: Policy) -> rekindle.Observation:
    """What is seen of a step of one region."""
    with rekindle.observe() as seen:
        rekindle.checkpoint(function, x, context_fn=policy).sum().backward()
    return seen


def assert_plain(function: Callable[..., Any], policy: Policy, *leaves: Tensor) -> None:
    """A region whose first argument is a leaf ends a step as the plain function does."""
    x = leaves[0]
    assert_same_step(
        lambda: function(x),
        lambda: rekindle.checkpoint(function, x, context_fn=policy),
        leaves,
    )


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often each op is run again."""
    again, ran = RecordedOp.rerun, Counter[Any]()

    def counted(self: RecordedOp, *args: Any) -> None:
        ran[self.func] += 1
        again(self, *args)

    monkeypatch.setattr(RecordedOp, "rerun", counted)
    return ran


@pytest.fixture(params=DECISIONS.values(), ids=DECISIONS.keys())
def decision(request: pytest.FixtureRequest) -> Policy:
    return request.param


@pytest.mark.parametrize("answer", KEPT, ids=repr)
def test_what_is_kept_is_held_and_not_run_again(answer: Any) -> None:
    seen = step(waves, leaf(64), answering(answer)).total
    assert (seen.replays, seen.ops_replayed) == (0, 0)
    assert (seen.activations_held, seen.bytes_held) == (LENGTH, LENGTH * SIZE)  # `x` is one
    assert (seen.activations_dropped, seen.bytes_dropped) == (0, 0)


@pytest.mark.parametrize("answer", RECOMPUTED, ids=repr)
def test_what_is_recomputed_is_dropped_and_run_again_once(answer: Any) -> None:
    seen = step(waves, leaf(64), answering(answer)).total
    assert (seen.replays, seen.ops_replayed) == (1, LENGTH - 1)
    assert (seen.activations_held, seen.bytes_held) == (1, SIZE)
    assert (seen.activations_dropped, seen.bytes_dropped) == (LENGTH - 1, (LENGTH - 1) * SIZE)


@pytest.mark.parametrize("answer", OFFLOADED, ids=repr)
def test_what_is_offloaded_from_the_cpu_is_not_moved_nor_run_again(answer: Any) -> None:
    seen = step(waves, leaf(64), answering(answer))
    assert seen.offload.tensors_out == 0
    assert seen.total.ops_replayed == 0


@pytest.mark.parametrize("answer", OFFLOADED, ids=repr)
def test_what_is_offloaded_from_the_cpu_is_held_as_if_it_was_kept(answer: Any) -> None:
    assert step(waves, leaf(64), answering(answer)).total == step(waves, leaf(64), keep()).total


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
@pytest.mark.parametrize("policy", [answering("spill"), spill(), spill("aten::sin")], ids=repr)
def test_what_is_spilled_goes_to_disk_and_comes_back(policy: Policy) -> None:
    """The two that backward wants first stay."""
    gone = LENGTH - 1 - 2
    for _ in range(3):
        seen = step(waves, leaf(64), policy)
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
    assert_plain(waves, of(policy), x)
    assert step(waves, x, of(policy)).total.ops_replayed == 2


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_first_so_many_are_held_and_the_others_run_again(count: int) -> None:
    seen = step(waves, leaf(64), first(count, keep())).total
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
    loss = rekindle.checkpoint(waves, x, context_fn=recompute()).sum()
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


@pytest.mark.parametrize("policy", [keep(), recompute(), spill(), recompute_cheap], ids=repr)
def test_a_parameters_memory_may_be_exchanged_between_forward_and_backward(policy: Policy) -> None:
    """Sharded training gathers parameters for forward, frees them, and gathers them again."""
    linear, x = nn.Linear(8, 8), leaf(4, 8)
    expected = torch.autograd.grad(linear(x.sin()).sum(), x)[0]
    out = rekindle.checkpoint(lambda x: linear(x.sin()), x, context_fn=policy)
    before = StorageWeakRef(linear.weight.untyped_storage())
    linear.weight.data = linear.weight.data.clone()
    assert before.expired()
    assert same_bits(torch.autograd.grad(out.sum(), x)[0], expected)


@pytest.mark.parametrize("drop", [functional.dropout, functional.alpha_dropout])
def test_dropout_has_the_plain_mask_whatever_is_decided(drop: Any, decision: Policy) -> None:
    x = leaf(64)
    assert_plain(lambda x: drop(drop(x.sin(), 0.5).exp(), 0.3).sin(), decision, x)


def test_a_fused_dropout_is_run_again_with_its_mask(ran: Counter[Any]) -> None:
    def region(x: Tensor) -> Tensor:
        return torch.native_dropout(x.sin(), 0.5, True)[0].exp()

    x = leaf(64)
    assert_plain(region, recompute(), x)
    assert ran[aten.native_dropout.default] == 1
    ran.clear()
    assert_plain(region, keep("aten::native_dropout"), x)
    assert ran == {aten.exp.default: 1}


def test_a_step_draws_as_many_numbers_as_the_plain_one_though_some_are_drawn_again() -> None:
    x = leaf(64)

    def region(x: Tensor) -> Tensor:
        return (x * torch.rand(64)).sin() * torch.rand_like(x) + torch.randperm(64)

    assert_plain(region, recompute(), x)
    assert_plain(region, first(1, keep()), x)


class Hooks(saved_tensors_hooks):
    """Hooks that hold each tensor as a double, and count."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.unpacked = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Tensor:
        self.packed.append(x)
        return x.double() + 1

    def _unpack(self, held: Tensor) -> Tensor:
        self.unpacked += 1
        return (held - 1).float()


def through(hooks: Any, function: Callable[..., Any], x: Tensor, policy: Policy) -> Tensor:
    with hooks:
        out: Tensor = rekindle.checkpoint(function, x, context_fn=policy)
    return out


def test_what_is_kept_passes_once_through_hooks_around_the_region() -> None:
    hooks, x = Hooks(), leaf(3)
    through(hooks, waves, x, first(3, keep())).sum().backward()
    assert len([packed for packed in hooks.packed if packed is not x]) == 3


def test_what_is_recomputed_does_not_pass_through_hooks_around_the_region() -> None:
    hooks, x = Hooks(), leaf(3)
    through(hooks, waves, x, recompute()).sum().backward()
    assert [packed for packed in hooks.packed if packed is not x] == []


def test_what_is_kept_comes_back_from_hooks_as_they_give_it() -> None:
    """Half a number is lost: the gradient is that of what the hooks give."""
    x = torch.full((3,), 1.5, requires_grad=True)
    hooks = saved_tensors_hooks(lambda x: x.detach().floor(), lambda x: x)
    out = through(hooks, lambda x: (x * 1.0).sin(), x, keep())
    (found,) = torch.autograd.grad(out.sum(), x)
    assert same_bits(found, torch.ones(3).cos())


def test_hooks_that_save_on_the_cpu_may_be_around_the_region(decision: Policy) -> None:
    x = leaf(3)
    assert_same_step(lambda: waves(x), lambda: through(save_on_cpu(), waves, x, decision), [x])


def test_hooks_inside_the_region_get_what_is_saved_there(decision: Policy) -> None:
    x, hooks = leaf(3), Hooks()

    def region(x: Tensor) -> Tensor:
        y = x.sin().exp()
        with save_on_cpu():
            y = y.sin().exp()
        with hooks:
            y = y.tanh()
        return y.sin().exp()

    hooks.packed.clear()
    rekindle.checkpoint(region, x, context_fn=decision).sum().backward()
    assert len(hooks.packed) == 1


@pytest.mark.parametrize("policy", [keep(), rekindle.policies.named("wave") | recompute()])
def test_ops_of_hooks_are_none_of_the_regions(policy: Policy) -> None:
    asked: list[Any] = []

    def noting(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        asked.append(op)

    def region(x: Tensor) -> Tensor:
        return rekindle.name(x.sin(), "wave").cos().sin()

    through(Hooks(), region, leaf(3), noting | policy)
    assert asked == [aten.sin.default, aten.cos.default, aten.sin.default]


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_what_is_kept_inside_an_offload_context_is_offloaded() -> None:
    with rekindle.observe() as seen:
        with rekindle.offload(tier="disk", quota=1.0, min_bytes=1):
            out = rekindle.checkpoint(waves, leaf(64), context_fn=first(LENGTH - 1, keep()))
        out.sum().backward()
    assert seen.spill.tensors_out == LENGTH - 1 - 2
    assert seen.total.ops_replayed == 0


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.sin().t(),
        lambda x: x.sin()[:, ::2],
        lambda x: x.sin().expand(2, 8, 8),
        lambda x: x.sin().to(torch.bfloat16),
        lambda x: torch.complex(x.sin(), x),
        lambda x: x.sin()[:0],
        lambda x: x.sin().sum(),
        lambda x: x.sin().to(memory_format=torch.preserve_format)[None].permute(2, 0, 1),
    ],
    ids=["transposed", "strided", "expanded", "bfloat16", "complex", "empty", "scalar", "permuted"],
)
def test_tensors_of_every_kind_come_back_from_disk(make: Callable[[Tensor], Tensor]) -> None:
    def region(x: Tensor) -> Tensor:
        y = make(x)
        return (y.sin() * y.exp()).abs().float().sum() * waves(x).sum()

    assert_plain(region, spill(), leaf(8, 8))


def test_a_recurrent_layer_has_the_plain_gradients(decision: Policy) -> None:
    """Its kernel leaves out what backward needs if gradients are off."""
    lstm, x = nn.LSTM(4, 4), leaf(3, 2, 4)
    assert_plain(lambda x: lstm(x.sin())[0].sin(), decision, x, *lstm.parameters())


def test_memory_that_is_written_past_the_dispatcher_is_not_made_again(decision: Policy) -> None:
    """As NumPy does, and every kernel of Triton: also into memory that begins as zeros."""

    def region(x: Tensor) -> Tensor:
        mask = torch.zeros(4)
        mask.numpy()[1:3] = 2
        return (x * mask).sin()

    assert_plain(region, decision, leaf(4))


def test_a_copy_that_is_written_past_the_dispatcher_is_not_made_again(decision: Policy) -> None:
    def region(x: Tensor) -> Tensor:
        mask = x.detach().clone()
        mask.numpy()[1:3] = 2
        return (x * mask).sin()

    assert_plain(region, decision, leaf(4))


def test_a_tensor_whose_data_is_exchanged_in_the_region_has_the_plain_gradients(
    decision: Policy,
) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.sin()
        y.data = y.data * 2
        return y.exp()

    assert_plain(region, decision, leaf(4))


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(4) / 3, lambda: torch.arange(4) / 3], ids=["factory", "division"]
)
def test_another_default_dtype_in_forward_holds_for_what_is_run_again(
    make: Callable[[], Tensor], decision: Policy
) -> None:
    def region(x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return (x * make()).exp()
        finally:
            torch.set_default_dtype(before)

    assert_plain(region, decision, torch.randn(4, dtype=torch.float64, requires_grad=True))


def test_parts_of_a_result_may_be_changed_that_do_not_say_they_are_views(decision: Policy) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.sin()
        z = (y + 1).exp()
        left, right = torch.unsafe_chunk(y, 2)
        del y
        return z + torch.cat([left.mul_(2), right])

    assert_plain(region, decision, leaf(4))


def test_a_parameter_that_the_region_changes_after_use_was_used_as_it_was(decision: Policy) -> None:
    weight, x = nn.Parameter(torch.ones(4)), leaf(4)

    def region(x: Tensor) -> Tensor:
        y = (x + weight).exp()
        with torch.no_grad():
            weight.mul_(1)
        return y

    assert_plain(region, decision, x, weight)


def test_buffers_end_as_without_a_region(decision: Policy) -> None:
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
    twin, x = copy.deepcopy(norm), leaf(8, 4)
    rekindle.checkpoint(norm, x, context_fn=decision).sin().sum().backward()
    twin(x).sin().sum().backward()
    for a, b in zip(norm.state_dict().values(), twin.state_dict().values(), strict=True):
        assert same_bits(a, b)


def test_a_backward_that_failed_can_be_run_again(decision: Policy) -> None:
    x, fails = leaf(4), [True]

    def hook(grad: Tensor) -> None:
        if fails.pop():
            raise ZeroDivisionError

    def region(x: Tensor) -> Tensor:
        y = x.sin().exp()
        y.register_hook(hook)
        return y.tanh().exp()

    loss = rekindle.checkpoint(region, x, context_fn=decision).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    fails[:] = [False] * 2
    loss.backward()
    assert same_bits(x.grad, torch.autograd.grad(region(x).sum(), x)[0])
