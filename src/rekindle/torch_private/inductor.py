"""Code that inductor has written, as it is found in this process."""

import operator
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

_WRITER = "torch._inductor.runtime.compile_tasks"


inductor_has_written: Callable[[], bool] = partial(operator.contains, sys.modules, _WRITER)
"""True if this process has loaded code that inductor wrote, or can load some.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""


def is_written_by_inductor(frame: FrameType) -> bool:
    """True if a frame runs code that inductor wrote: its module's name begins with its writer's.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return str(frame.f_globals.get("__name__")).startswith(_WRITER)


def dynamo_is_loaded() -> bool:
    """True if something may have been compiled: `torch.compile` imports Dynamo.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return "torch._dynamo" in sys.modules
