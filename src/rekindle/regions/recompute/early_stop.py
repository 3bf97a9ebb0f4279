"""The exceptions that end a replay which has all it needs.

Note [Forward hooks that are always called]. `nn.Module` calls forward hooks with `always_call=True`
when its forward raises an `Exception`, and not for any other `BaseException`. A replay that stops
inside a module with such a hook is ended by an `Exception`, so that the hook runs, with None for
the output, as in torch. Any other replay is ended by a `BaseException`, which the region's own
`except Exception` does not catch. If the region does catch the stop, no harm is done: all that
backward needs is there by then, and what the region runs after that is nobody's.
"""

import sys
from types import CodeType, FrameType

from rekindle.torch_private.module_calls import MODULE_CALL_WITH_HOOKS, has_always_called_hooks


class Stop(BaseException):
    """Ends a replay that has all it needs; not an Exception, so that user code lets it pass."""


class StopForHooks(Exception):  # noqa: N818
    """Ends a replay inside a module that has a hook to be called on an Exception."""


def stop_inside(replay: CodeType) -> Stop | StopForHooks:
    """The exception to stop with; `replay` is the code that runs the region again.

    Note [Forward hooks that are always called].
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not replay:
        if frame.f_code is MODULE_CALL_WITH_HOOKS and has_always_called_hooks(
            frame.f_locals.get("self")
        ):
            return StopForHooks()
        frame = frame.f_back
    return Stop()
