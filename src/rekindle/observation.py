"""Observation of regions: exact counts of forwards, replays, and activations held and dropped.

Regions report only while an observation is open; otherwise all of this costs one look at an empty
list. Counts are kept in the process, not in a context variable, because autograd replays regions on
threads of its own.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle.rows.row_tensor import runs_by_rows
from rekindle.sizes import format_bytes, format_count
from rekindle.torch_private.dispatch_modes import TorchDispatchMode, is_traced, reads_metadata
from rekindle.torch_private.module_calls import MODULE_CALL_METHODS

active: list["Observation"] = []
"""The observations that are open now."""


@dataclass
class Counts:
    """Counts of one region, or of all together."""

    forwards: int = 0
    replays: int = 0
    ops_replayed: int = 0
    activations_held: int = 0
    """Tensors that regions held from forward to backward: their inputs, without parameters."""
    bytes_held: int = 0
    activations_dropped: int = 0
    """Tensors that autograd would have held and the regions let go."""
    bytes_dropped: int = 0

    def __repr__(self) -> str:
        return _repr_of_counts(self)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


_WAITS = 1024
"""Number of waits that are kept one by one."""


@dataclass
class Traffic:
    """Copy-outs to one tier, host memory or disk, and copies back."""

    tensors_out: int = 0
    bytes_out: int = 0
    tensors_in: int = 0
    bytes_in: int = 0
    tensors_derived: int = 0
    """Activations that were neither kept nor copied out, but derived from others."""
    bytes_derived: int = 0
    prefetch_hits: int = 0
    """Activations that were in flight, or back on the device, when backward asked for them."""
    prefetch_misses: int = 0
    pool_bytes: int = 0
    """Most bytes of the tier that were reserved."""
    _waits: list[Callable[[], float]] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        return _repr_of_counts(self)

    @property
    def seconds_waited(self) -> float:
        """Seconds that the device waited for copies. Reading it waits for the device."""
        self._waits[:] = [functools.partial(float, sum(wait() for wait in self._waits))]
        return self._waits[0]()

    def add(self, pool_bytes: int, **counts: int) -> None:
        self.pool_bytes = max(self.pool_bytes, pool_bytes)
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def add_wait(self, seconds: Callable[[Any, Any], float], begin: Any, end: Any) -> None:
        self._waits.append(functools.partial(seconds, begin, end))
        if len(self._waits) > _WAITS:  # the older ones are over by now
            older = sum(wait() for wait in self._waits[: _WAITS // 2])
            self._waits[: _WAITS // 2] = [functools.partial(float, older)]


@dataclass(eq=False)
class Observation:
    """The counts of all regions that ran while an observation was open; prints as tables.

    Counts per region, by name (`seen.regions["Block"]`), and in `total`; what was offloaded to host
    memory in `offload`, what was spilled to disk in `spill`.
    """

    regions: dict[str, Counts] = field(default_factory=dict)
    offload: Traffic = field(default_factory=Traffic)
    spill: Traffic = field(default_factory=Traffic)

    def traffic(self, tier: str) -> Traffic:
        """The traffic of a tier, by the name it has in `rekindle.offload`."""
        return self.offload if tier == "host" else self.spill

    @property
    def total(self) -> Counts:
        return sum(self.regions.values(), Counts())

    def _of(self, name: str) -> Counts:
        """The counts of one region, made on first use."""
        return self.regions.setdefault(name, Counts())

    def __str__(self) -> str:
        return format_observation(self)

    def __repr__(self) -> str:
        total = self.total
        parts = [
            format_count(len(self.regions), "region"),
            format_count(total.forwards, "forward"),
            format_count(total.replays, "replay"),
        ]
        for word, nbytes in (
            ("held", total.bytes_held),
            ("dropped", total.bytes_dropped),
            ("offloaded", self.offload.bytes_out),
            ("spilled", self.spill.bytes_out),
        ):
            parts += [f"{format_bytes(nbytes)} {word}"] if nbytes else []
        return f"<Observation: {', '.join(parts)}>"


def _repr_of_counts(value: Counts | Traffic) -> str:
    """The code of a value with the counts that are not 0."""
    shown = [(f.name, getattr(value, f.name)) for f in fields(value) if f.repr]
    given = ", ".join(f"{name}={count}" for name, count in shown if count)
    return f"{type(value).__name__}({given})"


def format_observation(seen: Observation) -> str:
    """The observation as tables: a row per region and one in total, a row per tier in use."""
    tables = []
    tiers = {"offload": seen.offload, "spill": seen.spill}
    moved = {name: traffic for name, traffic in tiers.items() if traffic != Traffic()}
    if seen.regions or not moved:
        heads = [f.name.replace("_", " ") for f in fields(Counts)]
        rows = [[name, *_cells(counts)] for name, counts in seen.regions.items()]
        tables.append([["region", *heads], *rows, ["total", *_cells(seen.total)]])
    if moved:
        names = [f.name for f in fields(Traffic) if f.name != "_waits"]
        rows = [
            [
                strategy,
                *(f"{getattr(traffic, name):,}" for name in names),
                f"{traffic.seconds_waited:.3f}",
            ]
            for strategy, traffic in moved.items()
        ]
        tables.append(
            [["strategy", *(n.replace("_", " ") for n in names), "seconds waited"], *rows]
        )
    return "\n\n".join(map(_format_table, tables))


def _format_table(table: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return "\n".join(lines)


def _cells(counts: Counts) -> list[str]:
    return [f"{getattr(counts, f.name):,}" for f in fields(counts)]


@contextmanager
def observe() -> Iterator[Observation]:
    """Count the forwards, replays and activations of the regions that run inside.

    >>> import torch, rekindle
    >>> def region(x):
    ...     return x.sin().exp().cos()
    >>> x = torch.ones(8, requires_grad=True)
    >>> with rekindle.observe() as seen:
    ...     rekindle.checkpoint(region, x).sum().backward()
    >>> seen.total.forwards, seen.total.replays, seen.total.ops_replayed
    (1, 1, 2)
    >>> seen.total.bytes_held, seen.total.bytes_dropped  # x was held, exp(sin(x)) was let go
    (32, 32)
    """
    seen = Observation()
    try:
        active.append(seen)
        yield seen
    finally:
        active.remove(seen)


def region_name(function: Callable[..., Any]) -> str:
    """The name of a region for people: the module's class, or the function's qualified name."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(function, nn.Module):
        return type(function).__name__
    if isinstance(owner, nn.Module):
        method = getattr(function, "__name__", "__call__")
        kind = type(owner).__name__
        return kind if method in MODULE_CALL_METHODS else f"{kind}.{method}"
    return getattr(function, "__qualname__", type(function).__name__)


Footprint: TypeAlias = tuple[StorageWeakRef | None, int]
"""The storage of an activation, if it has one, and its bytes."""


def footprint_of(tensor: Tensor) -> Footprint | None:
    """The storage and bytes of an activation; None for a parameter, which is no activation."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass without a storage
        return None, tensor.numel() * tensor.element_size()
    return StorageWeakRef(storage), storage.nbytes()


class Watch:
    """Reports one region to the observations that were open when it ran."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._counts = [seen._of(region_name(function)) for seen in active]
        self._known: dict[int, StorageWeakRef] = {}

    def ran(self, inputs: Iterable[Tensor], held: bool = True) -> None:
        """The forward begins; its inputs are held by the region, or by an enclosing one."""
        for counts in self._counts:
            counts.forwards += 1
        for tensor in inputs:
            self._count(tensor, "held" if held else None)

    def held(self, tensor: Tensor) -> None:
        """The region holds a tensor until backward."""
        self._count(tensor, "held")

    def replayed(self, ops: int, again: bool) -> None:
        """Some ops of the region were replayed; `again` if others were before, in this backward."""
        for counts in self._counts:
            counts.replays += not again
            counts.ops_replayed += ops

    def saved(self, tensor: Tensor) -> None:
        """Autograd saved a tensor in the region's forward, and the region dropped it."""
        self._count(tensor, "dropped")

    def _count(self, tensor: Tensor, outcome: str | None) -> None:
        """Count a storage once, whatever views of it are saved; parameters are no activations."""
        footprint = footprint_of(tensor)
        if footprint is not None:
            self.count(footprint, outcome)

    def count(self, footprint: "Footprint", outcome: str | None) -> None:
        """Count a footprint as held or dropped, or as neither, unless its storage was counted."""
        storage, size = footprint
        if storage is not None:
            if storage.cdata in self._known:
                return
            self._known[storage.cdata] = storage
        for counts in self._counts if outcome else ():
            setattr(counts, f"activations_{outcome}", getattr(counts, f"activations_{outcome}") + 1)
            setattr(counts, f"bytes_{outcome}", getattr(counts, f"bytes_{outcome}") + size)

    def replay(self, own_ops: Callable[[], int] = lambda: 0) -> "_OpCounter":
        """A context that counts a replay and the ops it runs, without the engine's own."""
        return _OpCounter(self._counts, own_ops)


class OpMode(TorchDispatchMode):
    """A dispatch mode that shows each op to its subclass, but not ops that are only traced."""

    supports_higher_order_operators = True

    @abstractmethod
    def saw(self, op: Any, made: Any) -> None:
        """Called with an op that ran, and its result."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a compiled function is run as one, not looked into

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if runs_by_rows(types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        if not (is_traced() or reads_metadata(func)):
            self.saw(func, made)
        return made


class _OpCounter(OpMode):
    """Counts a replay, and those of its ops that reach the dispatcher."""

    def __init__(self, counts: list[Counts], own_ops: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts
        self._own_ops = own_ops
        self._ops = 0

    def saw(self, op: Any, made: Any) -> None:  # noqa: ARG002
        self._ops += 1

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for counts in self._counts:
            counts.replays += 1
            counts.ops_replayed += self._ops - self._own_ops()
