"""`rekindle.patch_torch()`: names are replaced where modules hold them, until it is undone."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrappers

import rekindle
from rekindle.compat import checkpoint as compat
from rekindle.compat import checkpoint_wrapper as compat_wrappers
from tests.compat.patching import (
    REPLACED,
    TOOK_IT,
    Make,
    attributes,
    count_ends,
    differing,
    torch_module,
    torchs_checkpoint,
)
from tests.toys import leaf, same_bits, wave

# In place, and undone


def test_inside_the_context_torchs_names_are_ours() -> None:
    with rekindle.patch_torch():
        for name in torch_module.__all__:
            assert getattr(torch_module, name) is getattr(compat, name)


def test_inside_the_context_torchs_private_names_are_ours() -> None:
    with rekindle.patch_torch():
        generator = torch_module._checkpoint_without_reentrant_generator
        assert generator is compat._checkpoint_without_reentrant_generator
        assert torch_module._infer_device_type is compat._infer_device_type


def test_inside_the_context_torchs_wrappers_are_ours() -> None:
    with rekindle.patch_torch():
        for name in compat_wrappers.__all__:
            assert getattr(torch_wrappers, name) is getattr(compat_wrappers, name)


def test_after_the_context_every_attribute_is_as_before() -> None:
    before = attributes()
    with rekindle.patch_torch():
        assert len(differing(before)) >= len(REPLACED)
    assert differing(before) == []


def test_a_call_stays_until_it_is_undone() -> None:
    before = attributes()
    patch = rekindle.patch_torch()
    try:
        assert torch_module.checkpoint is compat.checkpoint
    finally:
        patch.undo()
    assert differing(before) == []


def test_an_exception_inside_undoes_it_too() -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError), rekindle.patch_torch():
        raise ZeroDivisionError
    assert differing(before) == []


def test_a_failing_step_inside_undoes_it_too() -> None:
    before = attributes()

    def fails(x: Tensor) -> Tensor:
        if rekindle.is_recomputing():
            raise ZeroDivisionError
        return wave(x)

    def step() -> None:
        with rekindle.patch_torch():
            torch_module.checkpoint(fails, leaf(3), use_reentrant=False).sum().backward()

    with pytest.raises(ZeroDivisionError):
        step()
    assert differing(before) == []


def test_an_inner_patch_undoes_nothing() -> None:
    before = attributes()
    with rekindle.patch_torch():
        with rekindle.patch_torch():
            assert torch_module.checkpoint is compat.checkpoint
        assert torch_module.checkpoint is compat.checkpoint
    assert differing(before) == []


def test_an_inner_patch_inside_one_that_was_called_undoes_nothing() -> None:
    patch = rekindle.patch_torch()
    try:
        with rekindle.patch_torch():
            pass
        assert torch_module.checkpoint is compat.checkpoint
    finally:
        patch.undo()


def test_undoing_a_second_time_does_nothing() -> None:
    patch = rekindle.patch_torch()
    patch.undo()
    with rekindle.patch_torch():
        patch.undo()
        assert torch_module.checkpoint is compat.checkpoint
    assert torch_module.checkpoint is torchs_checkpoint


def test_it_can_be_patched_again() -> None:
    before = attributes()
    for _ in range(3):
        with rekindle.patch_torch(), rekindle.observe() as seen:
            torch_module.checkpoint(wave, leaf(3), use_reentrant=False)
        assert seen.total.forwards == 1
    assert differing(before) == []


def test_what_the_user_put_in_torchs_place_meanwhile_is_not_ours_to_keep() -> None:
    """The last word is the original's: undoing gives back what was there before the patch."""
    with rekindle.patch_torch():
        torch_module.checkpoint = wave
    assert torch_module.checkpoint is torchs_checkpoint


def test_a_region_of_the_patch_is_replayed_after_it() -> None:
    x = leaf(3)
    with rekindle.observe() as seen:
        with rekindle.patch_torch():
            out = torch_module.checkpoint(wave, x, use_reentrant=False)
        out.sum().backward()
    assert seen.total.replays == 1
    assert same_bits(x.grad, torch.autograd.grad(wave(x).sum(), [x])[0])


def test_a_region_of_torchs_is_replayed_under_the_patch() -> None:
    x = leaf(3)
    out = torchs_checkpoint(wave, x, use_reentrant=False)
    with rekindle.patch_torch():
        out.sum().backward()
    assert same_bits(x.grad, torch.autograd.grad(wave(x).sum(), [x])[0])


# Modules that hold the name


def test_a_module_that_took_the_name_before_has_ours_inside(make_module: Make) -> None:
    library = make_module(TOOK_IT)
    with rekindle.patch_torch():
        assert library.checkpoint is compat.checkpoint
        assert library.ckpt is compat.checkpoint
        assert library.CheckpointError is rekindle.CheckpointError


def test_a_module_that_took_the_name_before_has_its_own_back_after(make_module: Make) -> None:
    library = make_module(TOOK_IT)
    before = dict(vars(library))
    with rekindle.patch_torch():
        pass
    assert [name for name in before if vars(library)[name] is not before[name]] == []


def test_a_module_that_takes_the_name_inside_gets_ours(make_module: Make) -> None:
    with rekindle.patch_torch(), rekindle.observe() as seen:
        library = make_module(TOOK_IT)
        library.run(wave, leaf(3)).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)


def test_a_module_that_takes_the_name_inside_has_torchs_after(make_module: Make) -> None:
    with rekindle.patch_torch():
        library = make_module(TOOK_IT)
    assert library.checkpoint is torchs_checkpoint
    assert library.ckpt is torchs_checkpoint


def test_a_module_that_takes_the_switch_inside_turns_torchs_after(make_module: Make) -> None:
    with rekindle.patch_torch():
        library = make_module(TOOK_IT)
    with library.set_checkpoint_early_stop(False):
        assert count_ends(torchs_checkpoint) == 2


def test_a_module_that_takes_the_error_inside_catches_torchs_after(make_module: Make) -> None:
    with rekindle.patch_torch():
        library = make_module(TOOK_IT)
    flips = iter([True, False])
    out = library.run(lambda x: x.sin() if next(flips) else x[:1].sin(), leaf(3))
    with pytest.raises(library.CheckpointError):
        out.sum().backward()


def test_a_module_that_takes_the_name_inside_an_inner_patch_has_torchs_after(
    make_module: Make,
) -> None:
    with rekindle.patch_torch():
        with rekindle.patch_torch():
            library = make_module(TOOK_IT)
        assert library.checkpoint is compat.checkpoint
    assert library.checkpoint is torchs_checkpoint


def test_a_module_that_uses_rekindle_keeps_ours_after(make_module: Make) -> None:
    with rekindle.patch_torch():
        library = make_module("from rekindle import CheckpointError, checkpoint")
    assert library.checkpoint is rekindle.checkpoint
    assert library.CheckpointError is rekindle.CheckpointError


def test_a_module_that_uses_rekindles_compat_names_keeps_them_after(make_module: Make) -> None:
    source = "from rekindle.compat.checkpoint import checkpoint"
    library = make_module(source)
    with rekindle.patch_torch():
        pass
    assert library.checkpoint is compat.checkpoint


def test_a_module_that_looks_odd_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contrived: `sys.modules` may hold anything."""

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    monkeypatch.setitem(sys.modules, "odd_lazy", Lazy("odd_lazy"))
    monkeypatch.setitem(sys.modules, "odd_none", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "odd_object", object())  # type: ignore[arg-type]
    with rekindle.patch_torch():
        assert torch_module.checkpoint is compat.checkpoint
    assert torch_module.checkpoint is torchs_checkpoint
