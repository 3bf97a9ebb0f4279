"""`observe`: exact counts of what regions ran, held, dropped and replayed."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import Counts
from tests.toys import Mlp, Stack


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def region(x: Tensor) -> Tensor:
    """Autograd saves x, then exp's result twice (for exp and for cos): one dropped, of its size."""
    return x.sin().exp().cos()


def test_every_count_of_one_region() -> None:
    x = leaf(8)
    with rekindle.observe() as seen:
        rekindle.checkpoint(region, x).sum().backward()
    assert seen.total == Counts(
        forwards=1,
        replays=1,
        ops_replayed=2,
        activations_held=1,
        bytes_held=32,
        activations_dropped=1,
        bytes_dropped=32,
    )


def test_forward_alone_counts_no_replay() -> None:
    with rekindle.observe() as seen:
        rekindle.checkpoint(region, leaf(8))
    assert (seen.total.forwards, seen.total.replays, seen.total.ops_replayed) == (1, 0, 0)


def test_counts_add_up_over_calls() -> None:
    with rekindle.observe() as seen:
        for _ in range(3):
            rekindle.checkpoint(region, leaf(8)).sum().backward()
    assert (seen.total.forwards, seen.total.replays, seen.total.ops_replayed) == (3, 3, 6)
    assert (seen.total.bytes_held, seen.total.bytes_dropped) == (96, 96)


def test_bytes_are_those_of_the_dtype() -> None:
    x = leaf(8).detach().bfloat16().requires_grad_()
    with rekindle.observe() as seen:
        rekindle.checkpoint(region, x)
    assert (seen.total.bytes_held, seen.total.bytes_dropped) == (16, 16)


def test_parameters_are_neither_held_nor_dropped() -> None:
    """Linear, GELU, Linear: GELU's input and output are dropped, the input is held."""
    model, x = Mlp(dim=8, hidden=16), leaf(2, 8)
    with rekindle.observe() as seen:
        rekindle.checkpoint(model, x)
    assert (seen.total.activations_held, seen.total.bytes_held) == (1, 2 * 8 * 4)
    assert (seen.total.activations_dropped, seen.total.bytes_dropped) == (2, 2 * 2 * 16 * 4)


def test_a_parameter_as_argument_is_not_held() -> None:
    w = nn.Parameter(torch.randn(8))
    with rekindle.observe() as seen:
        rekindle.checkpoint(region, w)
    assert (seen.total.activations_held, seen.total.bytes_held) == (0, 0)


def test_a_tensor_given_twice_or_through_a_view_is_held_once() -> None:
    x = leaf(8)
    with rekindle.observe() as seen:
        rekindle.checkpoint(lambda a, b, c: a.sin() * b * c[0], x, x, {"c": [x[2:3]]}["c"])
    assert (seen.total.activations_held, seen.total.bytes_held) == (1, 32)


def test_inputs_that_the_region_saves_are_not_dropped() -> None:
    with rekindle.observe() as seen:
        rekindle.checkpoint(torch.sin, leaf(8))
    assert (seen.total.activations_held, seen.total.activations_dropped) == (1, 0)


def test_inputs_in_containers_and_keywords_are_held() -> None:
    x, y, z = leaf(8), leaf(8), leaf(8)
    with rekindle.observe() as seen:
        rekindle.checkpoint(lambda a, b, c: a[0] * b["y"][0] * c, [x], {"y": (y,)}, c=z)
    assert (seen.total.activations_held, seen.total.bytes_held) == (3, 96)


def test_an_inner_region_holds_nothing() -> None:
    """Its input is an activation of the outer region, which drops it."""

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(region, x.exp())

    with rekindle.observe() as seen:
        rekindle.checkpoint(outer, leaf(8))
    assert (seen.total.activations_held, seen.total.bytes_held) == (1, 32)
    assert seen.regions[outer.__qualname__].activations_dropped == 1
    assert seen.regions["region"].activations_held == 0
    assert seen.regions["region"].activations_dropped == 1


def test_a_replay_that_fails_is_counted() -> None:
    def broken(x: Tensor) -> Tensor:
        if rekindle.is_recomputing():
            raise ValueError("replay")
        return region(x)

    with rekindle.observe() as seen:
        loss = rekindle.checkpoint(broken, leaf(8)).sum()
        with pytest.raises(ValueError, match="replay"):
            loss.backward()
    assert seen.total.replays == 1


def test_parameters_that_a_replay_detaches_are_not_counted_as_ops() -> None:
    """sin, then t and addmm of the first Linear, then t of the second, which is not multiplied."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), leaf(2, 4)
    with rekindle.observe() as seen:
        rekindle.checkpoint(lambda x: model(x.sin()), x).sum().backward()
    assert seen.total.ops_replayed == 4


# Names


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return region(x)

    def part(self, x: Tensor) -> Tensor:
        return region(x)


class Caller:
    def __call__(self, x: Tensor) -> Tensor:
        return region(x)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (region, "region"),
        (Model(), "Model"),
        (Model().part, "Model.part"),
        (functools.partial(region), "region"),
        (functools.partial(functools.partial(Model())), "Model"),
        (Caller(), "Caller"),
        (torch.sin, "sin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_region_has_the_name_a_person_would_give_it(
    function: Callable[[Tensor], Tensor], name: str
) -> None:
    with rekindle.observe() as seen:
        rekindle.checkpoint(function, leaf(8))
    assert [key.split(".", 1)[-1] if name == "sin" else key for key in seen.regions] == [name]


def test_regions_are_counted_by_name_and_in_total() -> None:
    model, x = Stack(3), leaf(2, 8)
    with rekindle.observe() as seen:
        out = model(x, rekindle.checkpoint)
        rekindle.checkpoint(region, out).sum().backward()
    assert {name: c.forwards for name, c in seen.regions.items()} == {"Block": 3, "region": 1}
    assert seen.total == seen.regions["Block"] + seen.regions["region"]


# Who counts


def test_two_observations_at_once_both_count() -> None:
    x = leaf(8)
    with rekindle.observe() as outer:
        rekindle.checkpoint(region, x).sum().backward()
        with rekindle.observe() as inner:
            rekindle.checkpoint(region, x).sum().backward()
    assert (outer.total.forwards, outer.total.replays) == (2, 2)
    assert (inner.total.forwards, inner.total.replays) == (1, 1)


def test_an_inner_observation_that_ends_with_equal_counts_leaves_the_outer_open() -> None:
    """Both have seen nothing when the inner one ends; it is the inner one that must go."""
    with rekindle.observe() as outer:
        with rekindle.observe() as inner:
            pass
        rekindle.checkpoint(region, leaf(8))
    assert (outer.total.forwards, inner.total.forwards) == (1, 0)


def test_nothing_is_counted_outside() -> None:
    x = leaf(8)
    rekindle.checkpoint(region, x).sum().backward()
    with rekindle.observe() as seen:
        pass
    rekindle.checkpoint(region, x).sum().backward()
    assert seen.regions == {}


def test_an_exception_ends_an_observation() -> None:
    with pytest.raises(ValueError, match="inside"), rekindle.observe() as seen:
        raise ValueError("inside")
    rekindle.checkpoint(region, leaf(8))
    assert seen.regions == {}


def test_the_replay_of_a_region_that_ran_before_is_counted() -> None:
    loss = rekindle.checkpoint(region, leaf(8)).sum()
    with rekindle.observe() as seen:
        loss.backward()
    assert seen.total == Counts(replays=1, ops_replayed=2)


def test_a_replay_is_counted_by_who_observes_it_and_not_by_who_saw_the_forward() -> None:
    with rekindle.observe() as forward:
        loss = rekindle.checkpoint(region, leaf(8)).sum()
    with rekindle.observe() as backward:
        loss.backward()
    assert (forward.total.forwards, forward.total.replays) == (1, 0)
    assert (backward.total.forwards, backward.total.replays) == (0, 1)


def test_observing_changes_no_gradient_and_no_random_state() -> None:
    model, x = Stack(2, drop=0.4), leaf(2, 8)

    def step() -> list[Tensor]:
        torch.manual_seed(5)
        out = model(x, rekindle.checkpoint)
        return [*torch.autograd.grad(out.sum(), [x, *model.parameters()]), torch.get_rng_state()]

    plain = step()
    with rekindle.observe():
        ours = step()
    assert all(map(torch.equal, plain, ours))


# Printing


def test_it_prints_as_a_table() -> None:
    x = leaf(512)
    with rekindle.observe() as seen:
        rekindle.checkpoint(region, x).sum().backward()
    assert [" ".join(line.split()) for line in str(seen).splitlines()] == [
        f"region {' '.join(f.name.replace('_', ' ') for f in dataclasses.fields(Counts))}",
        "region 1 1 2 1 2,048 1 2,048",
        "total 1 1 2 1 2,048 1 2,048",
    ]


def test_the_table_is_aligned() -> None:
    with rekindle.observe() as seen:
        rekindle.checkpoint(region, leaf(512))
        rekindle.checkpoint(Mlp(), leaf(2, 8))
    lines = str(seen).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[0] for line in lines] == ["region", "region", "Mlp", "total"]


def test_an_empty_observation_prints_its_total() -> None:
    with rekindle.observe() as seen:
        pass
    assert str(seen).splitlines()[-1].split() == ["total", *["0"] * 7]


def test_the_values_check_adds_no_ops_to_the_count() -> None:
    counts = []
    for check in ("default", "values"):
        with rekindle.observe() as seen:
            y = rekindle.checkpoint(lambda x: x.sin().exp().cos(), leaf(3), determinism_check=check)
            y.sum().backward()
        counts.append(seen.total.ops_replayed)
    assert counts == [2, 2]
