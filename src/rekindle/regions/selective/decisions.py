"""Decisions: what a policy may say of an op's result, and the ways in which users write it."""

from enum import Enum
from typing import Any

from rekindle.strategy import TierName
from rekindle.torch_private.torch_checkpoint import CheckpointPolicy


class Decision(Enum):
    """An outcome for one activation between forward and backward: the answer of a policy."""

    KEEP = "keep"
    PREFER_KEEP = "keep unless a compiler finds it cheap to make again"
    """Only in compiled code, where the partitioner decides; elsewhere it is `KEEP`."""
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    """Copied to host memory, all of it, even if the device has to wait for that."""
    OFFLOAD_FREELY = "offload as much as costs no time"
    OFFLOAD_AS_PLANNED = "offload as planned"
    """Copied to host memory as soon as it is made: the plan found time for it."""
    SPILL = "spill"
    """Copied to disk."""
    SPILL_AS_PLANNED = "spill as planned"
    """As `OFFLOAD_AS_PLANNED`, to disk."""


AS_PLANNED: dict[TierName, Decision] = {
    "host": Decision.OFFLOAD_AS_PLANNED,
    "disk": Decision.SPILL_AS_PLANNED,
}
"""The decisions of a plan for results that it copies to a tier, by the tier's name."""

_ANSWERS: dict[Any, Decision] = {  # what else is equal to True is not among them
    True: Decision.KEEP,
    False: Decision.RECOMPUTE,
    CheckpointPolicy.MUST_SAVE: Decision.KEEP,
    CheckpointPolicy.PREFER_SAVE: Decision.KEEP,
    CheckpointPolicy.MUST_RECOMPUTE: Decision.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Decision.RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: Decision.OFFLOAD,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: Decision.OFFLOAD_FREELY,
} | {decision: decision for decision in Decision}
_WORDS = {
    decision.value: decision
    for decision in (Decision.KEEP, Decision.RECOMPUTE, Decision.OFFLOAD, Decision.SPILL)
}

_BY_ID = {id(answer): decision for answer, decision in _ANSWERS.items()}
"""Decisions by the identity of the answer, of which there is one each: enums are slow to hash."""

FOR_TORCH = {
    Decision.KEEP: CheckpointPolicy.MUST_SAVE,
    Decision.PREFER_KEEP: CheckpointPolicy.PREFER_SAVE,
    Decision.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
    Decision.OFFLOAD: CheckpointPolicy.MUST_CPU_OFFLOAD,
    Decision.OFFLOAD_FREELY: CheckpointPolicy.PREFER_CPU_OFFLOAD,
    Decision.OFFLOAD_AS_PLANNED: CheckpointPolicy.MUST_CPU_OFFLOAD,
    Decision.SPILL: CheckpointPolicy.MUST_CPU_OFFLOAD,
    Decision.SPILL_AS_PLANNED: CheckpointPolicy.MUST_CPU_OFFLOAD,
}
"""Decisions as torch's own engines read them; those know no disk."""


def decision_of(answer: Any) -> Decision:
    """The decision that a policy's answer stands for: a `CheckpointPolicy`, a word or a bool."""
    decision = _BY_ID.get(id(answer))
    if decision is None and isinstance(answer, str):
        decision = _WORDS.get(answer)
    if decision is None:  # no TypeError: inside `a @ b` Python would take it for the operator's own
        raise ValueError(
            f"A policy should return a CheckpointPolicy, one of {list(_WORDS)}, or True (keep) or "
            f"False (recompute), but returned {answer!r}"
        )
    return decision


def decision_named(word: Any) -> Decision:
    """The decision that a user names by its word, such as `"keep"`."""
    if isinstance(word, Decision):
        return word
    if not isinstance(word, str) or word not in _WORDS:
        raise ValueError(f"Expected one of {list(_WORDS)}, but got {word!r}")
    return _WORDS[word]
