"""Has a compilation run our passes over its pair of graphs, forward and backward.

They run where torch's own pass for offload does, which is off by default. No public form; tried on
torch 2.11 and 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_patches: list[Any] = []
"""What is changed while something is compiled."""


def run_our_passes() -> None:
    """Have the compilation that is going on run our passes, and then torch's if it is on.

    Dynamo calls this as a constant while it traces.
    """
    from torch._dynamo.callback import callback_handler  # noqa: PLC0415
    from torch._functorch import config  # noqa: PLC0415
    from torch._functorch._activation_offloading import (  # noqa: PLC0415
        activation_offloading as torchs,
    )

    if _patches or torch._guards.CompileContext.try_get() is None:
        return
    torchs_pass = torchs.enable_activation_offloading
    is_on = config.enable_activation_offloading

    def all_passes(forward: Any, backward: Any, outputs: int, *others: Any) -> None:
        from rekindle.compile.changed_inputs import save_changed_inputs  # noqa: PLC0415
        from rekindle.compile.graph_offload import offload_marked  # noqa: PLC0415 (it brings ops)

        save_changed_inputs(forward, backward, outputs)
        offload_marked(forward, backward, outputs)
        if is_on:
            torchs_pass(forward, backward, outputs, *others)

    for patch in (
        config.patch(enable_activation_offloading=True),
        _replaced(torchs, "enable_activation_offloading", all_passes),
    ):
        patch.__enter__()
        _patches.append(patch)
    if _put_back not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_put_back)


setattr(run_our_passes, "_dynamo_marked_constant", True)  # noqa: B010 (mypy knows no such name)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    was = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, was)


def _put_back(_: Any) -> None:
    while _patches:
        _patches.pop().__exit__(None, None, None)
