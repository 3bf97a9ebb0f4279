"""Fingerprints of activations, for `determinism_check="values"`: a replay gives the same bits.

Of each activation the forward keeps a checksum of its bits that knows their order, its norm and a
few elements, on its own device and without waiting for it; the replay is compared in one go, with
one wait. An activation is looked at once the op that saved it has ended, because an op may still
write to what it saves (`Note [When a replay may stop]` in collect.py).

Note [What nothing writes nor reads]. Some ops save memory that in one of their modes nothing fills,
and their backward does not read: `rrelu` its noise, in eval. Its content is whatever was there
before. Only the node that saved it tells, and that is known when the node asks for it. So where all
that differs may be such memory, the error waits until a node asks for it that reads it.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rekindle.regions.errors import mismatch
from rekindle.regions.errors.call_sites import RawSite
from rekindle.regions.errors.op_trace import describe
from rekindle.torch_private.autograd_graph import current_node, saved_by
from rekindle.torch_private.dispatch_modes import past_modes
from rekindle.torch_private.grad_mode import without_grad
from rekindle.torch_private.version_counters import version_of

if TYPE_CHECKING:
    from rekindle.regions.recompute.collect import Collector
    from rekindle.regions.recompute.recompute_region import RecomputeRegion
    from rekindle.regions.recompute.slots import Slot

_SAMPLES = 64
_CHUNK = 1 << 22
_RNN = os.path.join("torch", "nn", "modules", "rnn.py")
"""RNN kernels save a workspace of bytes, with gaps that nobody writes to."""
_UNREAD = {"RreluWithNoiseBackward": ("noise", "training")}
"""By a node's name without its number: what it saves, and the flag without which it is not read.
Note [What nothing writes nor reads]."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """Checksum, norm and a few elements of one tensor's content."""

    what: str
    checksum: Tensor
    norm: Tensor
    sample: Tensor


@dataclass(frozen=True)
class Drift:
    """One activation whose content changed from forward to replay."""

    position: int
    what: str
    how_much: str


def fingerprint_of(x: Tensor) -> Fingerprint | None:
    """The fingerprint of a dense tensor; None for what has no plain memory (sparse, nested)."""
    return without_grad(_fingerprint, x)


def _fingerprint(x: Tensor) -> Fingerprint | None:
    is_plain = type(x) in (Tensor, torch.nn.Parameter) and not x.is_nested
    if not is_plain or x.layout != torch.strided or x.is_meta:
        return None
    real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    flat = real.detach().resolve_neg().contiguous().view(-1)
    number = flat.float() if flat.dtype.itemsize == 1 else flat  # fp8 and bool know no arithmetic
    step = max(1, number.numel() // _SAMPLES)
    return Fingerprint(
        describe(x),
        _checksum(flat.view(_INTEGER[flat.dtype.itemsize])),
        torch.linalg.vector_norm(number.to(torch.float32)),
        number[::step].double().clone(),
    )


def _checksum(bits: Tensor) -> Tensor:
    """A checksum of the bits that depends on their order."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        places = torch.arange(start + 1, start + 1 + part.numel(), device=bits.device)
        total += (part * _scrambled(places)).sum()
    return total


def _scrambled(places: Tensor) -> Tensor:
    """Weights for the positions, not linear in them: permuted rows would have the same sum."""
    mixed = places * 0x5851F42D4C957F2D
    return (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D


class _FingerprintRecorder:
    """Computes the fingerprint of each save, when the op that saves has ended."""

    def __init__(self) -> None:
        self.fingerprints: dict[int, Fingerprint | None] = {}
        """Fingerprints by the position of each save; None if a tensor has none."""
        self._pending: list[tuple[int, Tensor]] = []
        self._site: RawSite | None = None

    def add(self, position: int, x: Tensor, site: RawSite) -> None:
        if site != self._site:
            self.close()
            self._site = site
        if x.dtype == torch.uint8 and site[0].co_filename.endswith(_RNN):
            return
        if x.dtype == torch.uint64 and x.dim() == 0:  # flash attention saves one it never writes
            return
        self._pending.append((position, past_modes(x.detach)))

    def close(self) -> None:
        if self._pending:
            self.fingerprints.update(past_modes(_all_fingerprints, self._pending))
        self._pending.clear()


def _all_fingerprints(
    pending: "list[tuple[int, Tensor]]",
) -> "list[tuple[int, Fingerprint | None]]":
    return [(position, fingerprint_of(x)) for position, x in pending]


class Fingerprints:
    """The fingerprints of one region's forward, and of the replay that runs now."""

    def __init__(self) -> None:
        self._forward = _FingerprintRecorder()
        self._replay = _FingerprintRecorder()
        self._count = 0

    def add(self, x: Tensor, site: RawSite) -> None:
        self._forward.add(self._count, x, site)
        self._count += 1

    def close(self) -> None:
        self._forward.close()

    def compare(self, position: int, x: Tensor, site: RawSite) -> None:
        self._replay.add(position, x, site)

    def check(self, region: "RecomputeRegion", collector: "Collector") -> list[Drift]:
        """Raise if anything that the replay gave back has other content than it had in forward.

        If all that has may be memory that nothing reads, it is returned instead: Note [What nothing
        writes nor reads].
        """
        self._replay.close()
        replayed, self._replay = self._replay.fingerprints, _FingerprintRecorder()
        pairs = [
            (position, before, after)
            for position, after in replayed.items()
            if after is not None
            and position < len(region.saved.slots)  # else a backward inside is ahead of the forward
            and region.saved.slots[position]() is not None
            and (before := self._forward.fingerprints.get(position)) is not None
        ]
        if not pairs:
            return []
        equal = [a.checksum == b.checksum for _, a, b in pairs]
        if len({e.device for e in equal}) > 1:
            equal = [e.cpu() for e in equal]
        same = torch.stack(equal).tolist()
        drifts = [_drift(*pair) for pair, equal in zip(pairs, same, strict=True) if not equal]
        if not all(_may_be_unwritten(collector, drift.position) for drift in drifts):
            raise mismatch.drifted(region, drifts)
        return drifts


def _may_be_unwritten(collector: "Collector", position: int) -> bool:
    return not collector.is_old(position) and version_of(collector.tensors[position]) == 0


def is_read(slot: "Slot") -> bool:
    """True if the node that asks for a slot reads it: Note [What nothing writes nor reads]."""
    node = current_node()
    if node is None:
        return True
    name, flag = _UNREAD.get(node.name().rstrip("0123456789"), ("", ""))
    return not name or saved_by(node, name) is not slot or getattr(node, f"_saved_{flag}")


def _drift(position: int, before: Fingerprint, after: Fingerprint) -> Drift:
    return Drift(position, after.what, format_change(before, after))


def format_change(before: Fingerprint, after: Fingerprint) -> str:
    """Text that says by how much two contents differ."""
    change = (before.sample - after.sample).abs()
    moved = int((change > 0).sum())
    return (
        f"norm {float(before.norm):.9g} in forward, {float(after.norm):.9g} in replay; of "
        f"{change.numel()} elements looked at {moved} differ, by at most {float(change.max()):.3g}"
    )
