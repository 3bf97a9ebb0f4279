"""Regions that a model runs by torch's own checkpoint: no plan decides what they recompute."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from rekindle.modules.unwrapping import class_name
from rekindle.planner.ranks.rank_sync import is_first_rank
from rekindle.regions.errors import call_sites
from rekindle.torch_private.torch_checkpoint import watched_torch_checkpoints

_log = logging.getLogger("rekindle")


@contextmanager
def own_checkpoints_said(model: nn.Module) -> Iterator[None]:
    """Log a warning at the end, with the lines, if the model runs torch's checkpoint meanwhile."""
    sites: set[call_sites.RawSite] = set()
    with watched_torch_checkpoints(lambda: sites.add(call_sites.record())):
        yield
    lines = sorted({f"{site.file}:{site.line}" for site in map(call_sites.look_up, sites)})
    if lines and is_first_rank():
        _log.warning(
            "%s runs torch's checkpoint itself, at %s: what that recomputes is recomputed under "
            "every plan. Without it, the plan decides; in transformers, gradient_checkpointing_"
            "disable() takes it out",
            class_name(model),
            ", ".join(lines),
        )
