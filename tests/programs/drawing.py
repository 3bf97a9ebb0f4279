"""Drawing programs, with what is known of shapes and aliases.

`programs()` is a hypothesis strategy, for tests that shrink what they find; `program_of(seed)` is
one program for each number, for running as many as there is time for.

They know enough that plain autograd accepts almost every program; for the rest the plain run
raises, and there is nothing to compare with.

What is not drawn, because a region cannot do it and says so:

- an in-place op on an argument of a region, in the region or after it (an error in replay);
- an in-place op on what a region under a policy returned, but in another such region: nobody else
  is there to copy what the record needs before it is changed (an error that names the op);
- an in-place op on what was made in a region inside hooks that copy: the plain run saves copies, so
  it accepts a change that autograd refuses without those hooks, and with a region's in their place;
- what depends on the grad mode inside a reentrant region: its forward runs without a graph;
- containers, keywords and captured tensors with a reentrant region: their gradients are lost;
- an in-place op on what a reentrant region returned: autograd refuses it if it is a view.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from hypothesis import strategies as st

from tests.programs.backwards import BACKWARDS
from tests.programs.contexts import BLOCKS, GRAD_MODES
from tests.programs.interpreter import CALLING, FORMS, GIVING
from tests.programs.meanwhile import MEANWHILE
from tests.programs.modes import MODES, Mode
from tests.programs.ops import CHUNKS, OPS, WRITES, Kind
from tests.programs.steps import Block, Chunks, Draw, Op, Program, Region, Step, Write
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
    recorded: bool = False
    """Whether the innermost region around runs under a policy."""
    covered: bool = False
    """Whether a region has its hooks in the place of such hooks."""
    writable: set[int] = field(default_factory=set)
    """Memory that was made here and that no region was given."""
    chunks: list[_Variable] = field(default_factory=list)
    """Chunks that were made here: half of all writes go to them."""


class Choices(Protocol):
    """Where the choices come from that make a program."""

    def pick(self, items: Sequence[Any]) -> Any: ...

    def number(self, least: int, most: int) -> int: ...


class _Hypothesis:
    """Choices that hypothesis makes, and knows how to make simpler."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def pick(self, items: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(items))

    def number(self, least: int, most: int) -> int:
        return int(self._draw(st.integers(least, most)))


class _Seeded:
    """Choices by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, items: Sequence[Any]) -> Any:
        return self._random.choice(items)

    def number(self, least: int, most: int) -> int:
        return self._random.randint(least, most)


@functools.cache
def _shapes(kind: Kind, k: int, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The shapes of what an op makes, found by running it once."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        made = kind.run(_world(), k, *[torch.ones(shape) for shape in shapes])
    return tuple([tuple(x.shape) for x in (made if isinstance(made, tuple) else (made,))])


@functools.cache
def _world() -> World:
    return new_world()


class _Drawing:
    """Draws the steps of one program."""

    def __init__(self, choices: Choices, modes: Mapping[str, Mode]):
        self.choices = choices
        self.modes = modes
        self.numbers = {"v": 0, "memory": 0, "region": 0}

    def pick(self, items: Any) -> Any:
        return self.choices.pick(list(items))

    def toss(self) -> bool:
        return bool(self.choices.number(0, 1))

    def number(self, kind: str) -> int:
        self.numbers[kind] += 1
        return self.numbers[kind]

    def variable(self, shape: tuple[int, ...], memory: int | None = None) -> _Variable:
        memory = self.number("memory") if memory is None else memory
        return _Variable(f"v{self.number('v')}", shape, memory)

    def some(self, items: list[_Variable], most: int) -> list[_Variable]:
        count = self.choices.number(1, min(most, len(items)))
        return [self.pick(items) for _ in range(count)]

    def body(self, scope: _Scope, most: int) -> tuple[Step, ...]:
        steps = []
        for _ in range(self.choices.number(1, most)):
            step = self.step(scope, most)
            if step is not None:
                steps.append(step)
        return tuple(steps)

    def step(self, scope: _Scope, most: int) -> Step | None:
        kinds = ["op"] * 10 + ["write"] * 3 + ["chunks"] * 2
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
        k = self.choices.number(1, 3)
        (shape,) = _shapes(kind, k, tuple([v.shape for v in operands]))
        if not 0 < torch.Size(shape).numel() <= _MOST:
            return None
        out = self.variable(shape, operands[0].memory if kind.aliases else None)
        if not kind.aliases:
            scope.writable.add(out.memory)
        scope.variables.append(out)
        return Op(out.name, name, tuple([v.name for v in operands]), k)

    def chunks(self, scope: _Scope, most: int) -> Chunks | None:
        """Each chunk has memory of its own: no two of them overlap, or share a version counter."""
        name = self.pick(CHUNKS)
        operands = self.operands(CHUNKS[name], scope.variables, [])
        if operands is None:
            return None
        k = self.choices.number(1, 3)
        shapes = _shapes(CHUNKS[name], k, (operands[0].shape,))
        outs = [self.variable(shape) for shape in shapes]
        scope.writable |= {v.memory for v in outs}
        scope.variables.extend(outs)
        scope.chunks.extend(outs)
        return Chunks(tuple([v.name for v in outs]), name, operands[0].name, k)

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
        given = scope.chunks if scope.chunks and self.toss() else scope.variables
        mine = [v for v in given if v.memory in scope.writable]
        name = self.pick(WRITES)
        operands = self.operands(WRITES[name], mine, scope.variables)
        if operands is None or scope.covered or (WRITES[name].late and scope.copied):
            return None
        return Write(name, tuple([v.name for v in operands]), self.choices.number(1, 3))

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
        if not reentrant and self.toss():
            captured = [v for v in self.some(scope.variables, 2) if v not in arguments]
        inner = _Scope(
            [*arguments, *captured],
            scope.depth + 1,
            scope.reentrant or reentrant,
            scope.copied,
            scope.generator and not reentrant and self.toss(),
            self.modes[mode].recorded,
            scope.copied,
        )
        body = self.body(inner, max(most - 1, 1))
        scope.writable -= {v.memory for v in (*arguments, *captured)}
        results = list(dict.fromkeys(self.some(inner.variables[::-1], 3)))
        outs = [self.variable(v.shape, v.memory) for v in results]
        if not (reentrant or inner.covered) and (scope.recorded or not inner.recorded):
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
    return _draw_program(_Hypothesis(draw), modes)


def program_of(seed: int, modes: Mapping[str, Mode] = MODES) -> Program:
    """The program of a seed: the same each time, for the same tables of ops and `modes`."""
    return _draw_program(_Seeded(seed), modes)


def _draw_program(choices: Choices, modes: Mapping[str, Mode]) -> Program:
    drawing = _Drawing(choices, modes)
    more = [drawing.pick(INPUTS) for _ in range(choices.number(0, 3))]
    inputs = tuple(dict.fromkeys(["x", *more]))
    scope = _Scope([_Variable(name, (ROWS, WIDTH), -i - 1) for i, name in enumerate(inputs)])
    before = drawing.body(scope, 3) if drawing.toss() else ()
    region = drawing.region(scope, 7)
    after = drawing.body(scope, 5) if drawing.toss() else ()
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
