"""Modules with state: buffers end a step as in the plain run (field note 7), modes are replayed."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import rekindle
from tests.toys import same_bits

Run = Callable[..., Any]


def plain(function: Run, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def train(
    model: nn.Module, program: Callable[[nn.Module, Tensor, Run], Tensor], run: Run, steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Some steps of SGD on a copy of the model: all gradients on the way, and its final state."""
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    grads = []
    for _ in range(steps):
        x = torch.randn(4, 8, requires_grad=True)
        program(model, x, run).square().sum().backward()
        with torch.no_grad():
            for leaf in (x, *model.parameters()):
                if leaf.grad is not None:
                    grads.append(leaf.grad)
                    leaf.sub_(0.01 * leaf.grad)
                    leaf.grad = None
    return grads, [*model.parameters(), *model.buffers()]


def assert_trains_alike(
    model: nn.Module,
    program: Callable[[nn.Module, Tensor, Run], Tensor] = lambda model, x, run: run(model, x),
    run: Run = rekindle.checkpoint,
    steps: int = 1,
) -> None:
    """Gradients and final state, buffers included, are those of the plain run, bit for bit."""
    grads_a, state_a = train(model, program, plain, steps)
    grads_b, state_b = train(model, program, run, steps)
    assert len(grads_a) == len(grads_b)
    for i, (a, b) in enumerate(zip(grads_a, grads_b, strict=True)):
        assert same_bits(a, b), f"gradient {i} differs"
    for i, (a, b) in enumerate(zip(state_a, state_b, strict=True)):
        assert same_bits(a, b), f"parameter or buffer {i} differs"


class Scaled(nn.Module):
    """Base of toys whose buffer decides the output: a wrong buffer is a wrong gradient."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("scale", scale)

    def apply_scale(self, x: Tensor) -> Tensor:
        return (self.lin(x) * self.scale.flatten()[:8].mean()).sin()


class Reassigned(Scaled):
    """An average over time, assigned anew at each call."""

    def __init__(self) -> None:
        super().__init__(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.apply_scale(x)
        self.scale = 0.9 * self.scale + 0.1 * x.detach().mean(0)
        return y


class InPlace(Scaled):
    """The same, written in place."""

    def __init__(self, size: int = 8) -> None:
        super().__init__(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.apply_scale(x)
        self.scale.mul_(0.9).add_(0.1 * x.detach().mean())
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


class Counting(nn.Module):
    """An integer buffer that counts calls and decides the output."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return (self.lin(x) * self.calls.clone()).sin()


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


# Modes


class ModeDecides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.lin(x))
        return x.exp() if self.training else x.sin()


def test_eval_between_forward_and_backward_does_not_reach_the_replay() -> None:
    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        y = run(model.train(), x)
        model.eval()
        return y

    assert_trains_alike(ModeDecides(), program, steps=2)


def test_modes_set_between_forward_and_backward_are_as_set_after_it() -> None:
    model, x = ModeDecides(), torch.randn(4, 8, requires_grad=True)
    y = rekindle.checkpoint(model, x)
    model.drop.eval()
    y.sum().backward()
    assert model.training
    assert model.lin.training
    assert not model.drop.training


def test_modes_are_as_before_after_an_exception_in_replay() -> None:
    class Raising(ModeDecides):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if rekindle.is_recomputing():
                raise KeyError("in replay")
            return y.exp()

    model = Raising()
    y = rekindle.checkpoint(model, torch.randn(4, 8, requires_grad=True))
    model.eval()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert not any(module.training for module in model.modules())


def test_buffers_are_as_before_after_an_exception_in_replay() -> None:
    class Raising(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if rekindle.is_recomputing():
                raise KeyError("in replay")
            return y.exp()

    model = Raising()
    y = rekindle.checkpoint(model, torch.randn(4, 8, requires_grad=True))
    buffer, before = model.scale, model.scale.clone()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert model.scale is buffer
    assert torch.equal(model.scale, before)


# Ways to reach a module


GLOBAL = InPlace()


def _through_a_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


class Holder:
    """Not a module, but holds one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)

    def method(self, x: Tensor) -> Tensor:
        return self.model(x)


@dataclass
class Context:
    """An argument that holds a module."""

    parts: dict[str, nn.Module] = field(default_factory=dict)


class Method(InPlace):
    def other(self, x: Tensor) -> Tensor:
        return self.forward(x)

    @rekindle.checkpoint()
    def decorated(self, x: Tensor) -> Tensor:
        return self.forward(x)


def _call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def _call_keyword(x: Tensor, model: nn.Module) -> Tensor:
    return model(x)


def _call_all(models: list[nn.Module], x: Tensor) -> Tensor:
    for model in models:
        x = model(x)
    return x


def _as_default(model: nn.Module) -> Run:
    def region(x: Tensor, model: nn.Module = model) -> Tensor:
        return model(x)

    return region


def _wrapped(function: Run) -> Run:
    @functools.wraps(function)
    def outer(*args: Any) -> Any:
        return function(*args)

    return outer


def _closure(model: nn.Module) -> Run:
    def region(x: Tensor) -> Tensor:
        return model(x)

    return region


def _closure_of_items(models: Any, key: Any) -> Run:
    def region(x: Tensor) -> Tensor:
        return models[key](x)

    return region


def _closure_of_holder(holder: Holder) -> Run:
    def region(x: Tensor) -> Tensor:
        return holder.model(x)

    return region


def _call_held(holder: Holder, x: Tensor) -> Tensor:
    return holder.model(x)


def _call_part(context: Context, x: Tensor) -> Tensor:
    return context.parts["m"](x)


REACHED = {
    "closure": lambda m, x, run: run(_closure(m), x),
    "partial": lambda m, x, run: run(functools.partial(_call, m), x),
    "partial by keyword": lambda m, x, run: run(functools.partial(_call_keyword, model=m), x),
    "bound method": lambda m, x, run: run(m.other, x),
    "bound forward": lambda m, x, run: run(m.forward, x),
    "bound __call__": lambda m, x, run: run(m.__call__, x),
    "list in closure": lambda m, x, run: run(_closure_of_items([m], 0), x),
    "dict in closure": lambda m, x, run: run(_closure_of_items({"m": m}, "m"), x),
    "module list in closure": lambda m, x, run: run(_closure_of_items(nn.ModuleList([m]), 0), x),
    "argument": lambda m, x, run: run(_call, m, x),
    "keyword argument": lambda m, x, run: run(_call_keyword, x, model=m),
    "list argument": lambda m, x, run: run(_call_all, [m], x),
    "default argument": lambda m, x, run: run(_as_default(m), x),
    "wrapped function": lambda m, x, run: run(_wrapped(_closure(m)), x),
    "twice wrapped function": lambda m, x, run: run(_wrapped(_wrapped(_closure(m))), x),
    "four times wrapped function": lambda m, x, run: run(
        _wrapped(_wrapped(_wrapped(_wrapped(_closure(m))))), x
    ),
    "callable object": lambda m, x, run: run(Holder(m), x),
    "method of a plain object": lambda m, x, run: run(Holder(m).method, x),
    "plain object in closure": lambda m, x, run: run(_closure_of_holder(Holder(m)), x),
    "plain object argument": lambda m, x, run: run(_call_held, Holder(m), x),
    "dataclass argument": lambda m, x, run: run(_call_part, Context({"m": m}), x),
}


@pytest.mark.parametrize("way", REACHED, ids=lambda way: way.replace(" ", "_"))
def test_buffers_are_right_for_a_module_reached_by(way: str) -> None:
    assert_trains_alike(Method(), REACHED[way], steps=2)


def test_buffers_are_right_for_a_module_reached_by_a_global() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    twin = copy.deepcopy(GLOBAL)
    twin(x).sum().backward()
    expected, x.grad = x.grad, None
    rekindle.checkpoint(_through_a_global, x).sum().backward()
    assert torch.equal(GLOBAL.scale, twin.scale)
    assert same_bits(x.grad, expected)


def test_buffers_are_right_for_a_decorated_method() -> None:
    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        return model(x) if run is plain else model.decorated(x)

    assert_trains_alike(Method(), program, steps=2)


def test_buffers_are_right_for_a_bound_method_of_a_child() -> None:
    model = nn.Sequential(nn.Linear(8, 8), InPlace())
    assert_trains_alike(
        model, lambda m, x, run: run(lambda x, f=m[1].forward: f(m[0](x)), x), steps=2
    )


def test_buffers_are_right_in_checkpoint_sequential() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        InPlace(),
        nn.BatchNorm1d(8),
        Counting(),
        nn.Linear(8, 8),
    )

    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        return model(x) if run is plain else rekindle.checkpoint_sequential(model, 3, x)

    assert_trains_alike(model, program, steps=3)


def test_buffers_are_right_in_checkpoint_sequential_of_functions() -> None:
    model = nn.Sequential(InPlace(), Counting(), InPlace(), Counting())

    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        functions = [model[0], _closure(model[1]), model[2].forward, model[3]]
        return model(x) if run is plain else rekindle.checkpoint_sequential(functions, 2, x)

    assert_trains_alike(model, program, steps=2)


def test_buffers_are_right_in_the_reentrant_variant() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), InPlace())
    assert_trains_alike(
        model, run=functools.partial(rekindle.checkpoint, use_reentrant=True), steps=2
    )


def test_buffers_are_right_without_early_stop() -> None:
    assert_trains_alike(
        InPlace(), run=functools.partial(rekindle.checkpoint, early_stop=False), steps=2
    )


# What is not a buffer


def test_is_recomputing_guards_a_counter() -> None:
    calls = []

    def region(x: Tensor) -> Tensor:
        if not rekindle.is_recomputing():
            calls.append(1)
        return x.exp().sin()

    x = torch.randn(4, requires_grad=True)
    y = rekindle.checkpoint(region, x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert len(calls) == 1


def test_is_recomputing_is_true_in_replay_only() -> None:
    said = []

    def region(x: Tensor) -> Tensor:
        said.append(rekindle.is_recomputing())
        return x.exp().sin()

    rekindle.checkpoint(region, torch.randn(4, requires_grad=True)).sum().backward()
    assert said == [False, True]
    assert not rekindle.is_recomputing()


def test_is_recomputing_is_true_in_an_inner_region_of_a_replay() -> None:
    said = []

    def inner(x: Tensor) -> Tensor:
        said.append(rekindle.is_recomputing())
        return x.exp().sin()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x.cos()).sin()

    rekindle.checkpoint(outer, torch.randn(4, requires_grad=True)).sum().backward()
    assert said.count(False) == 1
    assert said[1:] == [True] * (len(said) - 1)


def test_is_recomputing_is_false_again_after_an_exception_in_replay() -> None:
    def region(x: Tensor) -> Tensor:
        x = x.exp()
        if rekindle.is_recomputing():
            raise KeyError("in replay")
        return x.exp()

    y = rekindle.checkpoint(region, torch.randn(4, requires_grad=True))
    with pytest.raises(KeyError):
        y.sum().backward()
    assert not rekindle.is_recomputing()


NORM = nn.BatchNorm1d(8)


def in_a_comprehension(x: Tensor) -> Tensor:
    return torch.cat([NORM(each) for each in (x,)]).sin()


def in_a_nested_function(x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return NORM(x)  # type: ignore[no-any-return]

    return inner(x).sin()


@pytest.mark.parametrize("region", [in_a_comprehension, in_a_nested_function])
def test_a_global_module_that_only_an_inner_function_names_is_not_changed_by_the_replay(
    region: Callable[[Tensor], Tensor],
) -> None:
    NORM.reset_running_stats()
    rekindle.checkpoint(region, torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert int(NORM.num_batches_tracked) == 1  # type: ignore[arg-type]
