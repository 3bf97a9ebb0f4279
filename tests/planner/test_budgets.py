"""Budgets of `fit`: bytes or shares, what they buy, and which are refused."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.strategy import Keep, Selective
from tests.planner.cases import by_keywords, sequential, step, two_kinds
from tests.toys import Stack

pytest.importorskip("scipy")


@pytest.mark.parametrize("budget", ["1MiB", "0.5 MiB", "600KB", 700_000], ids=str)
def test_a_budget_may_be_bytes(budget: int | str) -> None:
    model, batch = Stack(4, 16), torch.randn(512, 16)
    plan = rekindle.fit(model, batch, budget)
    known = {"1MiB": 2**20, "0.5 MiB": 2**19, "600KB": 600_000}
    assert plan.budget == known.get(str(budget), budget)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


@pytest.mark.parametrize("share", [100, 70, 50])
def test_a_budget_may_be_a_share_of_activations(share: int) -> None:
    model, batch = Stack(6, 16), torch.randn(512, 16)
    profile = rekindle.profile(model, batch)
    plan = rekindle.fit(model, batch, f"{share}%")
    activations = rekindle.solve(profile, "100%").plain_peak - profile.static_bytes
    assert plan.budget == profile.static_bytes + int(share / 100 * activations)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


def test_with_room_for_all_nothing_is_recomputed() -> None:
    model, batch = sequential()
    rekindle.fit(model, batch, "1GiB")
    with rekindle.observe() as seen:
        step(model, batch)
    assert seen.total.replays == 0


def test_to_keep_all_is_never_more_than_the_whole_peak() -> None:
    for case in (sequential, by_keywords, two_kinds):
        model, batch = case()
        plan = rekindle.fit(model, batch, "100%")
        assert {type(option.strategy) for _, _, option in plan.blocks} <= {Keep, Selective}


def test_a_tight_budget_takes_less_memory_than_a_plain_step() -> None:
    model, batch = Stack(6, 16), torch.randn(512, 16)
    plain = rekindle.fit(model, batch, "100%")
    tight = rekindle.fit(model, batch, "45%")
    assert plain.measured_peak is not None
    assert tight.measured_peak is not None
    assert tight.measured_peak < 0.55 * plain.measured_peak


@pytest.mark.parametrize("budget", ["0%", "-5%", "%", "half", "4GX", "", -1])
def test_a_budget_that_makes_no_sense_is_refused_before_anything_runs(budget: int | str) -> None:
    ran: list[int] = []

    def loss() -> Tensor:
        ran.append(1)
        return model(torch.randn(4, 8)).sum()  # type: ignore[no-any-return]

    model = Stack(2)
    with pytest.raises(ValueError, match="budget"):
        rekindle.fit(model, loss, budget)
    assert not ran


@pytest.mark.parametrize("budget", [None, 0.5, True, [1]], ids=str)
def test_a_budget_of_another_type_is_refused(budget: Any) -> None:
    with pytest.raises(TypeError, match="budget"):
        rekindle.fit(Stack(2), torch.randn(4, 8), budget)


def test_a_budget_below_what_is_always_there_is_refused_with_both() -> None:
    with pytest.raises(rekindle.BudgetError, match=r"No plan fits into 100 B\. The least that"):
        rekindle.fit(Stack(2), torch.randn(4, 8), "100B")


def test_a_refused_budget_names_one_that_fits() -> None:
    model, batch = Stack(4, 16), torch.randn(512, 16)
    profile = rekindle.profile(model, batch)  # another may have other options, by its times
    with pytest.raises(rekindle.BudgetError) as refused:
        rekindle.fit(model, batch, "100B", profile=profile)
    named = str(refused.value).split("The least that works is ")[1].split(",")[0]
    plan = rekindle.fit(model, batch, named, profile=profile)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0.5, '"50%" is a share of the activations, "0.5GiB" is bytes'),
        ("0.5", '"50%" is a share of the activations, "0.5GiB" is bytes'),
        ("24G", '"24GiB", perhaps?'),
        (24.0, '"24GiB", perhaps?'),
        (8, 'budget=8 is 8 bytes: "8GiB", perhaps?'),
        ("40", "budget='40' is 40 bytes: \"40GiB\", perhaps?"),
    ],
)
def test_a_budget_that_means_something_else_is_refused_with_what_may_be_meant(
    budget: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        rekindle.fit(Stack(2), torch.randn(4, 8), budget)


def test_a_refusal_is_in_one_unit_and_has_a_next_step() -> None:
    with torch.device("meta"):
        model, batch = Stack(4, 1024), torch.empty(65536, 1024)
    profile = rekindle.profile(model, batch, device="meta", like="H100")
    with pytest.raises(rekindle.BudgetError) as refused:
        rekindle.solve(profile, "800MiB")
    text = str(refused.value)
    assert set(re.findall(r"\d (\w?i?B)\b", text)) == {"GiB"}
    assert text.endswith("would fit. rekindle.explain says what holds it.")
