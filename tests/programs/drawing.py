"""Drawing programs: hypothesis strategies that know shapes and aliases.

They know enough that plain autograd accepts almost every program; for the rest the plain run
raises, and there is nothing to compare with.

What is not drawn, because a region cannot do it and says so:

- an in-place op on an argument of a region, in the region or after it (an error in replay);
- what depends on the grad mode inside a reentrant region: its forward runs without a graph;
- containers, keywords and captured tensors with a reentrant region: their gradients are lost;
- an in-place op on what a reentrant region returned: autograd refuses it if it is a view.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from tests.programs.backwards import BACKWARDS
from tests.programs.contexts import BLOCKS, GRAD_MODES
from tests.programs.interpreter import CALLING, FORMS, GIVING
from tests.programs.meanwhile import MEANWHILE
from tests.programs.modes import MODES, Mode
from tests.programs.ops import OPS, WRITES, Kind
from tests.programs.steps import Block, Draw, Op, Program, Region, Step, Write
from tests.programs.world import INPUTS, ROWS, WIDTH, World, new_world

_MOST = 150
"""No variable gets more elements than this."""


@dataclass(frozen=True)
class _Variable:
    name: str
    shape: tuple[int, ...]
    memory: int
    """Variables that may share memory have the same number."""


@dataclass
class _Scope:
    """What a body may use while it is drawn."""

    variables: list[_Variable]
    depth: int = 0
    reentrant: bool = False
    copied: bool = False
    """Whether the user's hooks copy what is saved: too early for an op that is `late`."""
    generator: bool = True
    writable: set[int] = field(default_factory=set)
    """Memory that was made here and that no region was given."""


@functools.cache
def _shape(name: str, k: int, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The shape of an op's outcome, found by running it once."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return tuple(OPS[name].run(_world(), k, *[torch.ones(shape) for shape in shapes]).shape)


@functools.cache
def _world() -> World:
    return new_world()


class _Drawing:
    """Draws the steps of one program."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], modes: Mapping[str, Mode]):
        self.choose = draw
        self.modes = modes
        self.numbers = {"v": 0, "memory": 0, "region": 0}

    def pick(self, items: Any) -> Any:
        return self.choose(st.sampled_from(list(items)))

    def number(self, kind: str) -> int:
        self.numbers[kind] += 1
        return self.numbers[kind]

    def variable(self, shape: tuple[int, ...], memory: int | None = None) -> _Variable:
        memory = self.number("memory") if memory is None else memory
        return _Variable(f"v{self.number('v')}", shape, memory)

    def some(self, items: list[_Variable], most: int) -> list[_Variable]:
        count = self.choose(st.integers(1, min(most, len(items))))
        return [self.pick(items) for _ in range(count)]

    def body(self, scope: _Scope, most: int) -> tuple[Step, ...]:
        steps = []
        for _ in range(self.choose(st.integers(1, most))):
            step = self.step(scope, most)
            if step is not None:
                steps.append(step)
        return tuple(steps)

    def step(self, scope: _Scope, most: int) -> Step | None:
        kinds = ["op"] * 10 + ["write"] * 2
        if scope.generator:
            kinds += ["draw"]
        if most > 1:
            kinds += ["block"]
            if scope.depth < 3:
                kinds += ["region"] * 2
        return getattr(self, self.pick(kinds))(scope, most)  # type: ignore[no-any-return]

    def op(self, scope: _Scope, most: int) -> Op | None:
        name = self.pick(OPS)
        kind = OPS[name]
        if (kind.graph and scope.reentrant) or (kind.late and scope.copied):
            return None
        operands = self.operands(kind, scope.variables, scope.variables)
        if operands is None:
            return None
        k = self.choose(st.integers(1, 3))
        shape = _shape(name, k, tuple([v.shape for v in operands]))
        if not 0 < torch.Size(shape).numel() <= _MOST:
            return None
        out = self.variable(shape, operands[0].memory if kind.aliases else None)
        if not kind.aliases:
            scope.writable.add(out.memory)
        scope.variables.append(out)
        return Op(out.name, name, tuple([v.name for v in operands]), k)

    def operands(
        self, kind: Kind, first: list[_Variable], second: list[_Variable]
    ) -> list[_Variable] | None:
        first = [v for v in first if kind.fits(v.shape)]
        if not first:
            return None
        operands = [self.pick(first)]
        if kind.operands == 2:
            # `grad_of` takes any two; for the rest equal shapes keep it simple.
            any_shape = kind is OPS["grad_of"]
            second = [v for v in second if any_shape or v.shape == operands[0].shape]
            if not second:
                return None
            operands.append(self.pick(second))
        return operands

    def write(self, scope: _Scope, most: int) -> Write | None:
        mine = [v for v in scope.variables if v.memory in scope.writable]
        name = self.pick(WRITES)
        operands = self.operands(WRITES[name], mine, scope.variables)
        if operands is None or (WRITES[name].late and scope.copied):
            return None
        return Write(name, tuple([v.name for v in operands]), self.choose(st.integers(1, 3)))

    def draw(self, scope: _Scope, most: int) -> Draw:
        operand = self.pick(scope.variables)
        out = self.variable(operand.shape)
        scope.writable.add(out.memory)
        scope.variables.append(out)
        return Draw(out.name, operand.name)

    def block(self, scope: _Scope, most: int) -> Block:
        contexts = [c for c in BLOCKS if not (scope.reentrant and c in GRAD_MODES)]
        context = self.pick(contexts)
        copied, scope.copied = scope.copied, scope.copied or context == "save_on_cpu()"
        body = self.body(scope, min(most - 1, 4))
        scope.copied = copied
        return Block(context, body)

    def region(self, scope: _Scope, most: int) -> Region:
        mode = self.pick(self.modes)
        reentrant = self.modes[mode].reentrant
        arguments = list(dict.fromkeys(self.some(scope.variables, 3)))
        captured = []
        if not reentrant and self.choose(st.booleans()):
            captured = [v for v in self.some(scope.variables, 2) if v not in arguments]
        inner = _Scope(
            [*arguments, *captured],
            scope.depth + 1,
            scope.reentrant or reentrant,
            scope.copied,
            scope.generator and not reentrant and self.choose(st.booleans()),
        )
        body = self.body(inner, max(most - 1, 1))
        scope.writable -= {v.memory for v in (*arguments, *captured)}
        results = list(dict.fromkeys(self.some(inner.variables[::-1], 3)))
        outs = [self.variable(v.shape, v.memory) for v in results]
        if not reentrant:
            scope.writable |= {v.memory for v in results} & inner.writable
        scope.variables.extend(outs)
        return Region(
            name=f"region{self.number('region')}",
            mode=mode,
            form=self.pick(FORMS),
            calling="flat" if reentrant else self.pick(CALLING),
            giving="tuple" if reentrant else self.pick(GIVING),
            arguments=tuple([v.name for v in arguments]),
            captured=tuple([v.name for v in captured]),
            generator=inner.generator,
            body=body,
            results=tuple([v.name for v in results]),
            outs=tuple([v.name for v in outs]),
        )


@st.composite
def programs(
    draw: Callable[[st.SearchStrategy[Any]], Any], modes: Mapping[str, Mode] = MODES
) -> Program:
    """A program with one region at least; its regions are run in any of `modes`."""
    drawing = _Drawing(draw, modes)
    inputs = tuple(
        dict.fromkeys(["x", *drawing.choose(st.lists(st.sampled_from(list(INPUTS)), max_size=3))])
    )
    scope = _Scope([_Variable(name, (ROWS, WIDTH), -i - 1) for i, name in enumerate(inputs)])
    before = drawing.body(scope, 3) if drawing.choose(st.booleans()) else ()
    region = drawing.region(scope, 7)
    after = drawing.body(scope, 5) if drawing.choose(st.booleans()) else ()
    seen = dict.fromkeys(drawing.some(scope.variables[::-1], 3))
    unseen = dict.fromkeys(drawing.some(scope.variables[::-1], 2))
    return Program(
        inputs=inputs,
        body=(*before, region, *after),
        seen=tuple([v.name for v in seen]),
        unseen=tuple([v.name for v in unseen if v not in seen]),
        meanwhile=drawing.pick(MEANWHILE),
        backward=drawing.pick(BACKWARDS),
        learns=drawing.pick([True, True, True, False]),
    )
