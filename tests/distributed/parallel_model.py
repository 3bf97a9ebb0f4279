"""The model that `test_parallel.py` trains, its collectives, and what comes out of its steps."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout, gelu, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle import policies
from tests.ranks import local_gradients

DEPTH = 2
DIM = 8
HEADS = 4
COLLECTIVES = [
    f"_c10d_functional::{name}"
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
]
WAYS = ("checkpoint", "recompute", "policy", "spill")
"""`rekindle.checkpoint` called by the model, and what `apply` is given."""
_APPLIED: dict[str, Any] = {
    "recompute": "recompute",
    "policy": policies.keep_matmuls_and_attention,
    "policy and collectives": policies.keep_matmuls_and_attention | policies.keep(COLLECTIVES),
    "spill": rekindle.offload(tier="disk", quota=1.0, min_bytes=1),
}


class Attention(nn.Module):
    """Over as many heads as there are here: some of them, if the projections are split."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)
        self.scale: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out if self.scale is None else out * self.scale


class FeedForward(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return self.down(dropout(gelu(self.up(x)), self.drop))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.mlp = FeedForward(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


Run = Callable[[nn.Module, Tensor], Tensor]


class Layers(nn.Module):
    """Layers in a row; `run(layer, x)` runs one."""

    def __init__(self, drop: float, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(drop) for _ in range(depth))
        self.run: Run = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


class Model(Layers):
    """A small transformer, with a part that is not used if asked for."""

    def __init__(self, drop: float = 0.0, unused: bool = False) -> None:
        super().__init__(drop, DEPTH)
        self.embed = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, DIM)
        self.unused = nn.Linear(DIM, DIM) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(self.embed(x)))  # type: ignore[no-any-return]


def hold(model: nn.Module, way: str, whole: bool = False) -> None:
    """Have a model's layers checkpointed, or give their activations fates; or the whole model's."""
    if way in _APPLIED:
        rekindle.apply(model, {"": _APPLIED[way]} if whole else _APPLIED[way])
        return
    for part in model.modules():
        if isinstance(part, Layers) and way == "checkpoint" and not whole:
            part.run = rekindle.checkpoint


class Collectives(TorchDispatchMode):
    """Notes every collective: its name, the shapes that it is given, and when it ran."""

    _SPACES = ("c10d", "_c10d_functional", "c10d_functional")
    _OTHERS = ("send", "recv", "wait_tensor", "barrier", "_wrap_tensor")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.seen: list[str] = []
        self.model: nn.Module | None = None
        self.gathered = 0
        """The most of its parameters, in numbers, that were here at a matmul in backward."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensors is what we want to see
        name = func._overloadpacket.__name__ if hasattr(func, "_overloadpacket") else ""
        if getattr(func, "namespace", "") in self._SPACES and not name.startswith(self._OTHERS):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            when = "replay" if rekindle.is_recomputing() else self.phase
            self.seen.append(f"{when} {name} {shapes}")
        if name in ("mm", "addmm") and self.phase == "backward" and self.model is not None:
            here = (p.numel() for p in self.model.parameters() if not isinstance(p, DTensor))
            self.gathered = max(self.gathered, sum(here))
        return func(*args, **(kwargs or {}))


GATHERS = ("_allgather_base_", "all_gather_into_tensor")


def counted(seen: list[str], *names: str) -> tuple[int, int, int]:
    """Counts of collectives of a kind in forward, in replays and in the rest."""
    found = Counter(
        when for when, name, _ in (line.split(" ", 2) for line in seen) if name in names
    )
    return found["forward"], found["replay"], found["backward"]


@dataclass
class Outcome:
    """The gradients and counts of a rank."""

    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    """Of every step, this rank's part."""
    collectives: list[str] = field(default_factory=list)
    """Of the last step, in order."""
    gathered: int = 0
    """The most parameters that were not sharded at a time in its backward, in numbers."""
    forwards: int = 0
    """Calls of regions in the last step."""
    replays: int = 0
    ops_replayed: int = 0
    spilled: int = 0


Step = Callable[[int, Collectives], None]


def train(model: nn.Module, step: Step, outcome: Outcome, steps: int = 2) -> None:
    """Some steps; the last one is looked at, the others run as a user's do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    torch.manual_seed(100 + dist.get_rank())
    for number in range(steps):
        optimizer.zero_grad()
        collectives = Collectives()
        if number < steps - 1:
            step(number, collectives)
        else:
            with rekindle.observe() as seen, collectives:
                step(number, collectives)
            outcome.forwards, outcome.replays = seen.total.forwards, seen.total.replays
            outcome.ops_replayed, outcome.spilled = seen.total.ops_replayed, seen.spill.tensors_out
            outcome.collectives, outcome.gathered = collectives.seen, collectives.gathered
        outcome.grads.append(local_gradients(model))
        optimizer.step()


def plain_step(model: Callable[[Tensor], Tensor], batch: Callable[[], Tensor]) -> Step:
    def step(number: int, collectives: Collectives) -> None:
        collectives.phase = "forward"
        loss = model(batch()).square().sum()
        collectives.phase = "backward"
        loss.backward()

    return step


def own_batch() -> Tensor:
    """Another one for each rank."""
    return torch.randn(2, 3, DIM)


def seeded_batch(seed: int) -> Callable[[], Tensor]:
    """Batches that are the same on all ranks with the same seed: those that share a batch."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(2, 4, DIM, generator=generator)
