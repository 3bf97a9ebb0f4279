"""A program as a value: a tree of frozen steps, to be drawn, printed and run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """`out = name(*operands, k)`."""

    out: str
    name: str
    operands: tuple[str, ...]
    k: int


@dataclass(frozen=True)
class Write:
    """An in-place op on the first operand."""

    name: str
    operands: tuple[str, ...]
    k: int


@dataclass(frozen=True)
class Chunks:
    """`outs = name(operand, k)`: chunks of one storage, each with a version counter of its own."""

    outs: tuple[str, ...]
    name: str
    operand: str
    k: int


@dataclass(frozen=True)
class Draw:
    """`out = operand + random numbers from a generator of the program's own`."""

    out: str
    operand: str


@dataclass(frozen=True)
class Block:
    """Steps under a context manager."""

    context: str
    body: "tuple[Step, ...]"


@dataclass(frozen=True)
class Region:
    """A region: a function of `arguments`, that may see `captured`, run in one of the `MODES`."""

    name: str
    mode: str
    form: str
    """What kind of callable it is: one of `FORMS`."""
    calling: str
    """How it gets its arguments: one of `CALLING`."""
    giving: str
    """What it returns: one of `GIVING`."""
    arguments: tuple[str, ...]
    captured: tuple[str, ...]
    generator: bool
    """Whether it is given the program's generator, and may draw from it."""
    body: "tuple[Step, ...]"
    results: tuple[str, ...]
    outs: tuple[str, ...]


Step = Op | Write | Chunks | Draw | Block | Region


@dataclass(frozen=True)
class Program:
    """Inputs, steps, which variables the loss sees, and how backward is called."""

    inputs: tuple[str, ...]
    """Keys of `INPUTS`."""
    body: tuple[Step, ...]
    seen: tuple[str, ...]
    unseen: tuple[str, ...]
    """Outputs that are kept and that the loss does not see."""
    meanwhile: str
    backward: str
    learns: bool
    """Whether the parameters require a gradient."""
