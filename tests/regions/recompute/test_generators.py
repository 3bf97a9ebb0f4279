"""A `torch.Generator` that a region's modules hold is rewound for the replay."""

import functools
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.regions.recompute import random_generators as search_of
from rekindle.regions.recompute.reachable_state import generators_of, reached_from
from rekindle.strategy import Keep, NumberedOps, Recompute, SavedIndices, Selective, Strategy
from tests.toys import same_bits

Run = Callable[[nn.Module, Tensor], Tensor]


class Noisy(nn.Module):
    """Multiplies by noise from a generator that `holder` leads to, by way of `find`."""

    def __init__(
        self, holder: Any = None, find: Callable[[Any], torch.Generator] = lambda holder: holder
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.holder = holder
        self.find = find

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        noise = torch.rand(x.shape, generator=self.find(self.holder), device=x.device)
        return (x * noise).exp().sin()


def seeded(device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(5)


def step(model: nn.Module, x: Tensor, run: Run) -> list[Tensor]:
    """Gradients of a step, and the states that the model's generators end with."""
    leaves = [x, *model.parameters()]
    for leaf in leaves:
        leaf.grad = None
    run(model, x).sum().backward()
    return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def plain(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def by_apply(what: Any) -> Run:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        rekindle.apply(model, {"": what})
        out: Tensor = model(x)
        return out

    return run


WAYS: dict[str, Run] = {
    "checkpoint": rekindle.checkpoint,
    "reentrant": functools.partial(rekindle.checkpoint, use_reentrant=True),
    "values": functools.partial(rekindle.checkpoint, determinism_check="values"),
    "method": lambda model, x: rekindle.checkpoint(model.forward, x),
    "recompute": by_apply("recompute"),
    "policy": by_apply(rekindle.policies.recompute()),
    "matmuls": by_apply(rekindle.policies.keep_matmuls),
    "nested": lambda model, x: rekindle.checkpoint(lambda x: rekindle.checkpoint(model, x), x),
    "in a policy": lambda model, x: rekindle.checkpoint(
        lambda x: rekindle.checkpoint(model, x), x, context_fn=rekindle.policies.recompute()
    ),
}


def assert_same_steps(make: Callable[[], nn.Module], run: Run, steps: int = 2) -> None:
    """Several steps have the gradients of the plain ones, and generators end where those do."""
    ours, theirs = make(), make()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(steps):
        for a, b in zip(step(ours, x, run), step(theirs, x, plain), strict=True):
            assert same_bits(a, b)
        for a, b in zip(states_of(ours), states_of(theirs), strict=True):
            assert torch.equal(a, b)


def states_of(model: nn.Module) -> list[Tensor]:
    found = generators_of(model)
    assert found
    return [generator.get_state() for generator in found]


@pytest.mark.parametrize("way", WAYS)
def test_a_generator_that_the_module_holds_is_rewound(way: str) -> None:
    assert_same_steps(lambda: Noisy(seeded()), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_a_generator_that_a_child_module_holds_is_rewound(way: str) -> None:
    assert_same_steps(lambda: nn.Sequential(nn.Linear(8, 8), Noisy(seeded())), WAYS[way])


@dataclass
class Settings:
    rate: float = 0.5
    generator: torch.Generator = field(default_factory=seeded)


@dataclass
class Slotted:
    __slots__ = ("generator",)
    generator: torch.Generator


class Source:
    """A plain object that draws."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def get(self) -> torch.Generator:
        return self.generator


def deep(generator: torch.Generator, levels: int) -> Any:
    return generator if levels == 0 else [deep(generator, levels - 1)]


def bottom(holder: Any) -> torch.Generator:
    while not isinstance(holder, torch.Generator):
        holder = holder[0]
    return holder


def closing_over(generator: torch.Generator) -> Callable[[], torch.Generator]:
    return lambda: generator


class Unregistered:
    """Hides a module from `nn.Module`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


HOLDERS: dict[str, Callable[[], tuple[Any, Callable[[Any], torch.Generator]]]] = {
    "list": lambda: ([seeded()], lambda held: held[0]),
    "tuple": lambda: ((1, seeded()), lambda held: held[1]),
    "dict": lambda: ({"noise": seeded()}, lambda held: held["noise"]),
    "ordered dict": lambda: (OrderedDict(noise=seeded()), lambda held: held["noise"]),
    "deque": lambda: (deque([seeded()]), lambda held: held[0]),
    "list in a dict": lambda: ({"a": [seeded()]}, lambda held: held["a"][0]),
    "twenty lists deep": lambda: (deep(seeded(), 20), bottom),
    "long list": lambda: ([0] * 1000 + [seeded()], lambda held: held[-1]),
    "dataclass": lambda: (Settings(), lambda held: held.generator),
    "slots": lambda: (Slotted(seeded()), lambda held: held.generator),
    "namespace": lambda: (SimpleNamespace(g=seeded()), lambda held: held.g),
    "object": lambda: (Source(seeded()), lambda held: held.generator),
    "bound method": lambda: (Source(seeded()).get, lambda held: held()),
    "partial": lambda: (functools.partial(Source, seeded()), lambda held: held().generator),
    "closure": lambda: (closing_over(seeded()), lambda held: held()),
    "hidden module": lambda: (
        Unregistered(Noisy(seeded())),
        lambda held: held.module.holder,
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "recompute"])
def test_a_generator_is_found_in_what_a_module_holds(holder: str, way: str) -> None:
    assert_same_steps(lambda: Noisy(*HOLDERS[holder]()), WAYS[way])


class OfItsClass(Noisy):
    """Draws from a generator of its class."""

    generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x * torch.rand(x.shape, generator=self.generator)).exp().sin()


def test_a_generator_that_the_class_holds_is_rewound() -> None:
    model, x = OfItsClass(), torch.randn(4, 8, requires_grad=True)
    step(model, x, rekindle.checkpoint)  # while the class has none
    try:
        OfItsClass.generator = seeded()
        ours = step(model, x, rekindle.checkpoint)
        OfItsClass.generator = seeded()
        theirs = step(model, x, plain)
    finally:
        OfItsClass.generator = None
    assert all(map(same_bits, ours, theirs))


_shared: dict[str, torch.Generator] = {}


def _noise(shape: torch.Size) -> Tensor:
    return torch.rand(shape, generator=_shared["generator"])


class OfItsGlobals(Noisy):
    """Draws from a global, in a function that a method calls."""

    def forward(self, x: Tensor) -> Tensor:
        return self._with_noise(self.linear(x)).exp().sin()

    def _with_noise(self, x: Tensor) -> Tensor:
        return x * _noise(x.shape)


@pytest.mark.parametrize("way", WAYS)
def test_a_generator_in_globals_that_methods_name_is_rewound(way: str) -> None:
    model, x = OfItsGlobals(), torch.randn(4, 8, requires_grad=True)
    _shared["generator"] = seeded()
    theirs = step(model, x, plain)
    _shared["generator"] = seeded()
    ours = step(model, x, WAYS[way])
    assert all(map(same_bits, ours, theirs))


def test_a_generator_that_a_forward_hook_closes_over_is_rewound() -> None:
    def make() -> nn.Module:
        generator = seeded()
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        model[0].register_forward_hook(
            lambda _, __, out: (out * torch.rand(out.shape, generator=generator)).exp()
        )
        return model

    assert_same_steps(make, rekindle.checkpoint)


def test_two_regions_that_share_a_generator_replay_each_its_own_noise() -> None:
    def make() -> nn.Module:
        generator = seeded()
        return nn.Sequential(Noisy(generator), Noisy([generator], lambda held: held[0]))

    def run(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model  # type: ignore[misc]
        out: Tensor = rekindle.checkpoint(second, rekindle.checkpoint(first, x))
        return out

    assert_same_steps(make, run)


def test_a_generator_that_is_put_there_between_two_steps_is_rewound() -> None:
    def make() -> nn.Module:
        return Noisy(None, lambda held: held)

    ours, theirs = make(), make()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 8, requires_grad=True)
    for holder in (None, seeded(), seeded().manual_seed(9), None, seeded()):
        for model in (ours, theirs):
            model.holder = holder and holder.clone_state()  # type: ignore[assignment]
        grads = []
        for model, run in ((ours, rekindle.checkpoint), (theirs, plain)):
            torch.manual_seed(0)
            grads.append(step(model, x, run))
        assert all(map(same_bits, *grads))


def test_a_generator_is_found_beside_what_was_set_before_the_module_was_made() -> None:
    class Early(Noisy):
        def __init__(self) -> None:
            self.early = seeded()
            super().__init__(None)
            self.find = lambda _: self.early

    assert_same_steps(Early, rekindle.checkpoint)


def test_where_a_search_would_be_too_long_the_forward_is_watched_for_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> nn.Module:
        many: list[Any] = [[object()] for _ in range(search_of._VISITS * 2)]
        return Noisy([*many, seeded()], lambda held: held[-1])

    monkeypatch.setattr(search_of, "_VISITS_PER_MODULE", 0)
    assert not reached_from(make(), (), {})[2]
    monkeypatch.undo()
    x = torch.randn(4, 8, requires_grad=True)
    for way in ("checkpoint", "reentrant", "values", "nested"):
        theirs = step(made := make(), x, plain)
        monkeypatch.setattr(search_of, "_VISITS_PER_MODULE", 0)
        ours_model = make()
        ours_model.load_state_dict(made.state_dict())
        ours = step(ours_model, x, WAYS[way])
        monkeypatch.undo()
        assert all(map(same_bits, ours, theirs)), way
        held = [model.holder[-1].get_state() for model in (made, ours_model)]  # type: ignore[index,union-attr]
        assert torch.equal(*held), way


def test_containers_of_numbers_alone_do_not_make_a_search_too_long() -> None:
    numbers: list[Any] = [*([i] for i in range(search_of._VISITS * 9)), {"r": 8}, ("a", 0.5)]
    _, generators, sees_all = reached_from(Noisy([*numbers, [seeded()]]), (), {})
    assert sees_all
    assert len(generators) == 1


def test_a_container_that_is_too_long_to_search_has_its_region_watched() -> None:
    def make() -> nn.Module:
        return Noisy([seeded(), *range(search_of._LONG)], lambda held: held[0])

    model, x = make(), torch.randn(4, 8, requires_grad=True)
    assert not reached_from(model, (), {})[2]
    other = make()
    other.load_state_dict(model.state_dict())
    ours, theirs = step(model, x, rekindle.checkpoint), step(other, x, plain)
    assert all(map(same_bits, ours, theirs))


def test_a_watched_region_that_draws_from_the_default_generator_too_is_right() -> None:
    class Both(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.dropout(super().forward(x))
            return x * torch.rand(x.shape, generator=torch.default_generator).exp()

    model = Both([seeded(), *range(search_of._LONG)], lambda held: held[0])
    x = torch.randn(4, 8, requires_grad=True)
    grads = []
    for run in (rekindle.checkpoint, plain):
        torch.manual_seed(0)
        model.holder[0].manual_seed(5)
        grads.append([*step(model, x, run), torch.get_rng_state(), model.holder[0].get_state()])
    assert all(map(same_bits, *grads))


def test_a_search_holds_on_to_no_class() -> None:
    class Local(Noisy):
        pass

    step(Local(seeded()), torch.randn(4, 8, requires_grad=True), rekindle.checkpoint)
    gone = weakref.ref(Local)
    del Local
    gc.collect()
    assert gone() is None


def test_a_generator_is_as_the_plain_step_leaves_it_if_the_replay_raises() -> None:
    class Raises(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if rekindle.is_recomputing():
                raise KeyError("in replay")
            return x.exp()

    model = Raises(seeded())
    y = rekindle.checkpoint(model, torch.randn(4, 8, requires_grad=True)).sum()
    before = model.holder.get_state()
    with pytest.raises(KeyError, match="in replay"):
        y.backward()
    assert torch.equal(model.holder.get_state(), before)


class Deep(nn.Module):
    """Blocks with a generator each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy([seeded()], lambda held: held[0]) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("budget", ["90%", "75%", "60%"])
def test_fit_trains_a_model_that_holds_generators_as_without_a_plan(budget: str) -> None:
    pytest.importorskip("scipy")
    ours, theirs = Deep(), Deep()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(64, 8, requires_grad=True)
    rekindle.fit(ours, x.detach(), budget=budget)
    for _ in range(2):
        for a, b in zip(step(ours, x, plain), step(theirs, x, plain), strict=True):
            assert same_bits(a, b)
        for a, b in zip(states_of(ours), states_of(theirs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "strategy", [Keep(), Selective(NumberedOps((0,))), SavedIndices(), Recompute()], ids=repr
)
def test_every_strategy_of_a_plan_replays_a_generator_from_where_it_was(
    strategy: Strategy,
) -> None:
    assert_same_steps(lambda: Noisy(seeded()), by_apply(strategy))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_generator_of_a_gpu_that_the_module_holds_is_rewound(way: str) -> None:
    ours, theirs = (Noisy([seeded("cuda")], lambda held: held[0]).cuda() for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    for _ in range(2):
        for a, b in zip(step(ours, x, WAYS[way]), step(theirs, x, plain), strict=True):
            assert same_bits(a, b)
        for a, b in zip(states_of(ours), states_of(theirs), strict=True):
            assert torch.equal(a, b)
