"""Random programs: drawn as plain values, printed as text, run with regions or without.

A program is a tree of frozen steps. `programs()` draws one, `str(program)` shows it, and
`run(program, plain=...)` runs it from a fixed seed and returns everything a training step leaves
behind. The drawing knows shapes and aliases, so that plain autograd accepts almost every program;
for the rest the plain run raises, and there is nothing to compare with.

To add a way of running a region, add a line to `MODES`.

What is not drawn, because a region cannot do it and says so:

- an in-place op on an argument of a region, in the region or after it (an error in replay);
- what depends on the grad mode inside a reentrant region: its forward runs without a graph;
- containers, keywords and captured tensors with a reentrant region: their gradients are lost;
- an in-place op on what a reentrant region returned: autograd refuses it if it is a view.
"""

import functools
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

import rekindle

ROWS, WIDTH = 4, 6
_MOST = 150
"""No variable gets more elements than this."""

# The ways to run a region


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class _Kept(torch.autograd.Function):
    """A reentrant region that keeps its graph instead of replaying.

    What a reentrant region is compared with: gradients of what it shares with its surroundings are
    summed in another order than in a plain run, and so come out with other last bits.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *args: Tensor) -> Any:
        ctx.inputs = [arg.detach().requires_grad_(arg.requires_grad) for arg in args]
        with torch.enable_grad():
            out = function(*ctx.inputs)
        ctx.outputs = out if isinstance(out, tuple) else (out,)
        cut = tuple([x.detach() for x in ctx.outputs])
        return cut if isinstance(out, tuple) else cut[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[attr-defined]
            raise RuntimeError("not for chosen inputs")
        pairs = [(o, g) for o, g in zip(ctx.outputs, grads, strict=True) if o.requires_grad]
        if not pairs:
            raise RuntimeError("nothing to do")
        for x in ctx.inputs:
            x.grad = None
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], retain_graph=True)
        return None, *(x.grad for x in ctx.inputs)


def _kept(function: Callable[..., Any], *args: Any) -> Any:
    return _Kept.apply(function, *args) if torch.is_grad_enabled() else function(*args)


@dataclass(frozen=True)
class Mode:
    """One way to run a region, and what its outcome is compared with."""

    run: Callable[..., Any]
    """Called as `run(function, *args, **kwargs)`."""
    reference: Callable[..., Any] = call
    """What the plain run does in its place."""
    reentrant: bool = False
    """Whether it can take no more than a reentrant region can."""


MODES: dict[str, Mode] = {
    "default": Mode(rekindle.checkpoint),
    "values": Mode(functools.partial(rekindle.checkpoint, determinism_check="values")),
    "unchecked": Mode(functools.partial(rekindle.checkpoint, determinism_check="none")),
    "to the end": Mode(functools.partial(rekindle.checkpoint, early_stop=False)),
    "debug": Mode(functools.partial(rekindle.checkpoint, debug=True)),
    "decorated": Mode(lambda function, *args, **kw: rekindle.checkpoint()(function)(*args, **kw)),
    "reentrant": Mode(
        functools.partial(rekindle.checkpoint, use_reentrant=True), reference=_kept, reentrant=True
    ),
}

# What programs run on


class Count(nn.Module):
    """Counts its calls in a buffer that is replaced each time, and adds the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * 0.5 + self.calls


class Average(nn.Module):
    """Follows the mean of what it sees in a buffer that is written in place, and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().float().abs().mean(), 0.25)
        return x * self.mean.clone()


class World(nn.Module):
    """The modules and parameters that every program can use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.count = Count()
        self.average = Average()
        self.dropout = nn.Dropout(0.3)
        self.rrelu = nn.RReLU()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.scale64 = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))


class _SavesBoth(torch.autograd.Function):
    """Saves its input and its output; can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grad * (y * (1 - y) + 0.0 * x)


class _SavesNothing(torch.autograd.Function):
    """Keeps what it needs as an attribute, behind the back of every hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        ctx.sign, ctx.k = x.sign(), k
        return x.abs() * k

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.sign * ctx.k, None


# The ops


@dataclass(frozen=True)
class Kind:
    """One op: how to run it as `run(world, k, *tensors)`, and on which shapes."""

    run: Callable[..., Tensor]
    operands: int = 1
    fits: Callable[[tuple[int, ...]], bool] = bool
    aliases: bool = False
    """Whether the outcome may share memory with the first operand."""
    graph: bool = False
    """Whether it depends on the grad mode."""
    late: bool = False
    """Whether it writes to what it saves after it saved it."""


def _wide(shape: tuple[int, ...]) -> bool:
    return shape[-1] == WIDTH


def _batch(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] == WIDTH and shape[0] > 1


def _matrix(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


def _tall(shape: tuple[int, ...]) -> bool:
    return shape[0] > 1


def _even(shape: tuple[int, ...]) -> bool:
    return shape[-1] % 2 == 0


def _grow(shape: tuple[int, ...]) -> bool:
    return len(shape) < 4


def _complex(x: Tensor) -> Tensor:
    z = torch.fft.fft(x.float()) * torch.polar(torch.ones_like(x.float()), x.float())
    return (z * z.conj() + z).real + z.abs()


def _attention(x: Tensor, k: int) -> Tensor:
    heads = x.unsqueeze(0).unsqueeze(0) if x.dim() == 2 else x.unsqueeze(0)
    return functional.scaled_dot_product_attention(
        heads, heads * 0.5, heads, is_causal=bool(k % 2)
    )[0]


def _inner_grad(x: Tensor) -> Tensor:
    """A gradient that is computed and used in the region."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)
    return x * slope


def _grad_of(k: int, y: Tensor, x: Tensor) -> Tensor:
    """The gradient of one variable by another, through whatever lies between."""
    if not (y.requires_grad and x.requires_grad and torch.is_grad_enabled()):
        return torch.zeros_like(x)
    (slope,) = torch.autograd.grad(
        y.sum(), x, retain_graph=True, create_graph=bool(k % 2), allow_unused=True
    )
    return torch.zeros_like(x) if slope is None else slope


def _hooked(x: Tensor, k: int) -> Tensor:
    y = x.view_as(x)
    if y.requires_grad:
        y.register_hook(lambda grad: None if grad is None else grad * (k + 1))
    return y


def _reseeded(x: Tensor, k: int) -> Tensor:
    torch.manual_seed(k)
    return x + torch.rand_like(x)


OPS: dict[str, Kind] = {
    # pointwise
    "exp": Kind(lambda w, k, x: (x * 0.3).exp()),
    "sin": Kind(lambda w, k, x: x.sin()),
    "tanh": Kind(lambda w, k, x: x.tanh()),
    "relu": Kind(lambda w, k, x: x.relu()),
    "gelu": Kind(lambda w, k, x: functional.gelu(x)),
    "silu": Kind(lambda w, k, x: functional.silu(x)),
    "square": Kind(lambda w, k, x: x * x),
    "clone": Kind(lambda w, k, x: x.clone()),
    "add": Kind(lambda w, k, x, y: x + y, 2),
    "mul": Kind(lambda w, k, x, y: x * y, 2),
    "div": Kind(lambda w, k, x, y: x / (y.abs() + 1), 2),
    "lerp": Kind(lambda w, k, x, y: x.lerp(y.to(x.dtype), 0.3), 2),
    "plus": Kind(lambda w, k, x: x + k),
    # parameters
    "first": Kind(lambda w, k, x: w.first(x.to(w.first.weight.dtype)), fits=_wide),
    "second": Kind(lambda w, k, x: w.second(x.to(w.second.weight.dtype)), fits=_wide),
    "tied": Kind(lambda w, k, x: functional.linear(x.float(), w.first.weight.t()), fits=_wide),
    "spectral": Kind(lambda w, k, x: w.spectral(x.float()), fits=_wide),
    "scale": Kind(lambda w, k, x: x * w.scale, fits=_wide),
    "scale64": Kind(lambda w, k, x: x * w.scale64, fits=_wide),
    "layer_norm": Kind(lambda w, k, x: w.layer_norm(x.float()), fits=_wide),
    "matmul": Kind(lambda w, k, x: x @ x.mT),
    "attention": Kind(lambda w, k, x: _attention(x, k), fits=lambda s: len(s) in (2, 3)),
    # buffers
    "batch_norm": Kind(lambda w, k, x: w.batch_norm(x.float()), fits=_batch),
    "count": Kind(lambda w, k, x: w.count(x)),
    "average": Kind(lambda w, k, x: w.average(x)),
    "read_count": Kind(lambda w, k, x: (x + w.count.calls).sin()),
    "read_average": Kind(lambda w, k, x: (x + w.average.mean).sin()),
    "read_batch_norm": Kind(lambda w, k, x: (x + w.batch_norm.running_mean).sin(), fits=_wide),
    # random numbers
    "dropout": Kind(lambda w, k, x: functional.dropout(x, 0.2 + 0.2 * k)),
    "dropout_module": Kind(lambda w, k, x: w.dropout(x), aliases=True),
    "noise": Kind(lambda w, k, x: x + torch.rand_like(x)),
    "bernoulli": Kind(lambda w, k, x: x * torch.bernoulli(x.detach().sigmoid())),
    "rrelu": Kind(lambda w, k, x: w.rrelu(x), late=True),
    "rrelu_function": Kind(lambda w, k, x: functional.rrelu(x, training=True), late=True),
    "alpha_dropout": Kind(lambda w, k, x: functional.alpha_dropout(x, 0.4, training=True)),
    "permuted": Kind(lambda w, k, x: x[torch.randperm(x.shape[0], device=x.device)]),
    "reseeded": Kind(lambda w, k, x: _reseeded(x, k)),
    # views
    "transpose": Kind(lambda w, k, x: x.mT, aliases=True),
    "flip_dims": Kind(lambda w, k, x: x.movedim(0, -1), aliases=True),
    "rows": Kind(lambda w, k, x: x[k % 2 :: 2], fits=_tall, aliases=True),
    "columns": Kind(lambda w, k, x: x[..., : 2 + k], aliases=True),
    "chunk": Kind(lambda w, k, x: x.chunk(2)[k % 2], fits=_tall, aliases=True),
    "split": Kind(lambda w, k, x: x.split(2, -1)[0], fits=_even, aliases=True),
    "expand": Kind(lambda w, k, x: x.unsqueeze(0).expand(2, *x.shape), fits=_grow, aliases=True),
    "pairs": Kind(lambda w, k, x: x.reshape(-1, 2), fits=_even, aliases=True),
    "flat": Kind(lambda w, k, x: x.reshape(1, -1), aliases=True),
    "contiguous": Kind(lambda w, k, x: x.contiguous(), aliases=True),
    "detach": Kind(lambda w, k, x: x.detach(), aliases=True),
    "diagonal": Kind(lambda w, k, x: x.diagonal().unsqueeze(0), fits=_matrix, aliases=True),
    # shapes
    "resize": Kind(
        lambda w, k, x: x.flatten()[torch.arange(ROWS * WIDTH, device=x.device) % x.numel()].view(
            ROWS, WIDTH
        )
    ),
    "cat": Kind(lambda w, k, x, y: torch.cat([x, y.to(x.dtype)], k % 2), 2),
    "stack": Kind(lambda w, k, x, y: torch.stack([x, y.to(x.dtype)]), 2, fits=_grow),
    "sum": Kind(lambda w, k, x: x.sum(-1, keepdim=True).expand_as(x) + x),
    "softmax": Kind(lambda w, k, x: x.softmax(-1)),
    "log_softmax": Kind(lambda w, k, x: x.log_softmax(0)),
    "logsumexp": Kind(lambda w, k, x: x - x.logsumexp(-1, keepdim=True)),
    "cumsum": Kind(lambda w, k, x: x.cumsum(-1)),
    "cumprod": Kind(lambda w, k, x: x.sigmoid().cumprod(0)),
    "sort": Kind(lambda w, k, x: x.sort(dim=-1, stable=True).values),
    "topk": Kind(lambda w, k, x: x.topk(2, -1).values, fits=lambda s: s[-1] >= 2),
    "max": Kind(lambda w, k, x: x.max(0, keepdim=True).values * x),
    "gather": Kind(lambda w, k, x: x.gather(-1, x.detach().sort(dim=-1, stable=True).indices)),
    "index_add": Kind(
        lambda w, k, x: x.index_add(
            0, torch.zeros(x.shape[0], dtype=torch.long, device=x.device), x
        )
    ),
    "where": Kind(lambda w, k, x, y: torch.where(x > y, x, y), 2),
    "masked_fill": Kind(lambda w, k, x: x.masked_fill(x.detach() > 0.5, k)),
    "norm": Kind(lambda w, k, x: functional.normalize(x, dim=-1)),
    "complex": Kind(lambda w, k, x: _complex(x)),
    # dtypes
    "to_double": Kind(lambda w, k, x: x.double(), aliases=True),
    "to_float": Kind(lambda w, k, x: x.float(), aliases=True),
    "to_bfloat16": Kind(lambda w, k, x: x.bfloat16(), aliases=True),
    # autograd
    "saves_both": Kind(lambda w, k, x: _SavesBoth.apply(x)),
    "saves_nothing": Kind(lambda w, k, x: _SavesNothing.apply(x, k)),
    "hooked": Kind(lambda w, k, x: _hooked(x, k), aliases=True, graph=True),
    "inner_grad": Kind(lambda w, k, x: _inner_grad(x), graph=True),
    "grad_of": Kind(lambda w, k, y, x: _grad_of(k, y, x), 2, graph=True),
}

WRITES: dict[str, Kind] = {
    "add_": Kind(lambda w, k, x: x.add_(k)),
    "mul_": Kind(lambda w, k, x: x.mul_(0.5 * k)),
    "relu_": Kind(lambda w, k, x: x.relu_()),
    "tanh_": Kind(lambda w, k, x: x.tanh_()),
    "clamp_": Kind(lambda w, k, x: x.clamp_(-1, 1)),
    "dropout_": Kind(lambda w, k, x: functional.dropout(x, 0.4, inplace=True)),
    "rrelu_": Kind(lambda w, k, x: functional.rrelu(x, training=True, inplace=True), late=True),
    "uniform_": Kind(lambda w, k, x: x.uniform_()),
    "first_row_": Kind(lambda w, k, x: x.select(0, 0).mul_(k)),
    "set_row_": Kind(lambda w, k, x: x.__setitem__(0, x[-1].clone())),
    "scale_": Kind(lambda w, k, x: x.mul_(w.scale), fits=_wide),
    "add_other_": Kind(lambda w, k, x, y: x.add_(y), 2),
    "copy_other_": Kind(lambda w, k, x, y: x.copy_(y), 2),
    "detached_": Kind(lambda w, k, x: x.detach().mul_(0.5)),
}


@contextmanager
def _own_hooks() -> Iterator[None]:
    """Saved-tensor hooks of the user's, that hand back another tensor than they got."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        yield


BLOCKS: dict[str, Callable[[torch.device], AbstractContextManager[Any]]] = {
    "no_grad()": lambda device: torch.no_grad(),
    "enable_grad()": lambda device: torch.enable_grad(),
    "autocast(bfloat16)": lambda device: torch.autocast(device.type, torch.bfloat16),
    "autocast(bfloat16, cache_enabled=False)": lambda device: torch.autocast(
        device.type, torch.bfloat16, cache_enabled=False
    ),
    "autocast(enabled=False)": lambda device: torch.autocast(device.type, enabled=False),
    "sdpa_kernel(MATH)": lambda device: sdpa_kernel(SDPBackend.MATH),
    # On the CPU it hands back the very tensor: plain autograd then misses in-place ops, and leaks.
    "save_on_cpu()": lambda device: (
        torch.autograd.graph.save_on_cpu() if device.type != "cpu" else _own_hooks()
    ),
}
_GRAD_MODES = ("no_grad()", "enable_grad()")

# The steps of a program


@dataclass(frozen=True)
class Op:
    """`out = name(*operands, k)`."""

    out: str
    name: str
    operands: tuple[str, ...]
    k: int

    def __str__(self) -> str:
        return f"{self.out} = {self.name}({', '.join(self.operands)}, k={self.k})"


@dataclass(frozen=True)
class Write:
    """An in-place op on the first operand."""

    name: str
    operands: tuple[str, ...]
    k: int

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.operands)}, k={self.k})"


@dataclass(frozen=True)
class Draw:
    """`out = operand + random numbers from a generator of the program's own`."""

    out: str
    operand: str

    def __str__(self) -> str:
        return f"{self.out} = {self.operand} + rand(generator)"


@dataclass(frozen=True)
class Block:
    """Steps under a context manager."""

    context: str
    body: "tuple[Step, ...]"

    def __str__(self) -> str:
        return f"with {self.context}:\n{_indented(self.body)}"


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

    def __str__(self) -> str:
        sees = f"  # sees {', '.join(self.captured)}" if self.captured else ""
        given = ", ".join((*self.arguments, *(("generator",) if self.generator else ())))
        return (
            f"def {self.name}({given}):{sees}\n{_indented(self.body)}\n"
            f"    return {', '.join(self.results)}\n"
            f"{', '.join(self.outs)} = run({self.name}, {given})"
            f"  # {self.mode}; a {self.form}, takes {self.calling}, gives {self.giving}"
        )


Step = Op | Write | Draw | Block | Region


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

    def __str__(self) -> str:
        return (
            f"inputs {', '.join(self.inputs)}; parameters {'learn' if self.learns else 'frozen'}\n"
            f"{_text(self.body)}\n"
            f"outputs {', '.join(self.seen)}; not in the loss: {', '.join(self.unseen) or 'none'}\n"
            f"between forward and backward: {self.meanwhile}\n"
            f"backward: {self.backward}"
        )


def _text(body: tuple[Step, ...]) -> str:
    return "\n".join(map(str, body)) or "pass"


def _indented(body: tuple[Step, ...]) -> str:
    return textwrap.indent(_text(body), "    ")


# Drawing


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
    return World()


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
        contexts = [c for c in BLOCKS if not (scope.reentrant and c in _GRAD_MODES)]
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


# Running


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
class _Machine:
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
    machine: _Machine,
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


def _leaf(dtype: torch.dtype, requires_grad: bool) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.randn(
        ROWS, WIDTH, dtype=dtype, device=device, requires_grad=requires_grad
    )


INPUTS: dict[str, Callable[[torch.device], Tensor]] = {
    "x": _leaf(torch.float32, True),
    "y": _leaf(torch.float32, True),
    "constant": _leaf(torch.float32, False),
    "half": _leaf(torch.bfloat16, True),
    "long": _leaf(torch.float64, True),
}


class Training:
    """A program with its world: what a way of calling backward works on."""

    def __init__(
        self, program: Program, plain: bool, device: torch.device, modes: Mapping[str, Mode]
    ) -> None:
        torch.manual_seed(11)
        self.program = program
        self.world = World().to(device)
        self.world.requires_grad_(program.learns)
        self.machine = _Machine(self.world, device, modes, plain)
        self.generator = torch.Generator(device).manual_seed(5)
        self.inputs = {name: INPUTS[name](device) for name in program.inputs}
        self.leaves = {
            name: leaf
            for name, leaf in (*self.inputs.items(), *self.world.named_parameters())
            if leaf.requires_grad
        }
        self.found: dict[str, Any] = {}
        """Everything to be compared, by name."""

    def forward(self) -> list[Tensor]:
        """Run the program; the variables that the loss sees."""
        env: dict[str, Any] = {**self.inputs, "generator": self.generator}
        self.machine.steps(self.program.body, env)
        for name in (*self.program.seen, *self.program.unseen):
            self.note(f"output {name}", env[name])
            self.note(f"output {name} requires grad", env[name].requires_grad)
        return [env[name] for name in self.program.seen]

    def meanwhile(self) -> None:
        MEANWHILE[self.program.meanwhile](self)

    def note(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self.found[f"{name} #{len(self.found)}"] = value

    def note_all(self, values: Iterable[tuple[Any, Tensor | None]], kind: str) -> None:
        for name, value in values:
            self.note(f"{kind} {name}", value)


def _loss(outs: list[Tensor]) -> Tensor:
    """A scalar in which every element of every output has a weight of its own."""
    parts = [
        (
            out.float() * torch.linspace(i + 1, i + 2, out.numel(), device=out.device).view_as(out)
        ).sum()
        for i, out in enumerate(outs)
        if out.requires_grad
    ]
    if not parts:
        raise RuntimeError("no output requires a gradient")
    return torch.stack(parts).sum()


def _forward(t: Training) -> Tensor:
    loss = _loss(t.forward())
    t.meanwhile()
    return loss


def _backward(t: Training) -> None:
    _forward(t).backward()


def _grad(t: Training) -> None:
    grads = torch.autograd.grad(_forward(t), list(t.leaves.values()), allow_unused=True)
    t.note_all(zip(t.leaves, grads, strict=True), "grad of")


def _chosen_inputs(t: Training) -> None:
    _forward(t).backward(inputs=list(t.inputs.values())[:1])


def _retain_twice(t: Training) -> None:
    loss = _forward(t)
    loss.backward(retain_graph=True)
    t.note_all(((name, leaf.grad) for name, leaf in t.leaves.items()), "first grad of")
    loss.backward()


def _double(t: Training) -> None:
    grads = torch.autograd.grad(
        _forward(t), list(t.leaves.values()), create_graph=True, allow_unused=True
    )
    t.note_all(zip(t.leaves, grads, strict=True), "grad of")
    _loss([g * g for g in grads if g is not None]).backward()


def _two_losses(t: Training) -> None:
    outs = t.forward()
    t.meanwhile()
    wanting = [out for out in outs if out.requires_grad]
    _loss(wanting[:1]).backward(retain_graph=True)
    _loss([out * 2 for out in wanting]).backward()


def _each_output(t: Training) -> None:
    outs = [out for out in t.forward() if out.requires_grad]
    t.meanwhile()
    torch.autograd.backward(outs, [torch.full_like(out, i + 1) for i, out in enumerate(outs)])


def _in_autocast(t: Training) -> None:
    loss = _forward(t)
    with torch.autocast(t.machine.device.type, torch.bfloat16):
        loss.backward()


def _in_a_thread(t: Training) -> None:
    loss, errors = _forward(t), []

    def work() -> None:
        try:
            loss.backward()
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


def _two_steps(t: Training) -> None:
    optimizer = torch.optim.SGD(t.leaves.values(), lr=0.1, momentum=0.9)
    for step in (1, 2):
        optimizer.zero_grad()
        _forward(t).backward()
        t.note_all(((name, leaf.grad) for name, leaf in t.leaves.items()), f"step {step} grad of")
        optimizer.step()
    t.note_all(t.leaves.items(), "trained")


def _two_forwards_first(t: Training) -> None:
    first, second = _forward(t), _forward(t)
    first.backward()
    second.backward()


def _exec_group(t: Training) -> None:
    loss = _forward(t)
    inputs = [leaf for leaf in t.inputs.values() if leaf.requires_grad]
    others = [leaf for leaf in t.leaves.values() if not any(leaf is x for x in inputs)]
    with rekindle.GraphExecGroup():
        for leaves in (inputs, others):
            if leaves:
                grads = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
                t.note_all(enumerate(grads), "grad of")
    loss.backward()


def _exec_group_of_losses(t: Training) -> None:
    outs = [out for out in t.forward() if out.requires_grad]
    t.meanwhile()
    with rekindle.GraphExecGroup():
        for out in outs:
            _loss([out]).backward(retain_graph=out is not outs[-1])


BACKWARDS: dict[str, Callable[[Training], None]] = {
    "backward()": _backward,
    "autograd.grad(inputs and parameters)": _grad,
    "backward(inputs=...)": _chosen_inputs,
    "backward(retain_graph=True), and again": _retain_twice,
    "autograd.grad(create_graph=True), and backward() of that": _double,
    "two losses, one after the other": _two_losses,
    "autograd.backward() of each output": _each_output,
    "backward() in autocast": _in_autocast,
    "backward() in another thread": _in_a_thread,
    "two steps of SGD": _two_steps,
    "two forwards, then their backwards": _two_forwards_first,
    "grads of inputs, then of parameters, in one exec group": _exec_group,
    "losses in one exec group": _exec_group_of_losses,
}


def _nothing(t: Training) -> None:
    pass


def _draw_numbers(t: Training) -> None:
    torch.rand(3, device=t.machine.device)
    torch.rand(3, device=t.machine.device, generator=t.generator)


def _reseed(t: Training) -> None:
    torch.manual_seed(99)


def _evaluate(t: Training) -> None:
    t.world.eval()


def _run_modules(t: Training) -> None:
    x = torch.ones(ROWS, WIDTH, device=t.machine.device)
    with torch.no_grad():
        t.world.batch_norm(t.world.count(t.world.average(x)))


MEANWHILE: dict[str, Callable[[Training], None]] = {
    "nothing": _nothing,
    "random numbers are drawn": _draw_numbers,
    "the seed is set": _reseed,
    "the modules are put in eval mode": _evaluate,
    "the modules with buffers run again": _run_modules,
}


def run(
    program: Program, plain: bool, device: str = "cpu", modes: Mapping[str, Mode] = MODES
) -> dict[str, Any]:
    """Run a program from a fixed seed; what the step leaves behind, by name."""
    t = Training(program, plain, torch.device(device), modes)
    buffers = dict(t.world.named_buffers())
    BACKWARDS[program.backward](t)
    t.note_all(((name, leaf.grad) for name, leaf in t.leaves.items()), "grad of")
    for name, buffer in t.world.named_buffers():
        t.note(f"buffer {name}", buffer)
        t.note(f"buffer {name} is the same tensor", buffer is buffers[name])
    t.note("training", [module.training for module in t.world.modules()])
    t.note("rng state", torch.get_rng_state())
    t.note("generator's state", t.generator.get_state())
    if device != "cpu":
        t.note("device's rng state", torch.cuda.get_rng_state())
    t.note("grad mode", torch.is_grad_enabled())
    t.note("autocast", torch.is_autocast_enabled(device))
    t.note("recomputing", rekindle.is_recomputing())
    return t.found


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What is not the same, bit for bit, in two outcomes of `run`."""
    lines = [
        f"{name}:\n  plain   {expected[name]}\n  regions {found[name]}"
        for name in expected
        if name in found and not _identical(expected[name], found[name])
    ]
    if expected.keys() != found.keys():
        lines.append(f"other outcomes: {sorted(expected.keys() ^ found.keys())}")
    return lines


def _identical(a: Any, b: Any) -> bool:
    """Equal in type, shape and every bit; a NaN is a NaN."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.is_floating_point():
        a, b = (torch.where(x.isnan(), torch.nan, x) for x in (a, b))
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))
