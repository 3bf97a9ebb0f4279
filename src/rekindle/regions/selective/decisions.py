"""What becomes of an op's result, and the ways people say it."""

from enum import Enum
from typing import Any

from rekindle.offload.offload_options import TierName
from rekindle.torch_private.torch_checkpoint import CheckpointPolicy


class Fate(Enum):
    """What becomes of an activation between forward and backward."""

    KEEP = "keep"
    PREFER_KEEP = "keep unless a compiler finds it cheap to make again"
    """Only in compiled code, where the partitioner decides; elsewhere it is `KEEP`."""
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    """To host memory, all of it, whether or not the device has to wait for it."""
    OFFLOAD_FREELY = "offload as much as costs no time"
    OFFLOAD_AS_PLANNED = "offload as planned"
    """All of it, as soon as it is made; it was reckoned that there is time for it."""
    SPILL = "spill"
    """To disk."""
    SPILL_AS_PLANNED = "spill as planned"
    """As `OFFLOAD_AS_PLANNED`, to disk."""


AS_PLANNED: dict[TierName, Fate] = {"host": Fate.OFFLOAD_AS_PLANNED, "disk": Fate.SPILL_AS_PLANNED}
"""What a plan sends to a tier, by the tier's name."""

_ANSWERS: dict[Any, Fate] = {  # what else is equal to True is not among them
    True: Fate.KEEP,
    False: Fate.RECOMPUTE,
    CheckpointPolicy.MUST_SAVE: Fate.KEEP,
    CheckpointPolicy.PREFER_SAVE: Fate.KEEP,
    CheckpointPolicy.MUST_RECOMPUTE: Fate.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Fate.RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: Fate.OFFLOAD,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: Fate.OFFLOAD_FREELY,
} | {fate: fate for fate in Fate}
_WORDS = {fate.value: fate for fate in (Fate.KEEP, Fate.RECOMPUTE, Fate.OFFLOAD, Fate.SPILL)}

_BY_ID = {id(answer): fate for answer, fate in _ANSWERS.items()}
"""The same by identity, since each is the only one of its kind: hashing an enum takes longer."""

FOR_TORCH = {
    Fate.KEEP: CheckpointPolicy.MUST_SAVE,
    Fate.PREFER_KEEP: CheckpointPolicy.PREFER_SAVE,
    Fate.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
    Fate.OFFLOAD: CheckpointPolicy.MUST_CPU_OFFLOAD,
    Fate.OFFLOAD_FREELY: CheckpointPolicy.PREFER_CPU_OFFLOAD,
    Fate.OFFLOAD_AS_PLANNED: CheckpointPolicy.MUST_CPU_OFFLOAD,
    Fate.SPILL: CheckpointPolicy.MUST_CPU_OFFLOAD,
    Fate.SPILL_AS_PLANNED: CheckpointPolicy.MUST_CPU_OFFLOAD,
}
"""In torch's words, for its own engines; they know no disk."""


def fate_of(answer: Any) -> Fate:
    """The fate that a policy's answer stands for: a `CheckpointPolicy`, a word or a bool."""
    fate = _BY_ID.get(id(answer))
    if fate is None and isinstance(answer, str):
        fate = _WORDS.get(answer)
    if fate is None:  # no TypeError: inside `a @ b`, Python would take it for one of the operator
        raise ValueError(
            f"A policy should return a CheckpointPolicy, one of {list(_WORDS)}, or True (keep) or "
            f"False (recompute), but returned {answer!r}"
        )
    return fate


def fate_named(word: Any) -> Fate:
    """The fate that a user names by its word."""
    if isinstance(word, Fate):
        return word
    if not isinstance(word, str) or word not in _WORDS:
        raise ValueError(f"A fate is one of {list(_WORDS)}, but got {word!r}")
    return _WORDS[word]
