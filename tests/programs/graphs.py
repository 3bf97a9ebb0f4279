"""Random programs for `torch.compile`: drawn as Python source, compiled with regions and without.

    python -m tests.programs.graphs --count 300
    python -m tests.programs.graphs --count 40 --backend inductor

The interpreter of the other random programs is no code to compile. So these are drawn as the source
of a function (`source_of`), in which `region(function, policy, *arguments)` is a plain call or a
region: nested, each with a policy of its own, around ops that draw random numbers and blocks that
have fates by their path. `differences` compiles one both ways and compares outputs, gradients,
buffers and random state: bit for bit on `aot_eager`, in double precision within rounding elsewhere.
A program that the compiler cannot take without regions, or with torch's own, is skipped.
To add an op or a policy, add a line to `OPS` or `POLICIES`.
"""

import argparse
import copy
import random
import sys
import traceback
import warnings
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn import functional

import rekindle
from rekindle import policies
from rekindle.policies import at, every, first, keep, named, offload, recompute, spill
from tests.graphs import fresh_compiler
from tests.programs.functions import saves_both
from tests.toys import Block

ROWS, WIDTH = 4, 8

OPS = {
    "sin": "{x}.sin()",
    "exp": "({x} * 0.3).exp()",
    "tanh": "{x}.tanh()",
    "gelu": "F.gelu({x})",
    "square": "{x} * {x}",
    "sigmoid": "{x}.sigmoid() * {y}",
    "add": "{x} + {y}",
    "mul": "{x} * {y}",
    "where": "torch.where({x} > {y}, {x}, {y})",
    "softmax": "{x}.softmax(-1)",
    "cumsum": "{x}.cumsum(0)",
    "sort": "{x}.sort(-1).values",
    "sum": "{x} - {x}.mean(-1, keepdim=True)",
    "matmul": "({x} @ w.weight).tanh()",
    "linear": "w.linear({x})",
    "norm": "w.norm({x})",
    "batch_norm": "w.batch_norm({x})",
    "attention": "F.scaled_dot_product_attention({x}[None], {y}[None], {x}[None])[0]",
    "transpose": "{x}.t().reshape(ROWS, WIDTH)",
    "rows": "torch.cat([{x}[2:], {x}[:2]])",
    "split": "torch.cat({x}.chunk(2, -1)[::-1], -1)",
    "detach": "{x}.detach()",
    "clone": "{x}.clone().add_(1).mul_(0.5)",
    "function": "saves_both({x})",
    "name": "rekindle.name({x}.sin(), 'wave').exp().tanh()",
    "block": "w.blocks[{i}]({x})",
    "dropout": "F.dropout({x}, 0.4)",
    "rrelu": "F.rrelu({x}, training=True)",
    "rand": "{x} + torch.rand_like({x})",
    "bernoulli": "{x} * torch.bernoulli({x}.detach().sigmoid())",
    "unread": "{x} + torch.bernoulli({y}.detach().sigmoid())",
    "randperm": "{x} * torch.randperm(WIDTH, device={x}.device) / WIDTH",
    "multinomial": "{x} + torch.multinomial({y}.detach().sigmoid(), WIDTH)",
}
RANDOM = ("dropout", "rrelu", "rand", "bernoulli", "unread", "randperm", "multinomial")

POLICIES: dict[str, Any] = {
    "none": None,
    "keep": keep(),
    "keep matmuls": policies.keep_matmuls_and_attention,
    "keep sin": keep("aten::sin", "aten::mul"),
    "recompute": recompute(),
    "recompute cheap": policies.recompute_cheap,
    "spill": spill(),
    "spill matmuls": spill(policies.MATMULS),
    "offload": offload(),
    "first spilled": first(2, spill()),
    "first spilled, others kept": first(1, spill()) | every(2, keep()),
    "every third spilled": every(3, spill()) | every(2, keep()),
    "every second": every(2, spill()) | recompute(),
    "a name spilled": named("wave", fate="spill") | keep(policies.MATMULS),
    "by path": at("mlp", spill()) | first(2, keep()),
    "torch's": partial(
        rekindle.create_selective_checkpoint_contexts,
        [torch.ops.aten.mm.default, torch.ops.aten.tanh.default],
    ),
}
FATES = ["recompute", "keep", *(name for name in POLICIES if name not in ("none", "torch's"))]
"""What a block can be given by `rekindle.apply`, by name."""
PATHS = ["blocks.0", "blocks.1", "blocks.1.mlp", "blocks.2", "blocks.2.norm"]
HOW = ["the function", "the function", "the blocks"]
"""What is compiled."""


@dataclass(frozen=True)
class Source:
    """A program: the source of its function, and what is applied to the blocks that it calls."""

    text: str
    fates: tuple[tuple[str, str], ...]
    compiled: str
    """One of `HOW`."""

    def __str__(self) -> str:
        return f"{self.text}\napply(w, {dict(self.fates)}); compiled: {self.compiled}"


class _Drawing:
    """Writes the lines of one program."""

    def __init__(self, seed: int, backend: str) -> None:
        self.random = random.Random(seed)
        self.names = 0
        self.draws_once = backend == "inductor"
        self.drawn: list[list[str]] = [[]]
        """Random numbers that a body has to return, of the program and of the regions around."""

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def body(self, variables: list[str], depth: int) -> list[str]:
        lines = []
        for _ in range(self.random.randint(1, 4)):
            is_region = depth < 3 and self.random.random() < (0.25, 0.3, 0.15)[depth]
            lines += (self.region if is_region else self.op)(variables, depth)
        return lines

    def op(self, variables: list[str], _: int) -> list[str]:
        op = self.random.choice(RANDOM if self.random.random() < 0.25 else list(OPS))
        if op in RANDOM and self.draws_once and any(self.drawn):
            op = "sin"
        x, y = (self.random.choice(variables[-4:]) for _ in range(2))
        out = self.name("v")
        variables.append(out)
        if op in RANDOM:
            self.drawn[-1].append(out)
        return [f"{out} = {OPS[op].format(x=x, y=y, i=self.random.randint(0, 2))}"]

    def region(self, variables: list[str], depth: int) -> list[str]:
        name = self.name("region")
        given = list(dict.fromkeys(self.random.choices(variables, k=2)))
        sees = given + ([self.random.choice(variables)] if self.random.random() < 0.3 else [])
        self.drawn.append([])
        lines = self.body(sees, depth + 1)
        results = self.random.choices(sees[len(given) :] or sees, k=2)
        drawn = self.drawn.pop()
        results = self.results(results, drawn)
        outs = [self.name("v") for _ in results]
        variables += outs
        self.drawn[-1] += outs if drawn else []
        policy = self.random.choice(list(POLICIES))
        return [
            f"def {name}({', '.join(given)}):",
            *(f"    {line}" for line in lines),
            f"    return {', '.join(results)},",
            f"{', '.join(outs)}, = region({name}, {policy!r}, {', '.join(given)})",
        ]

    def results(self, wanted: list[str], drawn: list[str]) -> list[str]:
        """What a body returns: under inductor what was drawn too.

        Inductor draws in an order of its own, and what nobody reads it draws in regions alone. So
        a program for it draws once, and returns that.
        """
        return list(dict.fromkeys(wanted + drawn if self.draws_once else wanted))

    def program(self) -> Source:
        variables = ["x", "y"]
        lines = self.body(variables, 0) + self.region(variables, 0) + self.body(variables, 0)
        outs = [variables[-1], *self.random.sample(variables[2:], k=2)]
        lines.append(f"return {', '.join(self.results(outs, self.drawn[0]))},")
        text = "\n".join(["def program(x, y):", *(f"    {line}" for line in lines)])
        paths = [path for path in PATHS if self.random.random() < 0.5]
        fates = tuple((path, self.random.choice(FATES)) for path in paths)
        return Source(text, fates, self.random.choice(HOW))


def source_of(seed: int, backend: str = "aot_eager") -> Source:
    """The program of a seed: the same each time, for the same tables."""
    return _Drawing(seed, backend).program()


class World(nn.Module):
    """The parameters and blocks that programs use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, drop=0.3) for _ in range(3))


@cache
def _world() -> World:
    torch.manual_seed(3)
    return World()


def _plain(function: Any, _policy: str, *args: Any) -> Any:
    return function(*args)


def _region(function: Any, policy: str, *args: Any) -> Any:
    if policy == "none":
        return rekindle.checkpoint(function, *args)
    return rekindle.checkpoint(function, *args, context_fn=POLICIES[policy])


def _torchs_region(function: Any, _policy: str, *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


REGIONS = {"plain": _plain, "rekindle": _region, "torch": _torchs_region}


def _fate(name: str) -> Any:
    return POLICIES.get(name, name) if name not in ("recompute", "keep") else name


def run(source: Source, regions: str, backend: str) -> dict[str, Any]:
    """Two steps of a program that is compiled, with `REGIONS`; what they leave behind, by name."""
    dtype = torch.float32 if backend == "aot_eager" else torch.float64
    world = copy.deepcopy(_world()).to(dtype)
    for module in world.modules():
        if isinstance(module, nn.Dropout) and backend == "inductor":
            module.p = 0.0
    torch.manual_seed(4)
    x, y = (torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    scope = {
        "torch": torch,
        "F": functional,
        "rekindle": rekindle,
        "ROWS": ROWS,
        "WIDTH": WIDTH,
        "w": world,
    }
    scope |= {"saves_both": saves_both, "region": REGIONS[regions]}
    exec(source.text, scope)
    function: Any = scope["program"]
    if regions == "rekindle" and source.fates:
        rekindle.apply(world, {path: _fate(name) for path, name in source.fates})
    leaves = {"x": x, "y": y} | dict(world.named_parameters())
    found: dict[str, Any] = {}
    # Otherwise inductor numbers the ops that draw, with others where regions make some again.
    with fresh_compiler(), inductor_config.patch(fallback_random=True):
        if source.compiled == "the function":
            function = torch.compile(function, backend=backend)
        else:
            for block in world.blocks:
                block.compile(backend=backend)
        for step in (1, 2):
            outs: tuple[Tensor, ...] = function(x, y)
            loss = sum(((i + 1) * out.square()).sum() for i, out in enumerate(outs))
            grads = [None] * len(leaves)
            if isinstance(loss, Tensor) and loss.requires_grad:
                grads = list(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
            found |= {f"step {step} output {i}": out.detach() for i, out in enumerate(outs)}
            found |= {f"step {step} grad {name}": g for name, g in zip(leaves, grads, strict=True)}
    found |= dict(world.named_buffers())
    if backend == "aot_eager":
        found["random state"] = torch.get_rng_state()
    return found


def differences(source: Source, backend: str = "aot_eager") -> list[str] | None:
    """What is not the same with regions and without, by name; None if torch fails."""
    try:
        expected = run(source, "plain", backend)
    except Exception:  # noqa: BLE001 - whatever it is, the program is none for torch
        return None
    try:
        found = run(source, "rekindle", backend)
    except Exception:
        if _fails_with_torchs_regions(source, backend):
            return None
        raise
    return [name for name in expected if not _same(expected[name], found[name], backend)]


def _fails_with_torchs_regions(source: Source, backend: str) -> bool:
    try:
        run(source, "torch", backend)
    except Exception:  # noqa: BLE001 - whatever it is, the program is none for torch
        return True
    return False


def _same(a: Tensor | None, b: Tensor | None, backend: str) -> bool:
    if a is None or b is None:  # a leaf that no loss depends on may have a gradient of zeros
        return all(x is None or not x.any() for x in (a, b))
    if backend == "aot_eager":
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    return torch.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)


def main() -> int:
    """Run the programs of many seeds, and print those that differ or raise."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.graphs")
    parser.add_argument("--count", type=int, required=True, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--backend", default="aot_eager", choices=["aot_eager", "inductor"])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failed = skipped = 0
    for seed in range(given.first, given.first + given.count):
        source = source_of(seed, given.backend)
        try:
            names = differences(source, given.backend)
            skipped += names is None
            differ = ", ".join(names or ())
        except Exception:  # noqa: BLE001 - whatever it is, it is shown
            differ = traceback.format_exc(limit=-3)
        if differ:
            failed += 1
            print(f"--- seed {seed}, {given.backend}\n{source}\n{differ}\n", flush=True)  # noqa: T201
    print(  # noqa: T201
        f"{given.count} programs, {failed} failed, {skipped} skipped; torch {torch.__version__}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
