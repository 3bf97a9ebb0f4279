"""Strategies: values that say what is done with the activations of a region.

`apply`, plans, wrappers, integrations and engines speak of activations in these values alone. They
are frozen, comparable and hashable, and print as the code that makes them; `strategy_json` saves
them. The ways that users write them (`"recompute"`, a policy, a dict by module path) are read into
them at the public edge. This module imports no torch: the planner's core computes with strategies.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

TierName: TypeAlias = Literal["host", "disk"]
"""A place that activations are copied to: host memory, or a file on disk."""
WORD_OF_TIER: dict[TierName, str] = {"host": "offload", "disk": "spill"}
"""The word for copying activations to a tier, as users write it and as plans are printed."""
OnFull: TypeAlias = Literal["keep", "raise"]
"""An activation that the tier has no room for stays on the device, or raises an error."""


@dataclass(frozen=True)
class Strategy:
    """The base of all strategies. `repr` is code that makes it, `str` is for people."""

    def __repr__(self) -> str:
        given = (
            f"{field.name}={value!r}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        )
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Keep(Strategy):
    """Activations stay on the device, as in plain autograd."""

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True, repr=False)
class Recompute(Strategy):
    """Activations are dropped in forward; a replay of the region makes them again in backward."""

    def __str__(self) -> str:
        return "recompute"


@dataclass(frozen=True, repr=False)
class Selective(Strategy):
    """A policy decides op by op: keep, recompute, offload or spill.

    The policy is a value of `rekindle.policies`, or one that a plan made of ops it measured:
    `PlannedOps`, `NumberedOps`.
    """

    policy: Any

    def __str__(self) -> str:
        return str(self.policy)


@dataclass(frozen=True, repr=False)
class SavedIndices(Strategy):
    """Saved tensors stay on the device, except some that are named by their index.

    The index counts the tensors that autograd saves in one forward of the region, outside of the
    modules that are recomputed.
    """

    recomputed: tuple[int, ...] = ()
    """Indices of saved tensors that one op makes again from other saved tensors."""
    offloaded: tuple[int, ...] = ()
    """Indices of saved tensors that are copied to `tier`."""
    tier: TierName = "host"
    count: int = 0
    """Number of tensors that autograd saves in the region; 0 if that is not known."""
    modules: tuple[str, ...] = ()
    """Modules inside the region that are recomputed, each as a region of its own: their paths."""

    def __post_init__(self) -> None:
        _sort(self, "recomputed", "offloaded", "modules")

    def __str__(self) -> str:
        parts = [("recompute", self.recomputed), (WORD_OF_TIER[self.tier], self.offloaded)]
        texts = [f"recompute {', '.join(self.modules)}"] if self.modules else []
        texts += [f"{word} saves {list(indices)}" for word, indices in parts if indices]
        return f"<{', '.join([*texts, 'keep the rest'])}>"


@dataclass(frozen=True, repr=False)
class Offload(Strategy):
    """Saved tensors are copied to host memory or disk, and copied back for backward.

    The fields are the arguments of `rekindle.offload`, checked and in bytes.
    """

    tier: TierName = "host"
    """The place that saved tensors are copied to."""
    quota: int | float | None = None
    """Bytes (`int`), a share of what can be moved (`float`), or None: as much as costs no time."""
    min_bytes: int | None = None
    """Smaller activations stay. None: 1 MiB; inside a region that is recomputed or has a policy, 0.

    The word `"offload"` leaves it open, `rekindle.offload()` says 1 MiB.
    """
    max_host_bytes: int | None = None
    """Bytes of pinned host memory per device, at most. None: a tenth of the memory stays free."""
    directory: str | None = None
    """The folder of the file for `tier="disk"`. None: the system's for temporary files."""
    on_full: OnFull = "keep"
    """An activation that the tier has no room for is kept on the device, or raises an error."""
    derive: bool = True
    """True if activations that one op makes again from other saved tensors are not copied."""

    def _key(self) -> tuple[Any, ...]:
        """The fields, and the type of the quota: 1 byte differs from a share of 1.0."""
        return (
            self.tier,
            self.quota,
            type(self.quota),
            self.min_bytes,
            self.max_host_bytes,
            self.directory,
            self.on_full,
            self.derive,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offload) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        if self == Offload(tier=self.tier, quota=1.0):
            return WORD_OF_TIER[self.tier]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["quota"] = "auto" if self.quota is None else self.quota
        values["min_bytes"] = 2**20 if self.min_bytes is None else self.min_bytes
        return f"rekindle.offload({', '.join(f'{name}={values[name]!r}' for name in values)})"


@dataclass(frozen=True, repr=False)
class Rows(Strategy):
    """The ops and the loss after a head take its logits a few rows at a time, forward and backward.

    Copies of the logits, such as in float32 or shifted, and their gradients never exist as a whole.
    """

    exact: bool = True
    """True if the head itself runs as a whole: then numbers are bit for bit as without it. False:
    it runs a few rows at a time, too, so that there are no logits at all, and the gradients of its
    weights are added up in another order."""

    def __str__(self) -> str:
        return "rows" if self.exact else "rows, without logits"


@dataclass(frozen=True, repr=False)
class Tile(Strategy):
    """The module runs on a share of its tokens at a time; backward runs each share again.

    Its input is all that is held. Gradients of its parameters are added up share by share, in
    float32: the last bits may differ. It has to treat each token by itself, as an MLP does; a
    module that does not raises an error in its first call.
    """

    chunks: int
    """The number of shares."""
    inner: Strategy = Recompute()
    """The strategy of a share; there is no other than `Recompute()`."""

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 1:
            raise ValueError(f"chunks should be a whole number from 1 on, but got {self.chunks!r}")

    def __str__(self) -> str:
        return f"tile in {self.chunks} chunks, {self.inner}"


@dataclass(frozen=True, repr=False)
class RecomputeInTiles(Strategy):
    """Activations are dropped in forward; in the replay, modules inside run by `Tile(chunks)`.

    What these modules make inside exists for one tile at a time. The last of them runs twice in
    all, as if the region were recomputed: in the replay only its input is wanted. One that others
    follow, whose saved tensors the replay has to make, runs three times.
    """

    modules: tuple[str, ...] = ()
    """Paths of the modules, from the region."""
    chunks: int = 4

    def __post_init__(self) -> None:
        _sort(self, "modules")

    def __str__(self) -> str:
        return f"recompute, {', '.join(self.modules)} in {self.chunks} tiles"


def is_exact_strategy(strategy: Strategy) -> bool:
    """True if gradients stay bit for bit what they are in plain autograd."""
    return not isinstance(strategy, Tile | RecomputeInTiles) and strategy != Rows(exact=False)


@dataclass(frozen=True, repr=False)
class Compiled(Strategy):
    """A compiled block whose graphs save a share of what they would: the rest is recomputed.

    The partitioner of `torch.compile` chooses what each graph's backward makes again. Plans for
    compiled blocks have it; a block that is not compiled runs by `inner` alone.
    """

    budget: float
    """The share, from 0 to 1: torch's `activation_memory_budget`, of the block's graphs alone."""
    inner: Strategy = Keep()
    """The strategy for what the graphs save: `Keep()`, or `SavedIndices` that moves some of it."""

    def __post_init__(self) -> None:
        if isinstance(self.budget, bool) or not 0 <= self.budget <= 1:
            raise ValueError(f"budget should be a share from 0 to 1, but got {self.budget!r}")

    def __str__(self) -> str:
        return f"compiled at a budget of {self.budget:g}, {self.inner}"


@dataclass(frozen=True, order=True)
class OpAddress:
    """The place of an op in its block.

    `index` and `count` leave out views and results that depend on parameters alone: Note [Numbers
    that no cast can shift] in regions/selective/op_addresses.py.
    """

    module: str
    """The path of the innermost module that runs it, from the block; empty for the block itself."""
    op: str
    """The op's name with its overload, such as `aten::addmm` or `aten::add.Tensor`."""
    index: int
    """Number of ops of this name that ran before it in the block."""
    count: int
    """Number of ops of this name in one forward of the block."""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.op} {self.index + 1} of {self.count}{where}"


@dataclass(frozen=True)
class PlannedOps:
    """A policy as data: ops of a block whose results a plan keeps or moves; the rest is recomputed.

    The two tuples share no address.
    """

    kept: tuple[OpAddress, ...] = ()
    offloaded: tuple[OpAddress, ...] = ()
    tier: TierName = "host"
    """The place that the results of `offloaded` are copied to."""
    moves_input: bool = False
    """True if the input, which the block holds to recompute from, is copied to `tier`, too."""

    def __post_init__(self) -> None:
        _sort(self, "kept", "offloaded")

    def __str__(self) -> str:
        moved = [*(["the input"] if self.moves_input else []), *map(str, self.offloaded)]
        parts = [("keep", [*map(str, self.kept)]), (WORD_OF_TIER[self.tier], moved)]
        texts = [f"{word} {', '.join(what)}" for word, what in parts if what]
        return f"<{'; '.join([*texts, 'recompute the rest'])}>"


@dataclass(frozen=True)
class NumberedOps:
    """As `PlannedOps`, by number: where ops have no address, and in old plan files."""

    kept: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    tier: TierName = "host"

    def __post_init__(self) -> None:
        _sort(self, "kept", "offloaded")

    def __str__(self) -> str:
        parts = [("keep", self.kept), (WORD_OF_TIER[self.tier], self.offloaded)]
        texts = [f"{word} ops {list(numbers)}" for word, numbers in parts if numbers]
        return f"<{', '.join([*texts, 'recompute the rest'])}>"


def _sort(value: object, *names: str) -> None:
    """Sort the tuples in some fields of a frozen value, so that equal sets are equal values."""
    for name in names:
        object.__setattr__(value, name, tuple(sorted(set(getattr(value, name)))))
