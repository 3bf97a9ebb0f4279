"""How far gradients of a plan may be from a reference that does not repeat itself."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.planner import verify
from rekindle.planner.gradient_fingerprints import FingerprintCollector, GradientFingerprints
from rekindle.planner.verify import GradientError, verify_gradients
from tests.toys import Stack

pytest.importorskip("scipy")

Gradients = Mapping[str, Tensor]
Verify = Callable[..., tuple[str, int]]


@pytest.fixture(scope="module")
def planned() -> tuple[rekindle.Plan, rekindle.Profile]:
    profile = rekindle.profile(Stack(4, 16), torch.randn(256, 16), loss=lambda out: out.mean())
    return rekindle.solve(profile, "60%"), profile


@pytest.fixture
def verified(planned: tuple[rekindle.Plan, rekindle.Profile], monkeypatch: Any) -> Verify:
    """Verifies gradients of a plan by those of runs of the reference; counts the runs."""
    plan, profile = planned

    def run(found: Gradients, *references: Gradients) -> tuple[str, int]:
        left = list(map(fingerprints, references))
        monkeypatch.setattr(verify, "_gradients", lambda *_: left.pop(0))
        step: Any = None
        try:
            text = verify_gradients(step, plan, fingerprints(found), profile, plan.plain_peak) or ""
        except GradientError as error:
            text = str(error)
        return text.partition(", with ")[0], len(references) - len(left)

    return run


def fingerprints(gradients: Gradients) -> GradientFingerprints:
    collector = FingerprintCollector()
    for name, gradient in gradients.items():
        collector.add(name, gradient)
    return collector.read()


def drawn(seed: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


TRUE = {name: drawn(i, torch.empty(64, 64)) for i, name in enumerate("abcd")}
"""Gradients without noise."""


def noisy(seed: int, noise: float = 1e-2, names: str = "abc", **others: Tensor) -> Gradients:
    """Gradients of a run: some have noise of a relative size, "d" always repeats."""
    found = {
        name: g + noise * drawn(seed + i, g) if name in names else g
        for i, (name, g) in enumerate(TRUE.items())
    }
    return found | others


def off(share: float, seed: int = 9000) -> Tensor:
    """The gradient "d", off by a share of its norm."""
    return TRUE["d"] + share * drawn(seed, TRUE["d"])


WRONG = {
    "off by a rounding": torch.nextafter(TRUE["d"], TRUE["d"] + 1),
    "off by a hundredth": off(0.01),
    "doubled": 2 * TRUE["d"],
    "zero": 0 * TRUE["d"],
    "of another dropout mask": TRUE["d"] * (drawn(7000, TRUE["d"]) > 0) * 2,
    "of another block": TRUE["a"],
}


def test_gradients_that_are_equal_take_one_run_of_the_reference(verified: Verify) -> None:
    assert verified(TRUE, TRUE) == ("gradients bit for bit", 1)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_gradient_that_differs_from_a_reference_that_repeats_is_refused(
    verified: Verify, wrong: str
) -> None:
    text, runs = verified(TRUE | {"d": WRONG[wrong]}, TRUE, TRUE, TRUE)
    assert "than the same step without it, which repeats bit for bit:\n  d (" in text
    assert runs == 3


@pytest.mark.parametrize("share", [1e-7, 7e-4, 1e-2])
def test_a_gradient_that_happens_to_repeat_may_differ_as_much_as_the_others(
    verified: Verify, share: float
) -> None:
    found = "gradients bit for bit but for 4 parameters, within the run-to-run spread"
    assert verified(noisy(100, d=off(share)), noisy(200), noisy(300)) == (found, 2)


def test_noise_that_only_the_last_run_shows_counts(verified: Verify) -> None:
    found = "gradients bit for bit but for 1 parameter, within the run-to-run spread"
    assert verified(TRUE | {"d": off(7e-4)}, TRUE, TRUE, noisy(100)) == (found, 3)


@pytest.mark.parametrize(
    "wrong", ["doubled", "zero", "of another dropout mask", "of another block"]
)
@pytest.mark.parametrize("noise", [1e-4, 1e-2, 1.0])
def test_a_gradient_that_is_wrong_is_refused_among_noisy_ones(
    verified: Verify, wrong: str, noise: float
) -> None:
    """However noisy the others are: their spread allows a quarter of its norm at most."""
    runs = [noisy(seed, noise) for seed in (200, 300, 400)]
    text, count = verified(noisy(100, noise, d=WRONG[wrong]), *runs)
    assert "than the same step without it, farther off than its runs are apart:\n  d (" in text
    assert count == 3


@pytest.mark.parametrize(
    "wrong", ["doubled", "zero", "of another dropout mask", "of another block"]
)
def test_a_noisy_gradient_that_is_wrong_is_refused(verified: Verify, wrong: str) -> None:
    runs = [noisy(seed, names="abcd") for seed in (200, 300, 400)]
    text, count = verified(noisy(100, d=WRONG[wrong]), *runs)
    assert "farther off than its runs are apart:\n  d (" in text
    assert "\n  a (" not in text
    assert count == 3


def test_a_gradient_that_nearly_repeats_may_differ_as_much_as_all_together(
    verified: Verify,
) -> None:
    """In few runs, the noise of one gradient may happen to be small."""
    runs = [noisy(200, d=off(1e-6, 1)), noisy(300, d=off(1e-6, 2))]
    found = "gradients bit for bit but for 4 parameters, within the run-to-run spread"
    assert verified(noisy(100, d=off(1e-2)), *runs) == (found, 2)


def test_a_gradient_of_nothing_but_rounding_does_not_excuse_others_that_are_noisy(
    verified: Verify,
) -> None:
    """The gradient of a key's bias is 0 without rounding: its relative spread is above 1."""
    bias = {seed: {"bias": 1e-5 * drawn(seed, torch.empty(64))} for seed in (1, 2, 3, 4)}
    runs = [noisy(seed * 100, 1e-3, "abcd") | bias[seed] for seed in (2, 3, 4)]
    text, _ = verified(noisy(100, 1e-3, d=off(0.03)) | bias[1], *runs)
    assert "farther off than its runs are apart:\n  d (" in text
    right = noisy(500, 1e-3, "abcd") | bias[1]
    assert "within the run-to-run spread" in verified(right, *runs)[0]


def test_gradients_that_are_not_finite_excuse_no_others(verified: Verify) -> None:
    nan = torch.full((3,), float("nan"))
    runs = [TRUE | {"nan": each} for each in (nan, torch.ones(3), nan)]
    text, _ = verified(TRUE | {"d": off(0.01), "nan": nan}, *runs)
    assert "farther off than its runs are apart:\n  d (" in text
