"""Profiles without an accelerator and without memory: the bytes of a measured one, known times."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from benchmarks.decoder import Decoder, Shape
from rekindle.modules.forward import forward_of
from rekindle.planner.measure.measure_step import measure_step
from rekindle.planner.plan_for_budget import plain_prediction
from rekindle.planner.training_step import TrainingStep
from tests.planner.cases import Case, step, unchanged
from tests.planner.fake_cases import every_case, that_learns
from tests.toys import Block, Stack, same_bits

pytest.importorskip("scipy")


def without_times(profile: rekindle.Profile) -> list[Any]:
    """All there is of a profile but times, in pieces that are easily told apart."""
    return [
        replace(profile, rest_seconds=0.0, recompute_seconds=0.0, planning_peak=None, blocks=()),
        *(replace(block, candidates=()) for block in profile.blocks),
        *(
            replace(option, forward_seconds=0.0, backward_seconds=0.0, seconds_noise=0.0)
            for block in profile.blocks
            for option in block.candidates
        ),
    ]


@every_case
@pytest.mark.usefixtures("same_sets")
def test_all_but_times_is_as_measured(case: Callable[[], Case]) -> None:
    model, batch = case()
    measured = rekindle.profile(model, batch)
    fake = rekindle.profile(model, batch, device="meta", like="cpu")
    assert without_times(fake) == without_times(measured)
    assert max(len(block.candidates) for block in fake.blocks) >= 4


@every_case
@pytest.mark.usefixtures("few_sets")
def test_the_model_ends_as_it_was(case: Callable[[], Case]) -> None:
    model, batch = case()
    step(model, batch)
    with unchanged(model):
        rekindle.profile(model, batch, device="meta", like="H200")
    assert not any(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers()))


@pytest.mark.usefixtures("same_sets")
def test_a_model_on_the_meta_device_has_the_profile_of_a_real_one() -> None:
    model, batch = that_learns()
    real = rekindle.profile(model, batch, device="meta", like="H200")
    meta = rekindle.profile(model.to("meta"), batch.to("meta"), device="meta", like="H200")
    assert meta == real


@pytest.mark.usefixtures("same_sets")
def test_a_model_of_fake_tensors_has_the_profile_of_a_real_one() -> None:
    model, batch = that_learns()
    real = rekindle.profile(model, batch, device="meta", like="H200")
    with FakeTensorMode():
        twin, fake_batch = Stack(3, 16, 0.1), torch.randn(64, 16, requires_grad=True)
    assert rekindle.profile(twin, fake_batch, device="meta", like="H200") == real


def test_a_function_may_reach_tensors_on_the_meta_device() -> None:
    model, batch = that_learns()
    given = rekindle.profile(model, batch, device="meta", like="H200")
    model.to("meta")
    far = batch.detach().to("meta").requires_grad_()
    reached = rekindle.profile(model, lambda: model(far), device="meta", like="H200")
    assert reached.blocks == given.blocks
    assert far.grad is None


def test_a_function_that_reaches_what_learns_leaves_its_gradient_alone() -> None:
    model, batch = that_learns()
    batch.grad = before = torch.randn(64, 16)
    values = before.clone()
    rekindle.profile(model, lambda: model(batch), device="meta", like="H200")
    assert batch.grad is before
    assert same_bits(before, values)


def test_nothing_real_is_made_or_computed() -> None:
    """By what reaches the kernels, below the fake tensors."""

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
            real.extend(t.shape for t in made if not (t.is_meta or isinstance(t, FakeTensor)))
            return out

    real: list[torch.Size] = []
    model, batch = that_learns()
    with Listening():
        model(batch)
        assert real
        real.clear()
        rekindle.profile(model, batch, device="meta", like="H200")
    assert real == []


def test_times_are_the_same_every_time() -> None:
    model, batch = that_learns()
    profiles = [rekindle.profile(model, batch, device="meta", like="A100-80GB") for _ in range(2)]
    assert profiles[0] == profiles[1]


def test_a_profile_does_not_depend_on_when_the_garbage_collector_comes() -> None:
    model, batch = that_learns()
    thresholds = gc.get_threshold()
    found = []
    try:
        for threshold in (0, 40, 700):  # never, after each few objects, and as usual
            gc.set_threshold(threshold)
            found.append(rekindle.profile(model, batch, device="meta", like="A100-80GB"))
    finally:
        gc.set_threshold(*thresholds)
    assert found[0] == found[1] == found[2]


@pytest.mark.filterwarnings("ignore:The plan no longer matches")  # a CPU has another dropout
def test_a_plan_says_what_it_was_made_for_and_is_carried_out_by_the_real_model() -> None:
    model, batch = that_learns()
    profile = rekindle.profile(model, batch, device="meta", like="RTX 4090")
    plan = rekindle.solve(profile, "60%")
    assert plan.device == profile.device == "RTX 4090"
    plain = step(model, batch)
    rekindle.apply(model, plan)
    assert any(forward_of(block) is not None for block in model.blocks)
    assert all(map(same_bits, plain, step(model, batch)))


def test_a_plan_made_on_the_meta_device_keeps_the_real_step_within_its_budget() -> None:
    model, batch = that_learns()
    meta = Stack(3, 16, 0.1).to("meta")
    far = batch.detach().to("meta").requires_grad_()
    profile = rekindle.profile(meta, far, device="meta", like="cpu")
    plan = rekindle.solve(profile, "60%")
    assert measure_step(TrainingStep(model, batch), plan, profile).peak <= plan.budget


def seventy(layers: int) -> Case:
    """The shapes of a model of 70 billion parameters, on the meta device."""
    shape = Shape(
        "70b", dim=8192, ffn=28672, heads=64, kv_heads=8, layers=layers, batch=1, tokens=8192
    )
    return Decoder(shape, device="meta"), shape.hidden_states(device="meta").requires_grad_()


def test_layers_that_fit_nowhere_here_are_profiled() -> None:
    model, batch = seventy(2)
    optimizer = torch.optim.AdamW(model.parameters())
    profile = rekindle.profile(model, batch, device="meta", like="H200", optimizer=optimizer)
    weights = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    assert weights > 3 * 2**30
    assert profile.static_bytes == 4 * weights + buffers + batch.nbytes
    keep = profile.blocks[0].candidates[0]
    assert keep.bytes_held > 3 * 2**30
    assert rekindle.solve(profile, "50%").predicted_peak < plain_prediction(profile).peak


@pytest.mark.usefixtures("few_sets")
def test_more_layers_have_the_same_candidates_and_a_longer_order() -> None:
    few, many = (rekindle.profile(*seventy(n), device="meta", like="H200") for n in (2, 6))
    assert len(many.blocks) == 1
    assert many.blocks == few.blocks
    assert len(many.order) == 3 * len(few.order)
    assert many.rest_seconds == pytest.approx(few.rest_seconds)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_model_without_memory_is_not_measured(kind: str) -> None:
    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        model = Stack(2, 16)
    for call in (rekindle.profile, lambda m, x: rekindle.fit(m, x, "50%")):
        with pytest.raises(ValueError, match=r'no memory.*device="meta"'):
            call(model, torch.randn(4, 16))


def test_parameters_of_another_class_are_refused_by_name() -> None:
    class Special(nn.Parameter):
        pass

    model = Stack(2, 16)
    model.blocks[0].norm.weight = Special(torch.ones(16))
    with pytest.raises(ValueError, match=r"blocks\.0\.norm\.weight is a Special"):
        rekindle.profile(model, torch.randn(4, 16), device="meta", like="H200")


def test_a_buffer_that_is_fake_teaches_nothing_of_the_real_one() -> None:
    """The engine learns once whether a large buffer changes behind its version counter's back."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(16)
            self.register_buffer("scale", torch.ones(2**15, 16))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x * self.scale[: x.shape[0]])
            self.scale.data.mul_(2)
            return out

    def gradients_of(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        rekindle.apply(model, "recompute")
        model(batch).sum().backward()
        rekindle.remove(model)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    batch = torch.randn(4, 16)
    fresh, seen = (nn.Sequential(Behind(), Behind()) for _ in range(2))
    seen.load_state_dict(fresh.state_dict())
    rekindle.profile(seen, batch, device="meta", like="cpu")
    assert all(map(same_bits, gradients_of(fresh), gradients_of(seen)))
