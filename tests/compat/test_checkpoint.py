"""`rekindle.compat.checkpoint`: torch's names, defaults and warnings, on our engine."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_module
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

import rekindle
from rekindle.compat import checkpoint as compat
from tests.toys import Mlp, Stack, assert_same_step, leaf, same_bits, wave

aten = torch.ops.aten
torchs_contexts = torch_module.create_selective_checkpoint_contexts
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def assert_no_hooks_are_left() -> None:
    """Torch refuses to disable saved-tensor hooks where some are in place."""
    with disable_saved_tensors_hooks("none should be here"):
        pass


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
