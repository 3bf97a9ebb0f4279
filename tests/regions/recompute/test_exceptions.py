"""Exceptions in forward, replay and backward leave nothing behind."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.regions.recompute.left_behind import Boom, ambient_state, fails_in_replay
from tests.toys import assert_same_step


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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


@pytest.mark.parametrize(
    "options",
    [{}, {"debug": True}, {"determinism_check": "values"}, {"preserve_rng_state": False}],
    ids=str,
)
def test_nothing_is_left_behind_by_an_exception_in_replay(
    x: Tensor, options: dict[str, Any]
) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu"):
        y = rekindle.checkpoint(fails_in_replay, x, **options).sum()
    before = ambient_state()
    with pytest.raises(Boom):
        y.backward()
    assert ambient_state() == before


def test_nothing_is_left_behind_by_an_exception_in_an_inner_replay(x: Tensor) -> None:
    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(fails_in_replay, x.sin())

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
    y = rekindle.checkpoint(lambda x: fails_in_replay(norm(x)), x).sum()
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
