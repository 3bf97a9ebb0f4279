"""The ways in which users write a strategy, read into `rekindle.strategy` values."""

from difflib import get_close_matches
from typing import Any, TypeAlias

from rekindle.offload.context import Offload as OffloadContext
from rekindle.offload.offload_options import check_folder
from rekindle.policies import Policy
from rekindle.strategy import (
    Keep,
    NumberedOps,
    Offload,
    PlannedOps,
    Recompute,
    Rows,
    Selective,
    Strategy,
)

Spelling: TypeAlias = Strategy | str | Policy | OffloadContext
"""A strategy, one of the words below, a policy, or `rekindle.offload(...)`."""

_WORDS: dict[str, Strategy] = {
    "keep": Keep(),
    "recompute": Recompute(),
    "offload": Offload(tier="host", quota=1.0),
    "spill": Offload(tier="disk", quota=1.0),
    "rows": Rows(),
}


def strategy_of(spelling: Any) -> Strategy:
    """The strategy that a user means.

    >>> import rekindle
    >>> strategy_of("spill")
    Offload(tier='disk', quota=1.0)
    >>> strategy_of(rekindle.policies.keep("aten::mm"))
    Selective(policy=keep('aten::mm'))
    """
    if isinstance(spelling, str):
        if spelling not in _WORDS:
            near = get_close_matches(spelling, _WORDS, n=1)
            meant = f": {near[0]!r}, perhaps?" if near else ""
            raise ValueError(f"A strategy is one of {list(_WORDS)}, but got {spelling!r}{meant}")
        spelling = _WORDS[spelling]
    if isinstance(spelling, Strategy):
        if isinstance(spelling, Offload):
            check_folder(spelling)
        return spelling
    if isinstance(spelling, Policy | PlannedOps | NumberedOps):
        return Selective(spelling)
    if isinstance(spelling, OffloadContext):
        return spelling.strategy
    raise TypeError(
        "A module is given a strategy (keep, recompute, offload, spill, rows), a policy or "
        f"rekindle.offload(...), but got {type(spelling).__name__}"
    )
