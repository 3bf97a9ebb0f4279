"""Heads by rows in profiles and plans: measured beside the plain ones, chosen where they help."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import Plan, Profile
from rekindle.modules.forward import forward_of
from rekindle.planner.plan_for_budget import plain_prediction, recompute_all
from rekindle.planner.trace import head_ways
from rekindle.sizes import format_bytes, rounded_up
from rekindle.strategy import Rows
from tests.language_models import (
    LOGITS,
    LanguageModel,
    gradients_of,
    next_word,
    same,
    some_words,
)
from tests.toys import Block

BY_ROWS = (("head", "Linear", Rows()),)
WITHOUT_LOGITS = (("head", "Linear", Rows(exact=False)),)


@pytest.fixture(scope="module")
def profiled() -> tuple[nn.Module, Tensor, Profile]:
    torch.manual_seed(0)
    model, words = LanguageModel(), some_words()
    return model, words, rekindle.profile(model, words)


def on_meta(model: nn.Module, batch: Any, **options: Any) -> Profile:
    return rekindle.profile(model, batch, device="meta", like="cpu", **options)


def heads_in(profile: Profile) -> list[Any]:
    return [rest.heads for rest in profile.rests]


# --- Profiles ------------------------------------------------------------------------------------


def test_a_profile_has_both_ways_to_run_the_head(profiled: Any) -> None:
    """As a whole there are three tensors of logits at once, by rows one and parts of others."""
    _, _, profile = profiled
    (by_rows,) = profile.rests
    assert (profile.heads, by_rows.heads) == ((), BY_ROWS)
    assert profile.rest_peak > 2.9 * LOGITS
    assert by_rows.rest_peak < 1.5 * LOGITS
    assert profile.recompute_peak - by_rows.recompute_peak == profile.rest_peak - by_rows.rest_peak


def test_without_a_device_both_ways_are_known_to_the_byte(profiled: Any) -> None:
    model, words, profile = profiled
    fake, measured = (
        [(rest.heads, rest.rest_peak, rest.recompute_peak) for rest in (found.rest, *found.rests)]
        for found in (on_meta(model, words), profile)
    )
    assert fake == measured


def test_a_loss_outside_the_model_goes_by_rows_too(profiled: Any) -> None:
    """The logits live until the backward has ended, so their gradient is beside them."""
    model, words = LanguageModel(loss=None), some_words()
    profile = on_meta(model, words, loss=next_word)
    assert heads_in(profile) == [BY_ROWS]
    assert profile.rests[0].output_held == profile.output_held == LOGITS
    assert heads_in(on_meta(model, lambda: next_word(model(words), words))) == [BY_ROWS]


def test_logits_that_are_looked_at_in_another_way_are_simply_there() -> None:
    for loss in (
        lambda logits, _: logits.transpose(1, 2).contiguous().sigmoid().mean(),
        lambda logits, _: logits.sort().values[..., 0].mean(),
    ):
        assert heads_in(on_meta(LanguageModel(loss=loss), some_words())) == []


class Projected(LanguageModel):
    """Blocks that follow a module which makes more numbers than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.wide(self.narrow(self.embedding(words))) * 1
        for block in self.blocks:
            hidden = block(hidden)
        return next_word(self.head(hidden), words)


def test_a_step_that_fails_by_rows_is_planned_with_its_head_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As an op would that nobody has tried on rows."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no such rows")

    monkeypatch.setattr("rekindle.rows.by_rows.row_tensor", fails)
    model, words = LanguageModel(), some_words()
    profile = rekindle.profile(model, words)
    assert (profile.heads, profile.rests) == ((), ())
    (record,) = [each for each in caplog.records if "by rows" in each.message]
    assert record.message.endswith("its head runs as a whole: RuntimeError: no such rows")
    assert forward_of(model.head) is None


def test_a_module_that_blocks_follow_is_no_head() -> None:
    assert heads_in(on_meta(Projected(), some_words())) == [BY_ROWS]


def test_a_head_whose_output_is_small_is_left_as_it_is() -> None:
    small = nn.Sequential(*[Block(16) for _ in range(3)], nn.Linear(16, 20))
    for shape in ((8, 64, 16), (64, 16)):
        profile = on_meta(small, torch.randn(shape), loss=lambda out: out.logsumexp(-1).sum())
        assert heads_in(profile) == []


# --- Where the plain step does not fit -----------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has room for what is by rows alone."""
    monkeypatch.setattr(head_ways, "free_bytes", lambda _: 3 * LOGITS)


def test_planning_takes_no_more_than_a_step_with_blocks_recomputed_and_heads_by_rows(
    profiled: Any, full: None
) -> None:
    model, words, _ = profiled
    profile = rekindle.profile(model, words)
    (by_rows,) = profile.rests
    room = by_rows.recompute_peak - profile.static_bytes
    assert profile.planning_peak <= profile.static_bytes + 1.05 * room


def test_what_does_not_fit_is_estimated_and_not_below_what_it_would_be(
    profiled: Any, full: None
) -> None:
    model, words, measured = profiled
    profile = rekindle.profile(model, words)
    assert profile.recompute_peak is None
    assert measured.rest_peak <= profile.rest_peak <= 1.5 * measured.rest_peak
    assert profile.rests[0].rest_peak == measured.rests[0].rest_peak


def test_it_is_planned_all_the_same(profiled: Any, full: None) -> None:
    model, words, _ = profiled
    plain = gradients_of(model, words)
    plan = rekindle.fit(model, words, "50%")
    assert plan.heads == BY_ROWS
    assert same(gradients_of(model, words), plain)
    rekindle.remove(model)


# --- Plans ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(profiled: Any) -> tuple[nn.Module, Tensor, Profile, Plan, Any]:
    """The model, fitted to half of its activations, and its gradients before that."""
    model, words, profile = profiled
    plain = gradients_of(model, words)
    return model, words, profile, rekindle.fit(model, words, "50%", profile=profile), plain


def test_a_plan_has_the_head_by_rows_where_that_fits_and_the_plain_one_does_not(
    fitted: Any,
) -> None:
    _, _, profile, plan, _ = fitted
    assert plan.heads == BY_ROWS
    assert plan.measured_peak <= plan.budget < plain_prediction(profile).peak
    assert not plan.keeps_all


def test_gradients_under_the_plan_are_those_of_the_plain_step(fitted: Any) -> None:
    model, words, _, plan, plain = fitted
    assert same(gradients_of(model, words), plain)
    assert plan.verified.startswith("gradients bit for bit, with 3 of 3 blocks and the head")


def test_the_predicted_peak_is_the_measured_one(fitted: Any) -> None:
    plan = fitted[3]
    assert plan.predicted_peak == plan.measured_peak


def test_a_plan_prints_its_head(fitted: Any) -> None:
    _, _, profile, plan, _ = fitted
    assert str(plan).splitlines()[-1] == "  head: 1 x Linear: rows"
    assert "with head by rows: " in str(profile)
    assert "<td>head</td>" in plan._repr_html_()


def test_plans_and_profiles_are_saved_with_their_heads(fitted: Any, tmp_path: Path) -> None:
    _, _, profile, plan, _ = fitted
    for value in (plan, profile):
        value.save(tmp_path / "value.json")
        assert type(value).load(tmp_path / "value.json") == value


def test_a_plan_is_applied_to_another_model_and_removed(fitted: Any) -> None:
    plan = fitted[3]
    model = LanguageModel()
    applied = rekindle.apply(model, plan)
    assert str(applied).splitlines()[-1] == "  head: Linear: rows"
    assert forward_of(model.head).strategy == Rows()
    rekindle.remove(model)
    assert "forward" not in vars(model.head)


def test_a_plan_for_a_model_without_the_head_is_refused(fitted: Any) -> None:
    plan = replace(fitted[3], heads=(("norm", "Linear", Rows()),))
    with pytest.raises(ValueError, match="The plan has a Linear at 'norm', but the model has Lay"):
        rekindle.apply(LanguageModel(), plan)


def test_a_model_that_fits_as_it_is_keeps_its_head(profiled: Any) -> None:
    plan = rekindle.solve(profiled[2], "100%")
    assert plan.keeps_all
    assert plan.heads == ()


def test_a_frontier_goes_from_plain_heads_to_those_by_rows(profiled: Any, tmp_path: Path) -> None:
    """By the times of a table, in which rows take longer."""
    profile = on_meta(*profiled[:2])
    points = rekindle.frontier(profile)
    assert [bool(point.plan.heads) for point in points] == [False] + [True] * (len(points) - 1)
    assert points[-1].peak <= profile.rests[0].recompute_peak
    page = points.report(tmp_path / "page.html", profile=profile)
    assert re.search(r'"heads": ?\["head: rows"\]', page.read_text())
    assert profile.report(tmp_path / "page.html", snapshot=tmp_path / "s.pickle").exists()


def test_the_step_with_every_block_recomputed_counts_with_its_own_head(profiled: Any) -> None:
    profile = profiled[2]
    (by_rows,) = profile.rests
    found = recompute_all(profile, by_rows.recompute_peak)
    assert found is not None
    assert (found.heads, found.prediction.peak) == (BY_ROWS, by_rows.recompute_peak)
    assert recompute_all(profile, by_rows.recompute_peak - 1) is None


def test_an_error_names_the_least_that_heads_by_rows_leave(profiled: Any) -> None:
    profile = profiled[2]
    least = format_bytes(rounded_up(profile.rests[0].recompute_peak))
    with pytest.raises(rekindle.BudgetError, match=f"The least that works is {least},"):
        rekindle.solve(profile, profile.rests[0].recompute_peak // 2)


def test_a_larger_call_is_planned_with_the_head_by_rows() -> None:
    model, words = LanguageModel(), some_words()
    plan = rekindle.fit(model, words, "50%")
    assert plan.heads == BY_ROWS
    larger = some_words(samples=8)
    found = gradients_of(model, larger)
    again = rekindle.plan_of(model)
    assert (again.inputs, again.heads) == (((8, 64),), BY_ROWS)
    rekindle.remove(model)
    assert same(gradients_of(model, larger), found)


def test_a_larger_call_with_the_loss_outside_is_planned_with_the_head_by_rows() -> None:
    model, words = LanguageModel(loss=None), some_words()
    rekindle.fit(model, lambda: next_word(model(words), words), "60%")
    larger = some_words(samples=8)
    gradients_of(model, larger, loss=lambda out: next_word(out, larger))
    assert rekindle.plan_of(model).heads == BY_ROWS


def test_an_explanation_has_the_measured_gain_of_rows(profiled: Any) -> None:
    model, words, _ = profiled
    found = rekindle.explain(model, words, device="meta", like="cpu")
    every = (*found.changes, *found.others)
    (change,) = [each for each in every if each.name == "exact rows for the loss"]
    assert change.how == 'rekindle.apply(model, {"head": rekindle.strategy.Rows()})'
    assert (change.seconds is not None, change.saved > 1.5 * LOGITS) == (True, True)


# --- Heads without logits ------------------------------------------------------------------------


def test_a_plan_that_need_not_be_exact_may_do_without_logits() -> None:
    torch.manual_seed(0)
    model, words = LanguageModel(), some_words()
    plain = gradients_of(model, words)
    profile = rekindle.profile(model, words, exact=False)
    assert heads_in(profile) == [BY_ROWS, WITHOUT_LOGITS]
    assert profile.rests[1].rest_peak < 0.6 * LOGITS
    budget = (profile.rests[0].recompute_peak + profile.rests[1].recompute_peak) // 2
    plan = rekindle.fit(model, words, budget, profile=profile)
    assert plan.heads == WITHOUT_LOGITS
    assert plan.measured_peak <= budget
    assert "as in the plan where these are not exact" in plan.verified
    found = gradients_of(model, words)
    for one, other in zip(found[1], plain[1], strict=True):
        torch.testing.assert_close(one, other)
    rekindle.remove(model)


def test_an_exact_profile_is_refused_for_a_plan_that_need_not_be(profiled: Any) -> None:
    model, words, profile = profiled
    with pytest.raises(ValueError, match=r"exact=False, but the profile was measured without it"):
        rekindle.fit(model, words, "50%", profile=profile, exact=False)
    with pytest.raises(TypeError, match="exact should be True or False, but got str"):
        rekindle.fit(model, words, "50%", exact="no")
