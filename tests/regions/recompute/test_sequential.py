"""`checkpoint_sequential`: functions in a row, in segments, all checkpointed but the last."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.toys import Mlp, assert_same_step, same_bits


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def model(drop: float = 0.0) -> nn.Sequential:
    return nn.Sequential(*(Mlp(drop=drop) for _ in range(5)))


def counting(length: int) -> tuple[list[Callable[[Tensor], Tensor]], list[int]]:
    """Functions that note their place each time they run."""
    ran: list[int] = []

    def make(place: int) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            ran.append(place)
            return x.sin()

        return step

    return [make(place) for place in range(length)], ran


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_a_sequential_trains_as_plain(segments: int, use_reentrant: bool) -> None:
    layers, x = model(drop=0.3), leaf(2, 8)
    assert_same_step(
        lambda: layers(x),
        lambda: rekindle.checkpoint_sequential(layers, segments, x, use_reentrant=use_reentrant),
        [x, *layers.parameters()],
    )


def test_a_list_of_functions_trains_as_plain() -> None:
    x = leaf(3)
    steps = [torch.sin, torch.exp, lambda x: x * 2, torch.cos]

    def plain() -> Tensor:
        out = x
        for step in steps:
            out = step(out)
        return out

    assert_same_step(plain, lambda: rekindle.checkpoint_sequential(steps, 2, x), [x])


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5])
def test_all_segments_but_the_last_are_regions(segments: int) -> None:
    layers, x = model(), leaf(2, 8)
    with rekindle.observe() as seen:
        rekindle.checkpoint_sequential(layers, segments, x).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (segments - 1, segments - 1)


def test_what_does_not_divide_is_left_to_the_last_segment() -> None:
    """Five in two segments: the first two are replayed, the other three are not."""
    steps, ran = counting(5)
    loss = rekindle.checkpoint_sequential(steps, 2, leaf(3)).sum()
    assert ran == [0, 1, 2, 3, 4]
    ran.clear()
    loss.backward()
    assert ran == [0, 1]


def test_one_segment_is_the_plain_run() -> None:
    steps, ran = counting(3)
    rekindle.checkpoint_sequential(steps, 1, leaf(3)).sum().backward()
    assert ran == [0, 1, 2]


def test_as_many_segments_as_functions_replay_all_but_the_last() -> None:
    steps, ran = counting(3)
    loss = rekindle.checkpoint_sequential(steps, 3, leaf(3)).sum()
    ran.clear()
    loss.backward()
    assert ran == [1, 0]


def test_a_module_that_occurs_twice_runs_twice() -> None:
    """`Sequential.children()` names it once; torch's function runs it once."""
    linear, act = nn.Linear(4, 4), nn.Tanh()
    layers, x = nn.Sequential(linear, act, linear, act), leaf(2, 4)
    assert_same_step(
        lambda: layers(x),
        lambda: rekindle.checkpoint_sequential(layers, 2, x),
        [x, *layers.parameters()],
    )


def test_a_sequential_in_a_sequential_is_one_function() -> None:
    layers, x = nn.Sequential(model(), model()), leaf(2, 8)
    with rekindle.observe() as seen:
        assert_same_step(
            lambda: layers(x),
            lambda: rekindle.checkpoint_sequential(layers, 2, x),
            [x, *layers.parameters()],
        )
    assert seen.total.forwards == 1


def test_batch_norm_in_a_segment_ends_a_step_as_plain() -> None:
    x = leaf(6, 4)
    norms = [nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    norms[0](x).sum().backward()
    rekindle.checkpoint_sequential(norms[1], 3, x).sum().backward()
    for a, b in zip(norms[0].buffers(), norms[1].buffers(), strict=True):
        assert torch.equal(a, b)


def test_frozen_input_leaves_gradients_to_the_parameters() -> None:
    """Field note 16."""
    layers, x = model(), torch.randn(2, 8)
    assert_same_step(
        lambda: layers(x),
        lambda: rekindle.checkpoint_sequential(layers, 3, x),
        list(layers.parameters()),
    )


def test_preserve_rng_state_reaches_the_segments() -> None:
    drawn: list[Tensor] = []

    def noisy(x: Tensor) -> Tensor:
        drawn.append(torch.rand(8))
        return x.sin()

    rekindle.checkpoint_sequential(
        [noisy, torch.sin], 2, leaf(3), preserve_rng_state=False
    ).sum().backward()
    assert len(drawn) == 2
    assert not torch.equal(*drawn)


def test_under_no_grad_it_is_the_plain_run() -> None:
    layers, x = model(), leaf(2, 8)
    with rekindle.observe() as seen, torch.no_grad():
        assert same_bits(rekindle.checkpoint_sequential(layers, 3, x), layers(x))
    assert seen.regions == {}


def test_no_functions_give_the_input_back() -> None:
    x = leaf(3)
    assert rekindle.checkpoint_sequential([], 1, x) is x


@pytest.mark.parametrize("segments", [0, -1, 6])
def test_too_few_or_too_many_segments_are_a_value_error(segments: int) -> None:
    with pytest.raises(ValueError, match=rf"segments should be from 1 to 5, but got {segments}"):
        rekindle.checkpoint_sequential(model(), segments, leaf(2, 8))


def test_segments_that_are_no_whole_number_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="segments"):
        rekindle.checkpoint_sequential(model(), 2.5, leaf(2, 8))  # type: ignore[arg-type]


def test_an_unknown_keyword_is_an_error_that_names_it() -> None:
    with pytest.raises((TypeError, ValueError), match="chunks"):
        rekindle.checkpoint_sequential(model(), 2, leaf(2, 8), chunks=3)  # type: ignore[call-arg]
