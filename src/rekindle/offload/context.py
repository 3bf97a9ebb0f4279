"""`rekindle.offload`: the context manager and decorator."""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, Self, TypeVar
from weakref import ref

import torch
from torch import nn

from rekindle import strategy as strategies
from rekindle.offload.offload_options import OnFull, Quota, check_folder, offload_strategy
from rekindle.offload.offloader import Offloader, living_offloaders
from rekindle.offload.owners import OffloaderSet, shared_offloader
from rekindle.offload.saved_tensors import KeptTensor, unpack
from rekindle.regions.base import is_replaying, run_under_hooks
from rekindle.strategy import TierName
from rekindle.torch_private.cuda import is_capturing
from rekindle.torch_private.dynamo_frames import break_graph, no_graph_inside
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.saved_tensor_hooks import pop_hooks, pop_hooks_to, push_hooks, top_hooks

_Function = TypeVar("_Function", bound=Callable[..., Any])


@no_graph_inside
def offload(
    *,
    tier: TierName = "host",
    quota: Quota = "auto",
    min_bytes: int | str = "1MiB",
    max_host_bytes: int | str | None = None,
    directory: str | os.PathLike[str] | None = None,
    on_full: OnFull = "keep",
    derive: bool = True,
) -> "Offload":
    """Copy activations of the forward inside to host memory or disk; backward gets them back.

    A context manager around any forward, and a decorator. Gradients are those of the plain run, bit
    for bit. What is learnt of a step, and the memory or disk set aside for it, stay for the next
    `with` of the same options: as long as this object lives, or until four others were used since.

    >>> import torch, rekindle
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    >>> with rekindle.observe() as seen:
    ...     with rekindle.offload(tier="disk", quota=1.0, min_bytes=1024):
    ...         loss = model(torch.ones(16, 64)).sum()
    ...     loss.backward()
    >>> seen.spill.tensors_out
    6

    Args:
        tier: `"host"` for pinned host memory, from CUDA devices; `"disk"` for a file without a name
            that vanishes with the process, from CUDA devices and from host memory.
        quota: how much may be offloaded. Bytes (an `int`, or `"4GiB"`), a share of what could be
            (a `float` from 0.0 to 1.0, or `"40%"`), or `"auto"`: as much as costs no time, by what
            was measured in the first two steps.
        min_bytes: smaller activations stay.
        max_host_bytes: the most pinned memory to take for each device. By default as much as
            leaves a tenth of the machine's memory free.
        directory: the folder for `tier="disk"`; by default the system's for temporary files.
        on_full: what is done with an activation that there is no room for: `"keep"` it where it
            is, with one warning, or `"raise"` an `OffloadError`.
        derive: an activation that one elementwise op gives back from others that are saved anyway
            (`silu(gate) * up`) is neither kept nor copied out, but made again.
    """
    if torch.compiler.is_compiling():
        break_graph("rekindle.offload() is made in compiled code: make it before, once")
    strategy = offload_strategy(tier, quota, min_bytes, max_host_bytes, directory, on_full, derive)
    check_folder(strategy)
    return Offload(strategy)


class _Exit:
    """The `__exit__` of a context, made anew for every `with` statement that asks for it.

    Note [A block that was left]. The statement holds its `__exit__` until the block is left, in
    whatever way. So where Ctrl-C strikes as `__exit__` begins, and nothing of it is done, the death
    of that object still tells that the block was left.
    """

    def __init__(self, leave: Callable[..., None]) -> None:
        self._leave = leave

    def __get__(self, offload: "Offload | None", _: Any = None) -> Callable[..., None]:
        if offload is None:
            return self._leave
        leave = partial(self._leave, offload)
        offload._entered.leave = ref(leave)
        return leave


class _Entry:
    """One `with` block that is running."""

    __slots__ = ("hooks", "is_hooked", "is_left", "offloader", "watch")

    def __init__(self, is_hooked: bool, offloader: Offloader | None) -> None:
        self.is_hooked = is_hooked
        self.offloader = offloader
        self.hooks = top_hooks(False)
        """The saved-tensor hooks around it."""
        self.is_left = False
        self.watch: ref[Any] | None = None
        """Note [A block that was left]."""

    def abandon(self, stack: "list[_Entry]") -> None:
        """Undo what the block began: it was left, and its end did not run."""
        self.is_left = True
        self.watch = None
        if self in stack:
            stack.remove(self)
        if self.is_hooked:
            pop_hooks_to(self.hooks)


def _left(stack: list[_Entry], entry: _Entry, _: Any) -> None:
    if not entry.is_left:
        entry.abandon(stack)


def _no_exit() -> None:
    return None


class Offload:
    """Offloads the activations of what runs inside `with`, or of the function it decorates."""

    def __init__(self, strategy: strategies.Offload, owner: OffloaderSet | None = None) -> None:
        """`owner`: the model that this is for; without one, equal arguments share an offloader."""
        self.strategy = strategy
        self._owner = owner
        self._offloader: Offloader | None = None
        """Held, so that what it learnt lives as long as this."""
        self._entered = threading.local()
        """For each thread: the blocks that run, and the `__exit__` that was asked for last."""

    @no_graph_inside
    def __enter__(self) -> Self:
        stack = self._stack
        leave = getattr(self._entered, "leave", _no_exit)()
        entry = self._entry()
        try:
            if leave is not None:
                entry.watch = ref(leave, partial(_left, stack, entry))
            stack.append(entry)
            if entry.is_hooked:
                push_hooks(entry.offloader.pack if entry.offloader else partial(KeptTensor), unpack)
        except BaseException:
            entry.abandon(stack)
            raise
        return self

    @no_graph_inside
    def _leave(self, *error: object) -> None:
        stack = self._entered.stack
        entry = stack[-1]
        del stack[-1]
        entry.is_left = True
        entry.watch = None
        if entry.is_hooked:
            pop_hooks()  # the first call of all: nothing can strike between here and the beginning
        if entry.offloader is not None:
            entry.offloader.pause(failed=error[0] is not None)

    __exit__ = _Exit(_leave)

    def _entry(self) -> "_Entry":
        if func_transform() is not None:  # autograd forbids hooks in transforms
            return _Entry(False, None)
        if is_replaying() or is_capturing():
            # What a replay saves, or a captured graph, is used at once or in place.
            return _Entry(True, None)
        owner, strategy = self._owner, self.strategy
        self._offloader = shared_offloader(strategy) if owner is None else owner.get(strategy)
        return _Entry(True, self._offloader)

    @property
    def _stack(self) -> "list[_Entry]":
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        stack: list[_Entry] = self._entered.stack
        return stack

    def __call__(self, function: _Function) -> _Function:
        if not callable(function) or isinstance(function, nn.Module):
            raise TypeError(
                f"offload() decorates a function, not {type(function).__name__}; a module's is its "
                "forward, or the code that calls it"
            )
        lazy = (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
        )
        if any(is_lazy(function) for is_lazy in lazy):
            raise TypeError(
                f"{function!r} does not run when it is called, so there is nothing to offload. "
                "Use `with rekindle.offload():` inside it."
            )

        @functools.wraps(function)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                return run_under_hooks(self, function, args, kwargs)
            with self:
                return function(*args, **kwargs)

        return offloaded  # type: ignore[return-value]

    def trim(self) -> None:
        """Give back the host memory, or the disk, that is set aside and not in use."""
        for offloader in living_offloaders():
            if offloader.strategy == self.strategy:
                offloader.trim()

    def __reduce__(self) -> tuple[type["Offload"], tuple[strategies.Offload]]:
        return Offload, (self.strategy,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offload) and other.strategy == self.strategy

    def __hash__(self) -> int:
        return hash(self.strategy)

    def __repr__(self) -> str:
        names = [field.name for field in fields(self.strategy)]
        values = {name: getattr(self.strategy, name) for name in names}
        values["quota"] = "auto" if self.strategy.quota is None else self.strategy.quota
        given = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"rekindle.offload({given})"


class keep_on_device:  # noqa: N801  (used as a function would be)
    """Context in which saved tensors stay on their device, whatever offloads around it."""

    def __init__(self) -> None:
        self._is_hooked = func_transform() is None

    def __enter__(self) -> None:
        if self._is_hooked:
            push_hooks(partial(KeptTensor), unpack)

    def __exit__(self, *error: object) -> None:
        if self._is_hooked:
            pop_hooks()
