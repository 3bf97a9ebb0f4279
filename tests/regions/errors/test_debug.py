"""`debug=True`: a mismatch shows where the two runs part, and little else (field notes 12, 23)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.regions.selective.policy_contexts import CachingMode
from tests.toys import Block, assert_same_step


class Region:
    """A hundred ops, one that may differ, a hundred more."""

    def __init__(self, ops: int = 100) -> None:
        self.ops = ops
        self.width = 6

    def __call__(self, x: Tensor) -> Tensor:
        for _ in range(self.ops):
            x = x.sin()
        x = x[:, : self.width].tanh()
        for _ in range(self.ops):
            x = x.cos()
        return x.sum()


def error_of(x: Tensor, region: Region | None = None, **options: Any) -> str:
    """The text of the error when the region's width changes between forward and backward."""
    region = region or Region()
    y = rekindle.checkpoint(region, x, **options)
    region.width = 4
    with pytest.raises(rekindle.CheckpointError) as caught:
        y.backward()
    return str(caught.value)


def test_debug_shows_the_ops_where_forward_and_replay_part(x: Tensor) -> None:
    text = error_of(x, debug=True)
    assert "- aten.slice.Tensor → float32[4, 6] cpu" in text
    assert "+ aten.slice.Tensor → float32[4, 4] cpu" in text
    assert "- aten.tanh.default → float32[4, 6] cpu" in text
    assert "+ aten.tanh.default → float32[4, 4] cpu" in text


def test_debug_names_the_line_of_each_op_that_differs(x: Tensor) -> None:
    text = error_of(x, debug=True)
    differing = [line for line in text.splitlines() if line.startswith(("  - ", "  + "))]
    assert len(differing) >= 4
    assert all("test_debug.py:" in line and "Region.__call__" in line for line in differing)


def test_debug_says_how_many_ops_agree(x: Tensor) -> None:
    assert "the first 100 are the same" in error_of(x, debug=True)


@pytest.mark.parametrize("ops", [10, 400])
def test_a_debug_error_is_short_however_long_the_region(x: Tensor, ops: int) -> None:
    assert len(error_of(x, Region(ops), debug=True).splitlines()) < 25


def test_without_debug_no_ops_are_shown(x: Tensor) -> None:
    assert "aten." not in error_of(x)


def test_debug_shows_a_branch_that_was_not_taken_again(x: Tensor) -> None:
    deep = [True]

    def region(x: Tensor) -> Tensor:
        x = x.sin()
        if deep[0]:
            x = x.exp()
        return x.cos().sum()

    y = rekindle.checkpoint(region, x, debug=True)
    deep[0] = False
    with pytest.raises(rekindle.CheckpointError) as caught:
        y.backward()
    assert "- aten.exp.default → float32[4, 8] cpu" in str(caught.value)
    assert "+ aten.cos.default → float32[4, 8] cpu" in str(caught.value)


def test_debug_shows_where_the_replay_ended_before_the_forward(x: Tensor) -> None:
    deep = [True]

    def region(x: Tensor) -> Tensor:
        x = x.sin()
        return x.exp().cos() if deep[0] else x

    y = rekindle.checkpoint(region, x, debug=True).sum()
    deep[0] = False
    with pytest.raises(rekindle.CheckpointError) as caught:
        y.backward()
    assert "+ (nothing more)" in str(caught.value)


def test_debug_works_with_contexts(x: Tensor) -> None:
    text = error_of(x, debug=True, context_fn=lambda: (nullcontext(), nullcontext()))
    assert "- aten.tanh.default" in text


def test_debug_works_with_contexts_that_can_be_entered_once(x: Tensor) -> None:
    @contextmanager
    def once() -> Iterator[None]:
        yield

    text = error_of(x, debug=True, context_fn=lambda: (once(), once()))
    assert "- aten.tanh.default" in text


def _recorded() -> Any:
    return rekindle.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


class _Own(CachingMode):
    """As other people's code has subclasses: such a mode is entered, and the region replayed."""


def _selective() -> Any:
    forward, replay = _recorded()
    return _Own(forward.policy_fn, forward.storage), replay


@pytest.mark.parametrize("contexts", [_recorded, _selective])
def test_debug_with_selective_contexts_gives_the_plain_step(x: Tensor, contexts: Any) -> None:
    """Field note 12."""
    block = Block()
    assert_same_step(
        lambda: block(x),
        lambda: rekindle.checkpoint(block, x, context_fn=contexts, debug=True),
        [x, *block.parameters()],
    )


@pytest.mark.parametrize("debug", [False, True])
def test_a_mismatch_with_selective_contexts_is_explained(x: Tensor, debug: bool) -> None:
    text = error_of(x, debug=debug, context_fn=_selective)
    assert "float32[4, 6] cpu" in text
    assert "float32[4, 4] cpu" in text
    assert "Likely cause" in text


def test_debug_with_selective_contexts_shows_the_ops_where_the_runs_part(x: Tensor) -> None:
    text = error_of(x, debug=True, context_fn=_selective)
    assert "- aten.tanh.default → float32[4, 6] cpu" in text
    assert "+ aten.tanh.default → float32[4, 4] cpu" in text


@pytest.mark.parametrize("debug", [False, True])
def test_a_mismatch_after_an_op_that_the_selective_context_kept_is_explained(
    x: Tensor, debug: bool
) -> None:
    weight, width = torch.randn(8, 8), [6]

    def region(x: Tensor) -> Tensor:
        y = torch.mm(x.sin(), weight)[:, : width[0]].tanh()
        return y.cos().sum()

    y = rekindle.checkpoint(region, x, debug=debug, context_fn=_selective)
    width[0] = 4
    with pytest.raises(rekindle.CheckpointError) as caught:
        y.backward()
    assert "float32[4, 6] cpu" in str(caught.value)
    assert "float32[4, 4] cpu" in str(caught.value)


def test_debug_works_with_the_values_check(x: Tensor) -> None:
    scale = [2.0]
    y = rekindle.checkpoint(
        lambda x: (x * scale[0]).sin(), x, debug=True, determinism_check="values"
    ).sum()
    scale[0] = 2.5
    with pytest.raises(rekindle.CheckpointError, match="other values"):
        y.backward()


def test_debug_works_in_nested_regions(x: Tensor) -> None:
    region = Region(3)

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(region, x.cos(), debug=True).exp()

    y = rekindle.checkpoint(outer, x, debug=True)
    region.width = 4
    with pytest.raises(rekindle.CheckpointError, match=r"aten\.tanh\.default"):
        y.backward()


def test_debug_prints_nothing_when_all_is_well(
    x: Tensor, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    block = Block(drop=0.5)
    assert_same_step(
        lambda: block(x),
        lambda: rekindle.checkpoint(block, x, debug=True),
        [x, *block.parameters()],
    )
    out, err = capfd.readouterr()
    assert (out, err, caplog.text) == ("", "", "")


def test_debug_prints_nothing_when_something_is_wrong(
    x: Tensor, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """All of it is in the error."""
    error_of(x, debug=True)
    out, err = capfd.readouterr()
    assert (out, err, caplog.text) == ("", "", "")


def test_debug_changes_no_count_of_replays(x: Tensor) -> None:
    with rekindle.observe() as seen:
        rekindle.checkpoint(Region(3), x, debug=True).backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)


def test_the_switch_turns_debug_on_over_the_flag(x: Tensor) -> None:
    with rekindle.set_checkpoint_debug_enabled(True):
        assert "aten.tanh" in error_of(x, debug=False)


def test_the_switch_turns_debug_off_over_the_flag(x: Tensor) -> None:
    with rekindle.set_checkpoint_debug_enabled(False):
        assert "aten." not in error_of(x, debug=True)


@pytest.mark.parametrize("debug", [False, True])
def test_the_switch_set_to_none_leaves_it_to_the_flag(x: Tensor, debug: bool) -> None:
    with rekindle.set_checkpoint_debug_enabled(True), rekindle.set_checkpoint_debug_enabled(None):
        assert ("aten." in error_of(x, debug=debug)) == debug


def test_the_switch_is_as_before_after_its_context_even_after_an_exception(x: Tensor) -> None:
    with pytest.raises(KeyError), rekindle.set_checkpoint_debug_enabled(True):
        raise KeyError
    assert "aten." not in error_of(x)


def test_the_switch_acts_on_regions_by_when_they_ran_forward(x: Tensor) -> None:
    region = Region()
    with rekindle.set_checkpoint_debug_enabled(True):
        y = rekindle.checkpoint(region, x)
    region.width = 4
    with pytest.raises(rekindle.CheckpointError, match=r"aten\.tanh"):
        y.backward()
