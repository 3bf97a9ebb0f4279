"""Runs steps: each region in its mode, or in what that mode is compared with."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.programs.contexts import BLOCKS
from tests.programs.modes import Mode
from tests.programs.ops import CHUNKS, OPS, WRITES
from tests.programs.steps import Block, Chunks, Draw, Op, Region, Step, Write
from tests.programs.world import World


class _Bundle:
    """An object of the user's own that carries tensors, unseen by any container walk."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, _Bundle):
            found += leaf.tensors
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

CALLING: dict[str, Callable[[list[Tensor]], _Arguments]] = {
    "flat": lambda xs: (tuple(xs), {}),
    "a list": lambda xs: ((xs,), {}),
    "a dict": lambda xs: (({f"x{i}": x for i, x in enumerate(xs)},), {}),
    "keywords": lambda xs: ((xs[0],), {f"x{i}": x for i, x in enumerate(xs[1:])}),
    "a mix": lambda xs: ((xs[0], None, 3, {"rest": [*xs[1:]], "flag": True}), {"word": "a"}),
    "an object": lambda xs: ((None, _Bundle(xs)), {}),
}
GIVING: dict[str, Callable[[list[Tensor]], Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": lambda xs: {f"x{i}": x for i, x in enumerate(xs)},
    "tensor or nest": lambda xs: xs[0] if len(xs) == 1 else (xs[0], None, [xs[1:]]),
    "object": _Bundle,
}


@dataclass(frozen=True)
class Machine:
    """Runs steps: regions in their mode, or in its reference."""

    world: World
    device: torch.device
    modes: Mapping[str, Mode]
    plain: bool

    def steps(self, body: tuple[Step, ...], env: dict[str, Any]) -> None:
        for step in body:
            match step:
                case Op(out, name, operands, k):
                    env[out] = OPS[name].run(self.world, k, *[env[v] for v in operands])
                case Write(name, operands, k):
                    WRITES[name].run(self.world, k, *[env[v] for v in operands])
                case Chunks(outs, name, operand, k):
                    made = CHUNKS[name].run(self.world, k, env[operand])
                    env.update(zip(outs, made, strict=True))
                case Draw(out, operand):
                    x = env[operand]
                    noise = torch.rand(x.shape, generator=env["generator"], device=self.device)
                    env[out] = x + noise
                case Block(context, inner):
                    with BLOCKS[context](self.device):
                        self.steps(inner, env)
                case Region():
                    self.region(step, env)

    def region(self, region: Region, env: dict[str, Any]) -> None:
        mode = self.modes[region.mode]
        args, kwargs = CALLING[region.calling]([env[name] for name in region.arguments])
        if region.generator:
            args = (*args, env["generator"])
        if mode.reentrant:  # warns if none of its inputs wants a gradient
            args = (*args, torch.zeros((), device=self.device, requires_grad=True))
        captured = {name: env[name] for name in region.captured}
        function = FORMS[region.form](self.world, self, region, captured)
        out = (mode.reference if self.plain else mode.run)(function, *args, **kwargs)
        env.update(zip(region.outs, _tensors(out), strict=True))


def _run_body(
    world: World,
    machine: Machine,
    region: Region,
    captured: dict[str, Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A region's function. `world` is there to be seen: a replay finds modules by looking."""
    env: dict[str, Any] = dict(zip(region.arguments, _tensors((args, kwargs)), strict=False))
    if region.generator:
        env["generator"] = args[-1]
    env |= captured
    machine.steps(region.body, env)
    return GIVING[region.giving]([env[name] for name in region.results])


class _RegionModule(nn.Module):
    def __init__(self, world: World, *rest: Any) -> None:
        super().__init__()
        self.world = world
        self.rest = rest

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _run_body(self.world, *self.rest, *args, **kwargs)

    def method(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)


def _closure(world: World, *rest: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run_body(world, *rest, *args, **kwargs)


FORMS: dict[str, Callable[..., Callable[..., Any]]] = {
    "closure": _closure,
    "partial": functools.partial(functools.partial, _run_body),
    "module": _RegionModule,
    "method": lambda world, *rest: _RegionModule(world, *rest).method,
}
