"""Exceptions in forward and in replay: everything is as before, and nothing is kept alive."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.toys import assert_same_step


class Boom(Exception):  # noqa: N818
    """Only these tests raise it."""


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ambient_state() -> tuple[Any, ...]:
    """All that a region may touch and must put back."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        rekindle.is_recomputing(),
        torch.get_rng_state().sum().item(),
    )


def test_nothing_is_left_behind_by_an_exception_in_forward(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu"):
            x.exp().sin()
            raise Boom

    before = ambient_state()
    with pytest.raises(Boom):
        rekindle.checkpoint(region, x)
    assert ambient_state() == before
    assert before[0] is None


@pytest.mark.parametrize("options", [{"debug": True}, {"determinism_check": "values"}], ids=str)
def test_nothing_is_left_behind_by_an_exception_in_forward_with(
    x: Tensor, options: dict[str, Any]
) -> None:
    def region(x: Tensor) -> Tensor:
        x.exp().sin()
        raise Boom

    before = ambient_state()
    with pytest.raises(Boom):
        rekindle.checkpoint(region, x, **options)
    assert ambient_state() == before


def test_nothing_is_left_behind_by_an_exception_in_an_inner_region(x: Tensor) -> None:
    def inner(x: Tensor) -> Tensor:
        x.exp()
        raise Boom

    before = ambient_state()
    with pytest.raises(Boom):
        rekindle.checkpoint(lambda x: rekindle.checkpoint(inner, x.exp()), x)
    assert ambient_state() == before


def _fails_in_replay(x: Tensor) -> Tensor:
    x = x.exp()
    if rekindle.is_recomputing():
        raise Boom
    return x.sin()


@pytest.mark.parametrize(
    "options",
    [{}, {"debug": True}, {"determinism_check": "values"}, {"preserve_rng_state": False}],
    ids=str,
)
def test_nothing_is_left_behind_by_an_exception_in_replay(
    x: Tensor, options: dict[str, Any]
) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu"):
        y = rekindle.checkpoint(_fails_in_replay, x, **options).sum()
    before = ambient_state()
    with pytest.raises(Boom):
        y.backward()
    assert ambient_state() == before


def test_nothing_is_left_behind_by_an_exception_in_an_inner_replay(x: Tensor) -> None:
    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(_fails_in_replay, x.sin())

    y = rekindle.checkpoint(outer, x).sum()
    before = ambient_state()
    with pytest.raises(Boom):
        y.backward()
    assert ambient_state() == before


def test_nothing_is_left_behind_by_a_mismatch(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        return (x.exp() if rekindle.is_recomputing() else x.repeat(2, 1).exp()).sin()

    y = rekindle.checkpoint(region, x).sum()
    before = ambient_state()
    with pytest.raises(rekindle.CheckpointError):
        y.backward()
    assert ambient_state() == before


def test_a_region_works_again_after_an_exception_in_forward(x: Tensor) -> None:
    fail = [True]

    def region(x: Tensor) -> Tensor:
        y = x.exp()
        if fail[0]:
            raise Boom
        return y.sin()

    with pytest.raises(Boom):
        rekindle.checkpoint(region, x)
    fail[0] = False
    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_backward_works_when_it_is_called_again_after_an_exception_in_replay(x: Tensor) -> None:
    fail = [True]

    def region(x: Tensor) -> Tensor:
        y = x.exp()
        if rekindle.is_recomputing() and fail[0]:
            raise Boom
        return y.sin()

    y = rekindle.checkpoint(region, x).sum()
    with pytest.raises(Boom):
        y.backward(retain_graph=True)
    fail[0] = False
    y.backward()
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    assert torch.equal(x.grad, expected)


def test_a_module_is_as_before_after_an_exception_in_replay(x: Tensor) -> None:
    norm = nn.BatchNorm1d(8)
    y = rekindle.checkpoint(lambda x: _fails_in_replay(norm(x)), x).sum()
    before = {name: b.clone() for name, b in norm.named_buffers()}
    norm.eval()
    with pytest.raises(Boom):
        y.backward()
    assert not norm.training
    assert all(torch.equal(b, before[name]) for name, b in norm.named_buffers())


# Memory


def test_an_exception_in_forward_keeps_nothing_alive(collector_off: None) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def region(x: Tensor) -> Tensor:
        y = x.exp().sin()
        alive.extend((weakref.ref(x), weakref.ref(y)))
        raise Boom

    with suppress(Boom):
        rekindle.checkpoint(region, torch.randn(4, requires_grad=True) * 2)
    assert [r() for r in alive] == [None, None]


def test_an_exception_in_replay_keeps_nothing_alive_once_the_output_dies(
    collector_off: None,
) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def region(x: Tensor) -> Tensor:
        y = x.exp()
        alive.extend((weakref.ref(x), weakref.ref(y)))
        if rekindle.is_recomputing():
            raise Boom
        return y.sin()

    y = rekindle.checkpoint(region, torch.randn(4, requires_grad=True) * 2).sum()
    with suppress(Boom):
        y.backward()
    del y
    assert [r() for r in alive] == [None] * 4


def test_a_mismatch_keeps_nothing_alive_once_the_output_dies(collector_off: None) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def region(x: Tensor) -> Tensor:
        y = (x[:2] if rekindle.is_recomputing() else x).exp()
        alive.extend((weakref.ref(x), weakref.ref(y)))
        return y.sin()

    y = rekindle.checkpoint(region, torch.randn(4, requires_grad=True) * 2).sum()
    with suppress(rekindle.CheckpointError):
        y.backward()
    del y
    assert [r() for r in alive] == [None] * len(alive)


def test_a_replay_without_early_stop_keeps_nothing_alive(collector_off: None) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def region(x: Tensor) -> Tensor:
        y = x.exp()
        alive.append(weakref.ref(y))
        return y.sin()

    x = torch.randn(4, requires_grad=True)
    rekindle.checkpoint(region, x, early_stop=False).sum().backward()
    assert [r() for r in alive] == [None, None]


def test_a_replay_that_ends_with_a_loose_save_keeps_nothing_alive(collector_off: None) -> None:
    """The last op saves a tensor without a gradient: the replay runs to its end."""

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x > 0, x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            mask, x = ctx.saved_tensors
            return 2 * grad * x * mask

    alive: list[weakref.ref[Tensor]] = []

    def region(x: Tensor) -> Tensor:
        y = x.exp()
        alive.append(weakref.ref(y))
        return Masked.apply(y)

    rekindle.checkpoint(region, torch.randn(4, requires_grad=True)).sum().backward()
    assert [r() for r in alive] == [None, None]


# Contexts of context_fn


@contextmanager
def _fails_to_enter() -> Iterator[None]:
    raise Boom
    yield


@contextmanager
def _fails_to_leave() -> Iterator[None]:
    yield
    raise Boom


def _noted(log: list[str], name: str) -> AbstractContextManager[None]:
    @contextmanager
    def context() -> Iterator[None]:
        log.append(f"enter {name}")
        try:
            yield
        finally:
            log.append(f"leave {name}")

    return context()


def test_a_context_fn_that_fails_leaves_nothing_behind(x: Tensor) -> None:
    def context_fn() -> Any:
        raise Boom

    before = ambient_state()
    with pytest.raises(Boom):
        rekindle.checkpoint(torch.exp, x, context_fn=context_fn)
    assert ambient_state() == before


@pytest.mark.parametrize("failing", [_fails_to_enter, _fails_to_leave])
def test_a_forward_context_that_fails_leaves_nothing_behind(x: Tensor, failing: Any) -> None:
    before = ambient_state()
    with pytest.raises(Boom):
        rekindle.checkpoint(torch.exp, x, context_fn=lambda: (failing(), nullcontext()))
    assert ambient_state() == before


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("failing", [_fails_to_enter, _fails_to_leave])
def test_a_replay_context_that_fails_leaves_nothing_behind(
    x: Tensor, failing: Any, early_stop: bool
) -> None:
    y = rekindle.checkpoint(
        lambda x: x.exp().sin(),
        x,
        context_fn=lambda: (nullcontext(), failing()),
        early_stop=early_stop and failing is _fails_to_enter,
    ).sum()
    before = ambient_state()
    with pytest.raises(Boom):
        y.backward()
    assert ambient_state() == before


def test_both_contexts_are_left_when_the_region_fails(x: Tensor) -> None:
    log: list[str] = []
    y = rekindle.checkpoint(
        _fails_in_replay, x, context_fn=lambda: (_noted(log, "forward"), _noted(log, "replay"))
    ).sum()
    with pytest.raises(Boom):
        y.backward()
    assert log == ["enter forward", "leave forward", "enter replay", "leave replay"]


def test_the_forward_context_is_left_when_the_forward_fails(x: Tensor) -> None:
    log: list[str] = []

    def region(x: Tensor) -> Tensor:
        raise Boom

    with pytest.raises(Boom):
        rekindle.checkpoint(
            region, x, context_fn=lambda: (_noted(log, "forward"), _noted(log, "replay"))
        )
    assert log == ["enter forward", "leave forward"]


def test_the_replay_context_is_left_when_the_replay_stops_early(x: Tensor) -> None:
    log: list[str] = []
    rekindle.checkpoint(
        lambda x: x.exp().sin().sum(),
        x,
        context_fn=lambda: (_noted(log, "forward"), _noted(log, "replay")),
    ).backward()
    assert log == ["enter forward", "leave forward", "enter replay", "leave replay"]


# User code that catches, while a replay stops early


def test_except_exception_does_not_catch_the_early_stop(x: Tensor) -> None:
    caught = []

    def region(x: Tensor) -> Tensor:
        try:
            return x.exp().sin()
        except Exception as error:  # noqa: BLE001
            caught.append(error)
            return x

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])
    assert caught == []


def test_a_region_that_catches_base_exceptions_has_the_plain_gradient(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        try:
            y = x.exp().sin()
        except BaseException:  # noqa: BLE001
            y = x
        return y + 1

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_region_that_catches_base_exceptions_and_goes_on_has_the_plain_gradient(
    x: Tensor,
) -> None:
    def region(x: Tensor) -> Tensor:
        y = x
        with suppress(BaseException):
            y = x.exp().sin()
        (y * y).cos()  # saves for a backward that nobody runs
        return y + 1

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_region_that_catches_base_exceptions_and_then_fails_has_the_plain_gradient(
    x: Tensor,
) -> None:
    """The replay has all it needs; what the region makes of a swallowed stop is its own affair."""

    def region(x: Tensor) -> Tensor:
        with suppress(BaseException):
            y = x.exp().sin()
        return y + 1

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_an_error_is_still_an_error_when_the_region_caught_one_before(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        with suppress(BaseException):
            x.exp()
            raise Boom
        y = x.exp()
        if rekindle.is_recomputing():
            raise Boom
        return y.sin()

    y = rekindle.checkpoint(region, x).sum()
    with pytest.raises(Boom):
        y.backward()


def test_ops_in_a_finally_block_do_not_disturb_the_early_stop(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        try:
            return x.exp().sin()
        finally:
            (x * x).cos()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_ops_in_the_exit_of_a_context_do_not_disturb_the_early_stop(x: Tensor) -> None:
    class Logging:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            (x * x).cos().sum()

    def region(x: Tensor) -> Tensor:
        with Logging():
            return x.exp().sin()

    y = rekindle.checkpoint(region, x)
    y.sum().backward()
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    assert torch.equal(x.grad, expected)


def test_a_generator_inside_a_region_lets_the_early_stop_through(x: Tensor) -> None:
    def layers(x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            x = x.exp().sin()
            yield x

    def region(x: Tensor) -> Tensor:
        return list(layers(x))[-1]

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_context_made_by_a_generator_lets_the_early_stop_through(x: Tensor) -> None:
    @contextmanager
    def scope() -> Iterator[None]:
        yield

    def region(x: Tensor) -> Tensor:
        with scope(), scope():
            return x.exp().sin()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_stop_iteration_of_the_users_is_not_taken_for_ours(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.exp()
        if rekindle.is_recomputing():
            raise StopIteration("the user's")
        return y.sin()

    y = rekindle.checkpoint(region, x).sum()
    with pytest.raises(StopIteration, match="the user's"):
        y.backward()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_in_forward_passes_and_leaves_nothing_behind(
    x: Tensor, kind: type[BaseException]
) -> None:
    def region(x: Tensor) -> Tensor:
        x.exp()
        raise kind

    before = ambient_state()
    with pytest.raises(kind):
        rekindle.checkpoint(region, x)
    assert ambient_state() == before


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_in_replay_passes_and_leaves_nothing_behind(
    x: Tensor, kind: type[BaseException]
) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.exp()
        if rekindle.is_recomputing():
            raise kind
        return y.sin()

    y = rekindle.checkpoint(region, x).sum()
    before = ambient_state()
    with pytest.raises(kind):
        y.backward()
    assert ambient_state() == before


def test_the_users_exception_in_replay_arrives_as_it_was_raised(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.exp()
        if rekindle.is_recomputing():
            raise Boom("the user's", 42)
        return y.sin()

    y = rekindle.checkpoint(region, x).sum()
    with pytest.raises(Boom) as caught:
        y.backward()
    assert caught.value.args == ("the user's", 42)


def test_an_exception_in_a_saved_tensor_hook_of_the_user_leaves_nothing_behind(x: Tensor) -> None:
    def pack(x: Tensor) -> Tensor:
        raise Boom

    before = ambient_state()
    with pytest.raises(Boom), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        rekindle.checkpoint(torch.exp, x)
    assert ambient_state() == before


def test_an_exception_in_backward_after_the_replay_keeps_nothing_alive(
    collector_off: None,
) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise Boom

    alive: list[weakref.ref[Tensor]] = []

    def region(x: Tensor) -> Tensor:
        y = Fails.apply(x.exp())
        alive.append(weakref.ref(y))
        return y.sin()

    y = rekindle.checkpoint(region, torch.randn(4, requires_grad=True) * 2).sum()
    with suppress(Boom):
        y.backward()
    del y
    assert [r() for r in alive] == [None, None]
