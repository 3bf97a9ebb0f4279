"""Buffers end a step as without a replay, and a replay starts from what they were."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import rekindle
from tests.regions.recompute.buffered import (
    Counting,
    InPlace,
    Run,
    Scaled,
    assert_trains_alike,
)
from tests.toys import same_bits


class Reassigned(Scaled):
    """An average over time, assigned anew at each call."""

    def __init__(self) -> None:
        super().__init__(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.apply_scale(x)
        self.scale = 0.9 * self.scale + 0.1 * x.detach().mean(0)
        return y


class ThroughData(Scaled):
    """The same, written through `.data`, which no version counter sees, as many codebooks do."""

    def __init__(self) -> None:
        super().__init__(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.apply_scale(x)
        self.scale.data.mul_(0.9).add_(0.1 * x.detach().mean())
        return y


class OwnBatchNorm(nn.Module):
    """A batch norm of somebody's own, whose kernel writes statistics no version counter sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(x, self.mean, self.variance, training=True)
        return y * (self.mean.clone() + 1)


@pytest.mark.parametrize("steps", [1, 3])
def test_batch_norm_statistics_end_as_in_the_plain_run(steps: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    assert_trains_alike(model, steps=steps)


def test_batch_norm_counts_a_batch_once() -> None:
    norm = nn.BatchNorm1d(8)
    for _ in range(3):
        rekindle.checkpoint(norm, torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert norm.num_batches_tracked == 3


def test_batch_norm_with_a_cumulative_average_ends_as_in_the_plain_run() -> None:
    assert_trains_alike(nn.BatchNorm1d(8, momentum=None), steps=3)


def test_batch_norm_in_eval_is_as_in_the_plain_run() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].running_mean += 1
    assert_trains_alike(model.eval(), steps=2)


def test_batch_norm_statistics_are_right_at_the_end_of_forward_too() -> None:
    a, x = nn.BatchNorm1d(8), torch.randn(4, 8, requires_grad=True)
    b = copy.deepcopy(a)
    a(x)
    rekindle.checkpoint(b, x)
    assert torch.equal(a.running_mean, b.running_mean)


def test_backward_leaves_every_buffer_the_tensor_it_was() -> None:
    norm, x = nn.BatchNorm1d(8), torch.randn(4, 8, requires_grad=True)
    before = dict(norm.named_buffers())
    rekindle.checkpoint(norm, x).sum().backward()
    assert all(norm.get_buffer(name) is buffer for name, buffer in before.items())


def test_instance_norm_statistics_end_as_in_the_plain_run() -> None:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    assert_trains_alike(norm, lambda model, x, run: run(model, x.view(2, 4, 4)), steps=2)


def test_spectral_norm_gradient_is_that_of_the_plain_run() -> None:
    assert_trains_alike(parametrizations.spectral_norm(nn.Linear(8, 8)), steps=3)


def test_spectral_norm_by_hooks_has_the_gradient_of_the_plain_run() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh())
    assert_trains_alike(model, lambda model, x, run: run(model, x), steps=1)


def test_spectral_norm_trains_right_after_an_evaluation() -> None:
    """A power iteration that stood still in the first forward moves in the second."""

    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        run(model.eval(), x)
        return run(model.train(), x)

    assert_trains_alike(parametrizations.spectral_norm(nn.Linear(8, 8)), program, steps=2)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "model",
    [Reassigned(), InPlace(), ThroughData(), OwnBatchNorm(), Counting()],
    ids=lambda m: type(m).__name__,
)
def test_a_changing_buffer_that_decides_the_output(model: nn.Module, steps: int) -> None:
    assert_trains_alike(model, steps=steps)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_large_buffer_that_changes_in_place(steps: int) -> None:
    assert_trains_alike(InPlace(size=(1 << 18) + 8), steps=steps)


def test_a_buffer_that_changes_only_in_a_later_step() -> None:
    class Late(Scaled):
        def __init__(self) -> None:
            super().__init__(torch.ones(8))
            self.step = 0

        def forward(self, x: Tensor) -> Tensor:
            y = self.apply_scale(x)
            if not rekindle.is_recomputing():
                self.step += 1
            if self.step == 2:
                self.scale.mul_(3)
            return y

    assert_trains_alike(Late(), steps=3)


def test_a_large_buffer_that_does_not_change_is_not_copied() -> None:
    seen = []

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1 << 19))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.mask.data_ptr())
            return (x * self.mask[:8]).exp()

    rekindle.checkpoint(Masked(), torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert seen[0] == seen[1]


def test_a_module_called_twice_in_a_region() -> None:
    assert_trains_alike(
        Counting(), lambda model, x, run: run(lambda x: model(model(x)), x), steps=2
    )


def test_a_module_called_in_two_regions_before_backward() -> None:
    assert_trains_alike(InPlace(), lambda model, x, run: run(model, run(model, x)), steps=2)


def test_a_module_called_after_its_region_and_before_backward() -> None:
    assert_trains_alike(InPlace(), lambda model, x, run: run(model, x) + model(x), steps=2)


def test_a_module_in_nested_regions() -> None:
    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        return run(lambda x: model(run(model, x).cos()), x)

    assert_trains_alike(InPlace(), program, steps=2)


def test_a_second_backward_replays_from_the_same_buffers() -> None:
    model, x = InPlace(), torch.randn(4, 8, requires_grad=True)
    y = rekindle.checkpoint(model, x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_two_modules_that_share_a_buffer() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = InPlace(), InPlace()
            self.second.scale = self.first.scale

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    assert_trains_alike(Pair(), steps=2)


def test_a_buffer_that_carries_a_graph_from_call_to_call() -> None:
    """Back-propagation through time, with the hidden state in a buffer."""

    class Recurrent(nn.Module):
        hidden: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.gate = nn.Parameter(torch.randn(8))
            self.register_buffer("hidden", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = (self.lin(x) + self.hidden * self.gate).tanh()
            return self.hidden

    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        model.hidden = torch.ones(8)
        y = run(model, x) + run(model, x.cos())
        model.hidden = torch.ones(8)
        return y

    assert_trains_alike(Recurrent(), program)


def test_a_buffer_that_is_registered_in_forward() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "scale"):
                self.register_buffer("scale", x.detach().mean(0).exp())
                return self.lin(x).exp()
            return (self.lin(x) * self.scale).sin()

    assert_trains_alike(Lazy(), steps=2)


def test_a_cache_buffer_that_is_none_until_the_first_forward() -> None:
    class Cached(nn.Module):
        table: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("table", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(8.0).exp()
            return (self.lin(x) * self.table).sin()

    assert_trains_alike(Cached(), steps=2)


def test_a_lazy_module_whose_buffers_are_made_in_its_first_forward() -> None:
    a, b, x = nn.LazyBatchNorm1d(), nn.LazyBatchNorm1d(), torch.randn(4, 8, requires_grad=True)
    a(x).square().sum().backward()
    rekindle.checkpoint(b, x).square().sum().backward()
    assert torch.equal(a.running_mean, b.running_mean)
    assert same_bits(a.weight.grad, b.weight.grad)


def test_a_buffer_made_in_inference_mode() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.register_buffer("table", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.table).exp()

    model, x = Table(), torch.zeros(4, 8, requires_grad=True)
    y = rekindle.checkpoint(model, x)
    y.sum().backward()
    assert torch.equal(x.grad, y)


@pytest.mark.parametrize("fails", [False, True])
def test_a_buffer_that_a_forward_changes_and_restores_is_restored_where_a_replay_ends_early(
    fails: bool,
) -> None:
    """Contrived: it is written to through `.data`, which no version counter sees."""
    calls = []

    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            before = self.scale.clone()
            self.scale.data.mul_(3)
            y = (x * self.scale.clone()).exp()
            calls.append(1)
            if fails and len(calls) == 2:
                raise RuntimeError("no")
            y = y.sum()  # saves nothing: a replay has stopped before
            self.scale.data.copy_(before)
            return y

    model, x = Borrowing(), torch.zeros(4, 8, requires_grad=True)
    y = rekindle.checkpoint(model, x, early_stop=not fails)
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            y.backward()
    else:
        y.backward()
        assert len(calls) == 1
        assert torch.equal(x.grad, torch.full((4, 8), 3.0))
    assert torch.equal(model.scale, torch.ones(8))
