"""What becomes of an op's result, and the ways people say it."""

from enum import Enum
from typing import Any

from rekindle.compiled.handover import CheckpointPolicy


class Fate(Enum):
    """What becomes of an activation between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    """To host memory, all of it, whether or not the device has to wait for it."""
    OFFLOAD_FREELY = "offload as much as costs no time"
    SPILL = "spill"
    """To disk."""


_ANSWERS: dict[Any, Fate] = {
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

FOR_TORCH = {
    Fate.KEEP: CheckpointPolicy.MUST_SAVE,
    Fate.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
    Fate.OFFLOAD: CheckpointPolicy.MUST_CPU_OFFLOAD,
    Fate.OFFLOAD_FREELY: CheckpointPolicy.PREFER_CPU_OFFLOAD,
    Fate.SPILL: CheckpointPolicy.MUST_CPU_OFFLOAD,
}
"""In torch's words, for its own engines; they know no disk."""


def fate_of(answer: Any) -> Fate:
    """The fate that a policy's answer stands for: a `CheckpointPolicy`, a word or a bool."""
    try:
        fate = _ANSWERS.get(answer) or _WORDS.get(answer)
    except TypeError:  # it cannot even be looked up
        fate = None
    if fate is None or isinstance(answer, int | float) is not isinstance(answer, bool):
        raise TypeError(
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
