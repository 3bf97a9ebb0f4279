"""The exceptions that end a replay which has all it needs.

Note [Forward hooks that are always called]. `nn.Module` calls forward hooks with `always_call=True`
when its forward raises an `Exception`, and not for any other `BaseException`. A replay that stops
inside a module with such a hook is ended by an `Exception`, so that the hook runs, with None for
the output, as in torch. Any other replay is ended by a `BaseException`, which the region's own
`except Exception` does not catch. If the region does catch the stop, no harm is done: all that
backward needs is there by then, and what the region saves after that belongs to no region.
"""

import sys
from typing import TYPE_CHECKING

from rekindle.regions.base import Region, current, region_code_ids
from rekindle.torch_private.module_calls import MODULE_CALL_WITH_HOOKS, has_always_called_hooks

if TYPE_CHECKING:
    from types import FrameType


class Stop(BaseException):
    """Ends a replay that has all it needs; not an Exception, so that user code lets it pass."""


class StopForHooks(Exception):  # noqa: N818
    """Ends a replay inside a module that has a hook to be called on an Exception."""


def stop_inside(region: Region | None) -> Stop | StopForHooks:
    """The exception that ends the replay of a region.

    Note [Forward hooks that are always called].
    """
    frame: FrameType | None = sys._getframe(1)
    running = current.get()
    while frame is not None:
        code = frame.f_code
        if code is MODULE_CALL_WITH_HOOKS:
            if has_always_called_hooks(frame.f_locals.get("self")):
                return StopForHooks()
        elif id(code) in region_code_ids and running is not None:
            if running.is_replay and running.region is region:
                break
            running = running.outer
        frame = frame.f_back
    return Stop()
