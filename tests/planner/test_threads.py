"""Models that several threads train are fitted again once, or not at all."""

import threading

import pytest
import torch

import rekindle
from rekindle.planner import fit
from tests.toys import Stack

pytest.importorskip("scipy")


def test_two_threads_that_call_a_model_with_more_plan_it_again_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = []
    refit = fit.refit
    monkeypatch.setattr(fit, "refit", lambda *args: plans.append(refit(*args)) or plans[-1])
    model = Stack(3, 16)
    rekindle.fit(model, lambda: model(torch.randn(32, 16)).square().mean(), "80%")
    errors: list[BaseException] = []
    ready = threading.Barrier(2)

    def train() -> None:
        try:
            ready.wait()
            for _ in range(3):
                model(torch.randn(64, 16)).square().mean().backward()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert plans == [rekindle.plan_of(model)]


def test_a_model_that_two_threads_train_is_not_planned_again_in_the_middle_of_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Stack(3, 16)
    plan = rekindle.fit(model, lambda: model(torch.randn(32, 16)).square().mean(), "80%")
    loss = model(torch.randn(32, 16)).square().mean()
    other = threading.Thread(target=lambda: model(torch.randn(64, 16)))
    other.start()
    other.join()
    loss.backward()
    assert "several threads train it" in caplog.text
    assert rekindle.plan_of(model) == plan
    assert all(p.grad is not None for p in model.parameters())
