"""`rekindle.compat.checkpoint`: torch's names, defaults and warnings, on our engine."""

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import pytest
import torch
import torch.utils.checkpoint as torch_module
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.compat import checkpoint as compat
from rekindle.compat.checkpoint import (
    CheckpointPolicy,
    _checkpoint_without_reentrant_generator,
    create_selective_checkpoint_contexts,
)
from tests.toys import Mlp, Stack, assert_same_step, same_bits

aten = torch.ops.aten
torchs_contexts = torch_module.create_selective_checkpoint_contexts
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def wave(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


def assert_no_hooks_are_left() -> None:
    """Torch refuses to disable saved-tensor hooks where some are in place."""
    with disable_saved_tensors_hooks("none should be here"):
        pass


# The default and its warning


def test_use_reentrant_not_given_warns_once_a_call() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compat.checkpoint(wave, leaf(3))
    assert [(w.category, w.filename) for w in caught] == [(UserWarning, __file__)]
    assert "use_reentrant" in str(caught[0].message)


def test_use_reentrant_not_given_is_reentrant() -> None:
    with pytest.warns(UserWarning, match="use_reentrant"):
        out = compat.checkpoint(wave, leaf(3))
    assert out.grad_fn.name() == "CheckpointFunctionBackward"


def test_use_reentrant_not_given_warns_once_for_all_segments() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compat.checkpoint_sequential([torch.sin] * 4, 4, leaf(3))
    assert [(w.category, w.filename) for w in caught] == [(UserWarning, __file__)]


def test_use_reentrant_not_given_makes_the_segments_reentrant() -> None:
    with pytest.warns(UserWarning, match="use_reentrant"):
        out = compat.checkpoint_sequential([torch.sin, torch.exp], 2, leaf(3))
    assert out.grad_fn.next_functions[0][0].name() == "CheckpointFunctionBackward"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_use_reentrant_given_does_not_warn(use_reentrant: bool) -> None:
    """Warnings are errors in these tests."""
    compat.checkpoint(wave, leaf(3), use_reentrant=use_reentrant).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_step_is_as_plain(use_reentrant: bool) -> None:
    block, x = Mlp(drop=0.3), leaf(2, 8)
    assert_same_step(
        lambda: block(x),
        lambda: compat.checkpoint(block, x, use_reentrant=use_reentrant),
        [x, *block.parameters()],
    )


def test_early_stop_and_debug_and_the_check_reach_the_engine() -> None:
    x = leaf(3)
    with rekindle.observe() as seen:
        compat.checkpoint(wave, x, use_reentrant=False, early_stop=False).sum().backward()
    assert seen.total.ops_replayed == 3
    with pytest.raises(ValueError, match="determinism_check"):
        compat.checkpoint(wave, x, use_reentrant=False, determinism_check="bogus")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_preserve_rng_state_off_lets_the_replay_draw_anew(use_reentrant: bool) -> None:
    masks: list[Tensor] = []

    def noisy(x: Tensor) -> Tensor:
        masks.append(torch.rand(4))
        return (x * masks[-1]).exp().sin()

    out = compat.checkpoint(noisy, leaf(4), use_reentrant=use_reentrant, preserve_rng_state=False)
    out.sum().backward()
    assert len(masks) == 2
    assert not torch.equal(*masks)


# What it refuses, as torch does


def test_a_reentrant_region_refuses_keyword_arguments() -> None:
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        compat.checkpoint(wave, leaf(3), use_reentrant=True, scale=2)


@pytest.mark.parametrize("option", [{"debug": True}, {"context_fn": lambda: (None, None)}])
def test_a_reentrant_region_refuses_context_fn_and_debug(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        compat.checkpoint(wave, leaf(3), use_reentrant=True, **option)


def test_a_keyword_that_the_function_does_not_take_is_its_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        compat.checkpoint(wave, leaf(3), use_reentrant=False, scale=2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_sequential_refuses_unknown_keywords(use_reentrant: bool) -> None:
    with pytest.raises(ValueError, match="Unexpected keyword arguments: chunks,debug"):
        compat.checkpoint_sequential(
            [wave], 1, leaf(3), use_reentrant=use_reentrant, debug=True, chunks=3
        )


# checkpoint_sequential


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_sequential_trains_as_plain(use_reentrant: bool) -> None:
    layers, x = nn.Sequential(*Stack(5, drop=0.2).blocks), leaf(2, 8)
    assert_same_step(
        lambda: layers(x),
        lambda: compat.checkpoint_sequential(
            layers, 3, x, use_reentrant=use_reentrant, preserve_rng_state=True
        ),
        [x, *layers.parameters()],
    )


def test_all_segments_but_the_last_are_regions() -> None:
    with rekindle.observe() as seen:
        compat.checkpoint_sequential([wave] * 7, 3, leaf(3), use_reentrant=False).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (2, 2)


# Torch's selective contexts on our engine


class OpLog(TorchDispatchMode):
    """Notes the ops that come this far; reusable."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class Both(ExitStack):
    """Two contexts as one, the second inside the first."""

    def __init__(self, outer: Any, inner: Any) -> None:
        super().__init__()
        self.contexts = outer, inner

    def __enter__(self) -> Self:
        for context in self.contexts:
            self.enter_context(context)
        return self


def matmuls(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(torch.matmul(torch.matmul(x, w).sin(), w)).exp() * w


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def save_exp(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is aten.exp.default


def save_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE


def save_none(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


POLICIES = {
    "list": ([aten.mm.default], {aten.mm.default}),
    "function": (save_matmuls, {aten.mm.default}),
    "bool": (save_exp, {aten.exp.default}),
    "all": (save_all, {aten.mm.default, aten.sin.default, aten.sigmoid.default, aten.exp.default}),
    "none": (save_none, set()),
}
every_policy = pytest.mark.parametrize(("policy", "saved"), POLICIES.values(), ids=POLICIES)


def selective(policy: Any, log: OpLog | None = None, **options: Any) -> Callable[[], Contexts]:
    """The contexts for a policy; `log` sees what is run in the replay, and not what is kept."""

    def contexts() -> Contexts:
        forward, replay = create_selective_checkpoint_contexts(policy, **options)
        return forward, replay if log is None else Both(log, replay)

    return contexts


@every_policy
def test_selective_contexts_give_plain_gradients(policy: Any, saved: set[Any]) -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    assert_same_step(
        lambda: matmuls(x, w),
        lambda: compat.checkpoint(matmuls, x, w, use_reentrant=False, context_fn=selective(policy)),
        [x, w],
    )


@every_policy
def test_a_replay_runs_the_ops_that_the_policy_did_not_save(policy: Any, saved: set[Any]) -> None:
    log = OpLog()
    options: dict[str, Any] = {"use_reentrant": False, "early_stop": False}
    contexts = selective(policy, log)
    out = compat.checkpoint(matmuls, leaf(4, 4), leaf(4, 4), context_fn=contexts, **options)
    out.sum().backward()
    run = [op for op in log.ops if op is not aten.detach.default]  # the modes ignore it
    mm, sin, sigmoid = aten.mm.default, aten.sin.default, aten.sigmoid.default
    ops = [mm, sin, mm, sigmoid, aten.exp.default, aten.mul.Tensor]
    expected = [op for op in ops if op not in saved]
    assert run == ([] if policy is save_all else expected)


@pytest.mark.parametrize(("policy", "ops"), [([aten.mm.default], 3), (save_none, 5)])
def test_ops_that_were_saved_do_not_count_as_replayed(policy: Any, ops: int) -> None:
    """Of mm, sin, mm, sigmoid, exp, mul; the last is not needed."""
    contexts = selective(policy)
    with rekindle.observe() as seen:
        out = compat.checkpoint(
            matmuls, leaf(4, 4), leaf(4, 4), use_reentrant=False, context_fn=contexts
        )
        out.sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)
    assert seen.total.ops_replayed == ops


def test_saved_ops_of_a_stack_are_as_plain_with_dropout() -> None:
    model, x = Stack(3, drop=0.3), leaf(2, 8)
    contexts = functools.partial(create_selective_checkpoint_contexts, [aten.addmm.default])
    assert_same_step(
        lambda: model(x),
        lambda: model(x, lambda block, x: rekindle.checkpoint(block, x, context_fn=contexts)),
        [x, *model.parameters()],
    )


@pytest.mark.parametrize("create", [create_selective_checkpoint_contexts, torchs_contexts])
def test_a_second_backward_over_selective_contexts_gives_the_same(create: Any) -> None:
    """Field note 10: torch's engine allows one."""
    x, w = leaf(4, 4), leaf(4, 4)
    contexts = functools.partial(create, [aten.mm.default])
    out = compat.checkpoint(matmuls, x, w, use_reentrant=False, context_fn=contexts).sum()
    one = torch.autograd.grad(out, (x, w), retain_graph=True)
    other = torch.autograd.grad(out, (x, w))
    assert all(map(same_bits, one, other))


def mutates_what_is_kept(x: Tensor) -> Tensor:
    return torch.mm(x, x).sin_().exp()


@pytest.mark.parametrize("create", [create_selective_checkpoint_contexts, torchs_contexts])
def test_a_kept_tensor_that_is_changed_in_place_is_kept_as_it_was(create: Any) -> None:
    """Field note 14: torch raises."""
    x = leaf(4, 4)
    contexts = functools.partial(create, [aten.mm.default])
    assert_same_step(
        lambda: mutates_what_is_kept(x),
        lambda: rekindle.checkpoint(mutates_what_is_kept, x, context_fn=contexts),
        [x],
    )


def test_the_modes_by_themselves_refuse_a_kept_tensor_that_was_changed_in_place() -> None:
    contexts = selective([aten.mm.default], OpLog())
    out = rekindle.checkpoint(mutates_what_is_kept, leaf(4, 4), context_fn=contexts)
    with pytest.raises(rekindle.CheckpointError, match="changed in place"):
        out.sum().backward()


def test_the_modes_run_under_torchs_own_checkpoint() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    assert_same_step(
        lambda: matmuls(x, w),
        lambda: torch_module.checkpoint(
            matmuls, x, w, use_reentrant=False, context_fn=selective([aten.mm])
        ),
        [x, w],
    )


def test_a_subclass_of_torchs_private_modes_runs_on_our_engine() -> None:
    """As xformers has one."""
    asked: list[Any] = []

    class Noting(compat._CachingTorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def contexts() -> Contexts:
        forward, replay = create_selective_checkpoint_contexts(save_matmuls)
        return Noting(save_matmuls, forward.storage), replay

    x, w = leaf(4, 4), leaf(4, 4)
    assert_same_step(
        lambda: matmuls(x, w),
        lambda: rekindle.checkpoint(matmuls, x, w, context_fn=contexts),
        [x, w],
    )
    assert asked.count(aten.mm.default) == 2


def test_selective_contexts_under_no_grad_are_not_entered() -> None:
    log = OpLog()
    with torch.no_grad():
        compat.checkpoint(
            matmuls, leaf(4, 4), leaf(4, 4), use_reentrant=False, context_fn=lambda: (log, log)
        )
    assert log.ops == []


# The generator that torch's composable form drives


def test_the_generator_makes_a_region_of_what_runs_between_its_two_steps() -> None:
    x = leaf(3)
    with rekindle.observe() as seen:
        region = _checkpoint_without_reentrant_generator(
            wave, True, compat.noop_context_fn, "default", False, True, x
        )
        next(region)
        out = wave(x)
        with pytest.raises(StopIteration):
            next(region)
        (grad,) = torch.autograd.grad(out.sum(), [x])
    assert (seen.total.forwards, seen.total.replays) == (1, 1)
    assert same_bits(grad, torch.autograd.grad(wave(x).sum(), [x])[0])


def test_what_runs_after_the_generators_second_step_is_outside_the_region() -> None:
    x, calls = leaf(3), []

    def noted(x: Tensor) -> Tensor:
        calls.append("run")
        return x.sin()

    region = _checkpoint_without_reentrant_generator(noted, True, compat.noop_context_fn)
    next(region)
    next(region, None)
    noted(x).sum().backward()
    assert calls == ["run"]


def test_the_generator_takes_keyword_arguments_of_the_region() -> None:
    x = leaf(3)

    def scaled(x: Tensor, by: float) -> Tensor:
        return (x * by).exp().sin()

    region = _checkpoint_without_reentrant_generator(
        scaled, True, compat.noop_context_fn, "default", False, True, x, by=3.0
    )
    next(region)
    out = scaled(x, by=3.0)
    next(region, None)
    (grad,) = torch.autograd.grad(out.sum(), [x])
    assert same_bits(grad, torch.autograd.grad(scaled(x, 3.0).sum(), [x])[0])


def test_the_generator_under_no_grad_makes_no_region() -> None:
    with torch.no_grad(), rekindle.observe() as seen:
        region = _checkpoint_without_reentrant_generator(wave)
        next(region)
        assert_no_hooks_are_left()
        with pytest.raises(StopIteration):
            next(region)
    assert seen.total.forwards == 0


def test_an_error_thrown_into_the_generator_comes_out_and_ends_the_region() -> None:
    region = _checkpoint_without_reentrant_generator(wave)
    next(region)
    with pytest.raises(ZeroDivisionError):
        region.throw(ZeroDivisionError("in the region"))
    assert_no_hooks_are_left()


def test_a_generator_that_is_closed_ends_the_region() -> None:
    region = _checkpoint_without_reentrant_generator(wave)
    next(region)
    region.close()
    assert_no_hooks_are_left()


def test_the_generator_runs_the_forward_context_around_the_region() -> None:
    events: list[str] = []

    @contextmanager
    def noted(name: str) -> Any:
        events.append(f"enter {name}")
        yield
        events.append(f"leave {name}")

    x = leaf(3)
    region = _checkpoint_without_reentrant_generator(
        wave, True, lambda: (noted("forward"), noted("replay")), "none", False, False, x
    )
    next(region)
    out = wave(x)
    next(region, None)
    assert events == ["enter forward", "leave forward"]
    out.sum().backward()
    assert events[2:] == ["enter replay", "leave replay"]


def test_the_generator_refuses_a_wrong_option_at_its_first_step() -> None:
    region = _checkpoint_without_reentrant_generator(wave, determinism_check="bogus")
    with pytest.raises(ValueError, match="determinism_check"):
        next(region)


# Torch's objects with ours


def test_torchs_exec_group_lets_our_region_replay_once() -> None:
    x, w = leaf(3), leaf(3)
    a, b = compat.checkpoint(lambda x, w: (wave(x), wave(w)), x, w, use_reentrant=False)
    with rekindle.observe() as seen, torch_module.GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert seen.total.replays == 1
    plain = torch.autograd.grad(wave(x).sum() + wave(w).sum(), [x, w])
    assert all(map(same_bits, [x.grad, w.grad], plain))


def test_our_exec_group_lets_torchs_region_replay_once() -> None:
    x, w, calls = leaf(3), leaf(3), []

    def branches(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        calls.append("run")
        return wave(x), wave(w)

    a, b = torch_module.checkpoint(branches, x, w, use_reentrant=False)
    with rekindle.GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert calls == ["run", "run"]


@pytest.mark.parametrize("ours_outside", [False, True])
def test_our_regions_nest_with_torchs(ours_outside: bool) -> None:
    both = [compat.checkpoint, torch_module.checkpoint]
    outer, inner = both if ours_outside else reversed(both)
    model, x = Mlp(drop=0.3), leaf(2, 8)

    def nested(x: Tensor) -> Tensor:
        return inner(model, x.sin(), use_reentrant=False).exp()

    assert_same_step(
        lambda: model(x.sin()).exp(),
        lambda: outer(nested, x, use_reentrant=False),
        [x, *model.parameters()],
    )


def test_noop_contexts_are_those_of_torch() -> None:
    assert [type(context) for context in compat.noop_context_fn()] == [nullcontext, nullcontext]
