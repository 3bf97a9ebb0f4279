"""Plans for models nobody tuned for: the tiny sizes of `benchmarks/zoo_models.py`, on a CPU.

Most tests are invariants. What is exact is in the tables at the top.
"""

import copy
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

import rekindle
from benchmarks.zoo_models import FAMILIES, Case
from rekindle.planner.plan_for_budget import budget_bytes, plain_prediction
from rekindle.planner.timeline import simulate
from rekindle.strategy import Recompute
from tests.toys import same_bits

DISTINCT_BLOCKS = {
    "bert": 3,
    "gpt2": 1,
    "t5": 4,
    "vit": 2,
    "convnext": 5,
    "resnet": 6,
    "swin": 4,
    "mixtral": 1,
    "lora": 2,
    "qwen2": 1,
    "whisper": 2,
    "clip": 2,
    "segformer": 8,
    "unet": 6,
    "translator": 2,
}
"""Swin's layers differ in a drop rate, too, and are not distinct for that: each of its stages has
layers with shifted windows and without."""

FROM_A_TABLE: dict[str, dict[str, tuple[int, int, int] | None]] = {
    "gpt2": {"60%": (1929992, 0, 1), "35%": (1294088, 2, 0)},
    "vit": {"60%": (603320, 0, 2), "35%": (487992, 0, 1)},
    "convnext": {"60%": (1375064, 0, 4), "35%": None},
    "resnet": {"60%": (835656, 1, 5), "35%": None},
    "qwen2": {"60%": (1346632, 0, 0), "35%": None},
    "clip": {"60%": (970168, 0, 1), "35%": (773496, 0, 1)},
}
"""With times from a table: the predicted peak, and how many blocks are recomputed as a whole, and
kept as a whole; None if no plan fits. Families whose fake profile takes a second or two."""

REFUSED = {
    *((name, "35%") for name in ("convnext", "mixtral", "qwen2", "resnet", "unet", "whisper")),
    *(("segformer", budget) for budget in ("60%", "35%")),
}
"""Budgets below the least: at these sizes single blocks, or heads and losses, rule the peak."""

RECOMPUTE_ALL = "as every block recomputed"
BUDGETS = ("60%", "35%", RECOMPUTE_ALL)
LARGE = "1GiB"
TOLERANCE = 0.05

PLANNED = [(n, b) for n in FAMILIES for b in BUDGETS if (n, b) not in REFUSED]
"""Families and budgets for which there is a plan."""

every_family = pytest.mark.parametrize("name", FAMILIES)
every_plan = pytest.mark.parametrize(("name", "budget"), PLANNED)


@dataclass(frozen=True)
class Step:
    """What a step from a fixed seed leaves in a model."""

    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    def differing(self, other: "Step") -> list[str]:
        names = [n for n, g in self.gradients.items() if not same_bits(g, other.gradients[n])]
        return names + [n for n, b in self.buffers.items() if not same_bits(b, other.buffers[n])]


def case_of(name: str) -> Case:
    for package in FAMILIES[name].needs:
        pytest.importorskip(package)
    return FAMILIES[name].case("cpu", is_large=False)


@cache
def measured(name: str) -> tuple[Case, rekindle.Profile]:
    case = case_of(name)
    return case, rekindle.profile(case.model, case.loss)


def limit_of(profile: rekindle.Profile, budget: str) -> int:
    if budget == RECOMPUTE_ALL:
        return profile.recompute_peak
    return budget_bytes(profile, budget)


def step_of(case: Case) -> Step:
    """Run a step; the model ends as it was."""
    before = copy.deepcopy(case.model.state_dict())
    case.model.zero_grad()
    torch.manual_seed(1)
    case.loss().backward()
    gradients = {n: p.grad for n, p in case.model.named_parameters()}
    found = Step(gradients, {n: b.clone() for n, b in case.model.named_buffers()})
    case.model.zero_grad()
    case.model.load_state_dict(before)
    return found


@cache
def plain_step(name: str) -> Step:
    return step_of(measured(name)[0])


@cache
def fitted(name: str, budget: str) -> tuple[rekindle.Plan, Step] | None:
    """Fit, run a step under the plan, and remove it; None if there is a `BudgetError`."""
    case, profile = measured(name)
    limit = budget if budget == LARGE else limit_of(profile, budget)
    plain_step(name)
    try:
        plan = rekindle.fit(case.model, case.loss, limit, profile=profile)
    except rekindle.BudgetError:
        return None
    step = step_of(case)
    rekindle.remove(case.model)
    return plan, step


def plan_for(name: str, budget: str) -> rekindle.Plan:
    found = fitted(name, budget)
    assert found is not None, "there is a plan"
    return found[0]


def kinds(plan: rekindle.Plan) -> Counter[str]:
    return Counter(candidate.describe() for _, _, candidate in plan.blocks)


@every_plan
def test_a_step_under_a_plan_is_within_its_budget(name: str, budget: str) -> None:
    plan = plan_for(name, budget)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget == limit_of(measured(name)[1], budget)


@pytest.mark.parametrize(("name", "budget"), sorted(REFUSED))
def test_a_plan_is_refused_only_below_every_block_recomputed(name: str, budget: str) -> None:
    profile = measured(name)[1]
    assert fitted(name, budget) is None
    assert limit_of(profile, budget) < profile.recompute_peak


@every_plan
def test_gradients_and_buffers_are_those_of_a_plain_step(name: str, budget: str) -> None:
    found = fitted(name, budget)
    assert found is not None
    assert found[1].differing(plain_step(name)) == []


def test_some_of_the_families_have_statistics_that_a_step_changes() -> None:
    """Else the test above compares buffers that stay as they are."""
    case, _ = measured("resnet")
    before = {n: b.clone() for n, b in case.model.named_buffers()}
    changed = [n for n, b in plain_step("resnet").buffers.items() if not same_bits(b, before[n])]
    assert any(n.endswith("running_mean") for n in changed)


@pytest.mark.parametrize(("name", "budget"), [*PLANNED, *((n, LARGE) for n in FAMILIES)])
def test_the_predicted_peak_is_the_measured_one_within_a_twentieth(name: str, budget: str) -> None:
    """Of the whole step, and of activations alone."""
    plan = plan_for(name, budget)
    _, profile = measured(name)
    assert plan.measured_peak is not None
    # A plan that fits as it is has what was measured as its plain peak.
    predicted = plain_prediction(profile).peak if plan.keeps_all else plan.predicted_peak
    assert predicted == pytest.approx(plan.measured_peak, rel=TOLERANCE)
    static = profile.static_bytes
    assert predicted - static == pytest.approx(plan.measured_peak - static, rel=TOLERANCE)


@every_family
def test_the_step_with_every_block_recomputed_is_predicted_as_it_was_measured(name: str) -> None:
    _, profile = measured(name)
    menus = map(profile.candidates, range(len(profile.order)))
    recomputing = [next(c for c in menu if c.strategy == Recompute()) for menu in menus]
    predicted = simulate(profile, recomputing).peak
    assert predicted == pytest.approx(profile.recompute_peak, rel=TOLERANCE)


@every_plan
def test_nothing_is_offloaded_on_a_cpu(name: str, budget: str) -> None:
    assert not plan_for(name, budget).offloads


@pytest.mark.parametrize("name", [n for n in FAMILIES if (n, "60%") not in REFUSED])
def test_a_plan_recomputes_all_only_if_nothing_else_fits(name: str) -> None:
    """If one more block kept would fit as well, and was predicted to."""
    plan, (_, profile) = plan_for(name, "60%"), measured(name)
    chosen = [candidate for _, _, candidate in plan.blocks]
    if kinds(plan) != {"recompute": len(chosen)}:
        return
    for i in range(len(chosen)):
        keep = next(c for c in profile.candidates(i) if c.describe() == "keep")
        assert simulate(profile, [*chosen[:i], keep, *chosen[i + 1 :]]).peak > plan.budget


@every_family
def test_no_plan_changes_a_model_that_fits(name: str) -> None:
    assert set(kinds(plan_for(name, LARGE))) == {"keep"}


@every_family
def test_blocks_that_run_the_same_ops_are_one_distinct_block(name: str) -> None:
    assert len(measured(name)[1].blocks) == DISTINCT_BLOCKS[name]


@cache
def from_a_table(name: str) -> rekindle.Profile:
    case = case_of(name)
    return rekindle.profile(case.model, case.loss, device="meta", like="cpu")


@pytest.mark.parametrize("budget", ["60%", "35%"])
@pytest.mark.parametrize("name", FROM_A_TABLE)
def test_with_times_from_a_table_the_plan_is_known(name: str, budget: str) -> None:
    profile, expected = from_a_table(name), FROM_A_TABLE[name][budget]
    if expected is None:
        with pytest.raises(rekindle.BudgetError, match="The least that works is"):
            rekindle.solve(profile, budget)
        return
    plan = rekindle.solve(profile, budget)
    count = kinds(plan)
    assert (plan.predicted_peak, count["recompute"], count["keep"]) == expected


@pytest.mark.parametrize("name", FROM_A_TABLE)
def test_fake_tensors_have_the_bytes_of_real_ones(name: str) -> None:
    fake, (_, real) = from_a_table(name), measured(name)
    assert fake.recompute_peak == real.recompute_peak
    assert plain_prediction(fake).peak == plain_prediction(real).peak
    assert len(fake.blocks) == len(real.blocks)
