"""Code that nobody can edit runs on our engine under `rekindle.patch_torch()`."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from tests.compat.patching import TOOK_IT, Make, count_ends, torch_module, torchs_checkpoint
from tests.toys import Block, Stack, assert_same_step, leaf, same_bits, wave


@pytest.mark.parametrize(
    "call",
    [
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)",
        "torch.utils.checkpoint.checkpoint_sequential([block, torch.sin], 2, x, False)",
        "torch.utils.checkpoint.CheckpointFunction.apply(block, True, x)",
    ],
)
def test_a_library_runs_on_ours(call: str, make_module: Make) -> None:
    library = make_module(f"""
        import torch.utils.checkpoint

        def run(block, x):
            return {call}
    """)
    block, x = Block(drop=0.2), leaf(2, 8)
    with rekindle.patch_torch(), rekindle.observe() as seen:
        library.run(block, x).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)
    assert list(seen.regions) in (["Block"], ["segment 1 of 2"])


def test_a_library_that_leaves_use_reentrant_open_is_reentrant_and_warned() -> None:
    with rekindle.patch_torch(), rekindle.observe() as seen:
        with pytest.warns(UserWarning, match="use_reentrant"):
            out = torch_module.checkpoint(wave, leaf(3))
        assert out.grad_fn.name() == "CheckpointFunctionBackward"
    assert seen.total.forwards == 1


def test_a_librarys_step_is_as_plain() -> None:
    model, x = Stack(3, drop=0.3), leaf(2, 8)

    def library(block: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    with rekindle.patch_torch():
        assert_same_step(lambda: model(x), lambda: model(x, library), [x, *model.parameters()])


def test_a_library_that_catches_torchs_error_catches_ours(make_module: Make) -> None:
    library = make_module("""
        import torch.utils.checkpoint

        def run(function, x):
            out = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
            try:
                out.sum().backward()
            except torch.utils.checkpoint.CheckpointError as error:
                return error
    """)

    def differs(x: Tensor) -> Tensor:
        return x.sin().exp() if rekindle.is_recomputing() else x[:1].sin().exp()

    with rekindle.patch_torch():
        assert isinstance(library.run(differs, leaf(3)), rekindle.CheckpointError)


def test_torchs_selective_contexts_run_under_the_patch() -> None:
    x = leaf(4, 4)
    contexts = functools.partial(
        torch_module.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
    )
    with rekindle.patch_torch(), rekindle.observe() as seen:
        torch_module.checkpoint(
            lambda x: (x @ x).sin().exp(), x, use_reentrant=False, context_fn=contexts
        ).sum().backward()
    assert seen.total.ops_replayed == 2
    assert same_bits(x.grad, torch.autograd.grad((x @ x).sin().exp().sum(), [x])[0])


# The switches


def test_a_replay_stops_early_under_the_patch() -> None:
    with rekindle.patch_torch():
        assert count_ends(torch_module.checkpoint) == 1


def test_early_stop_through_torchs_name_acts_on_ours() -> None:
    with rekindle.patch_torch(), torch_module.set_checkpoint_early_stop(False):
        assert count_ends(rekindle.checkpoint) == 2
        assert count_ends(torch_module.checkpoint) == 2
    assert count_ends(rekindle.checkpoint) == 1


def test_early_stop_through_our_name_acts_on_torchs() -> None:
    assert count_ends(torchs_checkpoint) == 1
    with rekindle.set_checkpoint_early_stop(False):
        assert count_ends(torchs_checkpoint) == 2
    assert count_ends(torchs_checkpoint) == 1


def test_early_stop_through_our_name_acts_on_the_patched() -> None:
    with rekindle.patch_torch(), rekindle.set_checkpoint_early_stop(False):
        assert count_ends(torch_module.checkpoint) == 2


def test_early_stop_set_before_the_patch_acts_on_the_patched() -> None:
    with torch_module.set_checkpoint_early_stop(False), rekindle.patch_torch():
        assert count_ends(torch_module.checkpoint) == 2


def test_early_stop_of_a_module_that_took_it_before_acts_on_ours(make_module: Make) -> None:
    library = make_module(TOOK_IT)
    with rekindle.patch_torch(), library.set_checkpoint_early_stop(False):
        assert count_ends(rekindle.checkpoint) == 2


def test_early_stop_that_is_left_after_the_patch_is_off_again() -> None:
    with rekindle.patch_torch():
        switch = torch_module.set_checkpoint_early_stop(False)
        switch.__enter__()
    switch.__exit__(None, None, None)
    assert count_ends(rekindle.checkpoint) == 1
    assert count_ends(torchs_checkpoint) == 1


def differs_in_replay(x: Tensor) -> Tensor:
    return x.sin().exp() if rekindle.is_recomputing() else x.cos()[:1].exp()


def error_of(run: Callable[..., Any]) -> str:
    out = run(differs_in_replay, leaf(3), use_reentrant=False)
    with pytest.raises(rekindle.CheckpointError) as caught:
        out.sum().backward()
    return str(caught.value)


def test_debug_through_torchs_name_acts_on_ours() -> None:
    with rekindle.patch_torch():
        quiet = error_of(torch_module.checkpoint)
        with torch_module.set_checkpoint_debug_enabled(True):
            loud, loud_too = error_of(torch_module.checkpoint), error_of(rekindle.checkpoint)
    assert "aten.sin" not in quiet
    assert "aten.sin" in loud
    assert "aten.sin" in loud_too


def test_debug_through_our_name_acts_on_torchs() -> None:
    """Torch refuses a context_fn in debug, so its refusal shows that debug is on."""
    with (
        rekindle.set_checkpoint_debug_enabled(True),
        pytest.raises(ValueError, match="incompatible with non-default context_fn"),
    ):
        torchs_checkpoint(wave, leaf(3), use_reentrant=False, context_fn=lambda: (None, None))


def test_debug_set_before_the_patch_acts_on_the_patched() -> None:
    with torch_module.set_checkpoint_debug_enabled(True), rekindle.patch_torch():
        assert "aten.sin" in error_of(torch_module.checkpoint)
