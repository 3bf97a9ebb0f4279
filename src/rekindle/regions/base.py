"""The contract of regions: what each kind of region does around its forward and its replay.

A kind of region is a subclass of `Region`. It says what autograd gets in place of a tensor that it
saves (`pack`), how it gets the tensor back (`unpack`), and what happens when the forward ends
(`end_forward`). `run_region` runs a forward: it pushes the saved-tensor hooks, makes the region the
current one, and leaves nothing behind whatever interrupts it.

Note [The current region]. `current` is a context variable: the innermost forward or replay that
runs on this thread, linked to the one around it. On Python's stack, each link of this chain is one
frame of a function marked with `runs_region`; recompute/early_stop.py walks the two together.
Autograd's own threads start with none.

Note [Who locks what]. A region has one reentrant lock. A thread holds it while it replays the
region or touches what a replay made; never while it runs a forward. Releasing what was replayed
does not wait for the lock: another thread that replays the region needs the activations, and
releases them itself. Waiting for that thread could deadlock, if it waits for a region that this
thread replays.
"""

from _thread import RLock
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from rekindle import observation
from rekindle.module_attachment import annotate_oom
from rekindle.regions.backward_cleanup import empty_when_backward_ends, empty_when_group_dies
from rekindle.torch_private.autograd_graph import exec_group, graph_task_id
from rekindle.torch_private.dispatch_modes import dispatch_state, set_dispatch_state
from rekindle.torch_private.dynamo_frames import no_graph_begins
from rekindle.torch_private.saved_tensor_hooks import pop_hooks, pop_hooks_to, push_hooks, top_hooks

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class RunningRegion:
    """One forward or replay that runs on this thread. Note [The current region]."""

    __slots__ = ("_region", "in_replay", "is_replay", "outer")

    def __init__(
        self, region: "Region | None", outer: "RunningRegion | None", is_replay: bool = False
    ) -> None:
        self._region = None if region is None else ref(region)
        self.outer = outer
        """The forward or replay around it."""
        self.is_replay = is_replay
        self.in_replay: bool = is_replay or (outer is not None and outer.in_replay)
        """True if it is a replay, or runs inside one."""

    @property
    def region(self) -> "Region | None":
        """The region; None if it is gone, or has no object of its own (the reentrant variant)."""
        return None if self._region is None else self._region()


current: ContextVar[RunningRegion | None] = ContextVar("rekindle_current_region", default=None)
"""The innermost forward or replay that runs on this thread."""

region_code_ids: set[int] = set()
"""Ids of the code of functions that run a region: each of their frames on the stack is one
`RunningRegion`. Ids, because to hash code is to hash all its constants."""


def runs_region(function: _Function) -> _Function:
    """Mark a function that sets `current` once and then calls a region's function."""
    region_code_ids.add(id(function.__code__))
    return function


def is_replaying() -> bool:
    """Returns whether this code runs in a replay."""
    running = current.get()
    return running is not None and running.in_replay


class Region:
    """One call of a function whose saved tensors are managed; entered around its forward.

    It lives as long as autograd holds something that `pack` returned.
    """

    watch: observation.Watch | None = None
    """Counts what the region does, if somebody observed when its forward began."""
    path: "tuple[str, ref[nn.Module]] | None" = None
    """Path and module around the forward, if a policy asked for a module's path."""
    has_one_output = False
    """True if the forward returned one tensor: a backward of the whole graph is then taken to run
    every node of the region."""

    unpack: Callable[[Any], Tensor]
    """Saved-tensor hook: the tensor that `pack` took. A static method, or implemented in C."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.lock = RLock()
        """Note [Who locks what]."""

    def pack(self, x: Tensor) -> Any:
        """Saved-tensor hook: what autograd holds in place of a tensor."""
        raise NotImplementedError

    def __enter__(self) -> None:
        push_hooks(self.pack, self.unpack)

    def __exit__(self, *error: object) -> None:
        pop_hooks()
        self.end_forward(failed=error[0] is not None)

    def end_forward(self, failed: bool) -> None:
        """Hold what backward needs, and nothing else: the forward is over."""

    def abandon(self) -> None:
        """Undo what the forward began: it failed, and `end_forward` may not have run."""

    def count_forward(self, inputs: Iterable[Tensor] = (), held: bool = True) -> None:
        """Report the forward to those who observe; its inputs are held by it, or by one around."""
        if observation.active and not is_replaying():
            self.watch = observation.Watch(self.function)
            self.watch.ran(inputs, held)

    def with_oom_note(self, replay: Callable[..., _T], *args: Any) -> _T:
        """Call a function that replays; an out-of-memory error gets a note from the plan."""
        try:
            return replay(*args)
        except torch.OutOfMemoryError as error:
            annotate_oom(error, self.function)
            raise

    def empty(self) -> None:
        """Release every replayed activation that nobody asked for. Note [Who locks what]."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            self.release()
        finally:
            self.lock.release()

    def release(self) -> None:
        """Let go of what replays made; called with the lock taken."""

    def empty_when_unshared(self) -> None:
        """Have the region emptied when nobody shares a replay any more; outside a backward, now."""
        if graph_task_id() == -1:
            self.empty()
            return
        group = exec_group()
        if group is None:
            empty_when_backward_ends(self)
        else:
            empty_when_group_dies(group, self)


Sharing = tuple[str, int]
"""Identifies what shares a replay: "backward" with its task, or "group" with the group's id."""


def replay_is_shared_by() -> Sharing | None:
    """Identifies the backward, or the exec group, that shares a replay; None outside a backward."""
    task = graph_task_id()
    if task == -1:
        return None
    group = exec_group()
    return ("backward", task) if group is None else ("group", id(group))


@runs_region
@no_graph_begins
def run_region(
    region: Region,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the forward of a region, and return what it returns."""
    hooks, modes, outer = top_hooks(False), dispatch_state(), current.get()
    try:
        current.set(RunningRegion(region, outer))
        with region:
            out = function(*args, **kwargs)
        current.set(outer)
    except BaseException:  # Note [Put back as often as asked] in torch_state.py
        current.set(outer)
        pop_hooks_to(hooks)
        set_dispatch_state(modes)
        region.abandon()
        raise
    if isinstance(out, Tensor):
        region.has_one_output = True
    return out


@no_graph_begins
def run_under_hooks(
    context: AbstractContextManager[Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function in a context that pushes saved-tensor hooks and is no region."""
    hooks = top_hooks(False)
    try:
        with context:
            return function(*args, **kwargs)
    except BaseException:  # Note [Put back as often as asked] in torch_state.py
        pop_hooks_to(hooks)
        raise
