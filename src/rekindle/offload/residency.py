"""The states of an activation: on the device, leaving, away, returning, and returned.

    ON_DEVICE ──begin_copy_out──▶ LEAVING ──end_copy_out──▶ AWAY ──begin_return──▶ RETURNING
        ▲ ▲                          │                      ▲  ▲                      │   │
        │ └─────keep_on_device───────┘                      │  └────────evict─────────┘   │
        │                                                   └──────evict── RETURNED ◀─arrive
        └──────overwrite── (any state that has a copy)

`evict` leaves an activation that is AWAY as it is. A derived activation has no copy: `derive` takes
it from ON_DEVICE to AWAY at once, and `arrive` from AWAY to RETURNED when one op has made its bytes
again.

`MovableBytes` holds the state and is the only code that changes it; other code reads `residency`,
`data` and `copy`. A tier's thread, or the offloader, calls `end_copy_out`; all other transitions
are made under the lock of the device's offloader.
"""

from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rekindle.offload.derive import Derivation
    from rekindle.offload.tiers.base import Copy


class Residency(Enum):
    """The state of an activation: where its bytes are."""

    ON_DEVICE = "on the device, and nowhere else"
    LEAVING = "on the device, while a copy-out runs"
    AWAY = "in a copy only; or nowhere, if they are derived"
    RETURNING = "in a copy, while they are copied back"
    RETURNED = "on the device again; the copy, if there is one, stays"

    __hash__ = object.__hash__  # by identity, in C: an enum's own hash is Python code


ON_DEVICE, LEAVING, AWAY, RETURNING, RETURNED = Residency

TRANSITIONS: dict[str, dict[Residency, Residency]] = {
    "begin_copy_out": {ON_DEVICE: LEAVING},
    "end_copy_out": {LEAVING: AWAY},
    "keep_on_device": {ON_DEVICE: ON_DEVICE, LEAVING: ON_DEVICE},
    "overwrite": {LEAVING: ON_DEVICE, AWAY: ON_DEVICE, RETURNING: ON_DEVICE, RETURNED: ON_DEVICE},
    "derive": {ON_DEVICE: AWAY},
    "begin_return": {AWAY: RETURNING},
    "arrive": {AWAY: RETURNED, RETURNING: RETURNED},
    "evict": {AWAY: AWAY, RETURNING: AWAY, RETURNED: AWAY},
}
"""By the name of a transition: the states that it may begin in, and the state that it ends in."""

_BEGIN_COPY_OUT = TRANSITIONS["begin_copy_out"]
_END_COPY_OUT = TRANSITIONS["end_copy_out"]
_KEEP_ON_DEVICE = TRANSITIONS["keep_on_device"]
_OVERWRITE = TRANSITIONS["overwrite"]
_DERIVE = TRANSITIONS["derive"]
_BEGIN_RETURN = TRANSITIONS["begin_return"]
_ARRIVE = TRANSITIONS["arrive"]
_EVICT = TRANSITIONS["evict"]

_end_or_cancel = Lock()
"""A lock: a copy-out either ends, perhaps on a tier's thread, or is cancelled."""


class MovableBytes:
    """Bytes of a device that are copied out and back: their state, and where they are in it.

    Each transition computes what it needs first and then assigns in a row, with no call in between:
    an interrupt leaves it done or not begun.
    """

    __slots__ = ("copy", "copy_outs", "data", "derivation", "residency")

    def __init__(self, data: "Tensor") -> None:
        self.residency = ON_DEVICE
        self.data: Tensor | None = data
        """The bytes on the device; None if AWAY or RETURNING."""
        self.copy: Copy | None = None
        """The bytes in the tier; None if ON_DEVICE, or if they are derived."""
        self.derivation: Derivation | None = None
        """The op that makes the bytes again from other saved tensors, if one does."""
        self.copy_outs = 0
        """Number of copy-outs that were begun. Only the last one may end."""

    def begin_copy_out(self, copy: "Copy") -> int:
        """Start to leave by `copy`. Returns the number of this copy-out, for `end_copy_out`."""
        after = _BEGIN_COPY_OUT[self.residency]
        self.copy = copy
        self.copy_outs += 1
        self.residency = after
        return self.copy_outs

    def end_copy_out(self, number: int) -> None:
        """Release the device's bytes if the copy-out of this number was not cancelled."""
        with _end_or_cancel:
            after = _END_COPY_OUT.get(self.residency)
            if after is not None and number == self.copy_outs:
                self.residency = after
                self.data = None

    def keep_on_device(self) -> bool:
        """Cancel the copy-out, if one runs. Returns False if the bytes have left already."""
        with _end_or_cancel:
            after = _KEEP_ON_DEVICE.get(self.residency)
            if after is None:
                return False
            copy = self.copy
            self.copy = None
            self.residency = after
        if copy is not None:
            copy.close()
        return True

    def overwrite(self, data: "Tensor") -> None:
        """Replace the bytes and discard their copy: the storage was written to since."""
        with _end_or_cancel:
            after = _OVERWRITE[self.residency]
            copy = self.copy
            self.data = data
            self.copy = None
            self.residency = after
        if copy is not None:
            copy.close()

    def derive(self, derivation: "Derivation") -> None:
        """Drop the bytes without a copy: `derivation` makes them again."""
        after = _DERIVE[self.residency]
        self.derivation = derivation
        self.residency = after
        self.data = None

    def begin_return(self) -> None:
        """Note that the copy back has begun."""
        self.residency = _BEGIN_RETURN[self.residency]

    def arrive(self, data: "Tensor") -> None:
        """Take the bytes that came back; the copy stays, for another backward."""
        after = _ARRIVE[self.residency]
        self.data = data
        self.residency = after

    def evict(self) -> None:
        """Drop bytes that came back, or are coming back. No effect on bytes that never left."""
        after = _EVICT.get(self.residency)
        if after is None:
            return
        if self.copy is not None:
            self.copy.drop()
        self.residency = after
        self.data = None
