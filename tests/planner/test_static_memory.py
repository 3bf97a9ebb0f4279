"""Bytes that are there all the time: parameters, gradients, optimizer state, the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rekindle
from tests.planner.cases import all_same, step, with_buffers
from tests.toys import Stack

pytest.importorskip("scipy")


def test_with_a_profile_the_state_of_the_optimizer_counts_too() -> None:
    model, x = Stack(3, 16), torch.randn(32, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    profile = rekindle.profile(model, x)
    state = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    without = rekindle.fit(model, x, "1GiB", profile=profile)
    counted = rekindle.fit(model, x, "1GiB", profile=profile, optimizer=optimizer)
    assert counted.predicted_peak == without.predicted_peak + state
    again = rekindle.profile(model, x, optimizer=optimizer)
    both = rekindle.fit(model, x, "1GiB", profile=again, optimizer=optimizer)
    assert both.predicted_peak == counted.predicted_peak


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], int]] = {
    "SGD": (torch.optim.SGD, 0),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, momentum=0.9), 1),
    "AdamW": (torch.optim.AdamW, 2),
    "Adam with amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
    "RMSprop": (torch.optim.RMSprop, 1),
    "RMSprop with all": (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3),
    "Adagrad": (torch.optim.Adagrad, 1),
    "Adadelta": (torch.optim.Adadelta, 2),
}
every_optimizer = pytest.mark.parametrize(("build", "copies"), OPTIMIZERS.values(), ids=OPTIMIZERS)


@every_optimizer
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "used"])
def test_the_state_of_an_optimizer_is_part_of_what_is_always_there(
    build: Callable[..., torch.optim.Optimizer], copies: int, stepped: bool
) -> None:
    model, batch = Stack(2, 16), torch.randn(8, 16)
    bare = rekindle.profile(model, batch).static_bytes
    optimizer = build(model.parameters())
    if stepped:
        step(model, batch)
        optimizer.step()
    parameters = sum(p.nbytes for p in model.parameters())
    counters = 4 * len(list(model.parameters()))  # how many steps were taken, a number each
    static = rekindle.profile(model, batch, optimizer=optimizer).static_bytes
    assert bare + copies * parameters <= static <= bare + copies * parameters + counters


def test_what_is_always_there_is_parameters_gradients_buffers_and_the_batch() -> None:
    model, batch = with_buffers()
    model.get_submodule("0").requires_grad_(False)
    parameters = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    buffers = sum(b.nbytes for b in model.buffers())
    found = rekindle.profile(model, batch).static_bytes
    assert found == parameters + trained + buffers + batch.nbytes


def test_a_step_that_fits_with_an_optimizer_trains_as_without_a_plan() -> None:
    def trained(budget: str | None) -> list[Tensor]:
        torch.manual_seed(1)
        model, x = Stack(4, 16, 0.1), torch.randn(256, 16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if budget:
            rekindle.fit(model, x, budget, optimizer=optimizer)
        for number in range(3):
            torch.manual_seed(number)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all_same(trained(None), trained("60%"))
