"""The front door: `rekindle.offload`."""

import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from rekindle.offload.activation import Kept, Saved, may_move, unpack
from rekindle.offload.device_offloader import Lane
from rekindle.offload.offload_options import OnFull, Options, Quota, TierName, options_of
from rekindle.offload.tiers.disk import DiskTier
from rekindle.offload.tiers.host import HostTier
from rekindle.offload.tiers.staged import StagedDiskTier
from rekindle.regions.base import is_replaying
from rekindle.torch_private.cuda import capturing
from rekindle.torch_private.dispatch_modes import is_traced
from rekindle.torch_private.dynamo_frames import break_graph, no_graph_inside, not_compiled
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
    """Send activations of the forward inside to host memory or disk; backward gets them back.

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
        quota: how much may go. Bytes (an `int`, or `"4GiB"`), a share of what could go (a `float`
            from 0.0 to 1.0, or `"40%"`), or `"auto"`: as much as costs no time, by what was
            measured in the first two steps.
        min_bytes: smaller activations stay.
        max_host_bytes: the most pinned memory to take for each device. By default as much as
            leaves a tenth of the machine's memory free.
        directory: the folder for `tier="disk"`; by default the system's for temporary files.
        on_full: what becomes of an activation for which there is no room: `"keep"` it where it is,
            with one warning, or `"raise"` an `OffloadError`.
        derive: an activation that one elementwise op gives back from others that are saved anyway
            (`silu(gate) * up`) is neither kept nor sent, but made again.
    """
    if torch.compiler.is_compiling():
        break_graph("rekindle.offload() is made in compiled code: make it before, once")
    return Offload(options_of(tier, quota, min_bytes, max_host_bytes, directory, on_full, derive))


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

    __slots__ = ("engine", "hooks", "is_hooked", "is_left", "watch")

    def __init__(self, is_hooked: bool, engine: "Engine | None") -> None:
        self.is_hooked = is_hooked
        self.engine = engine
        self.hooks = top_hooks(False)
        """The saved-tensor hooks around it."""
        self.is_left = False
        self.watch: ref[Any] | None = None
        """Note [A block that was left]."""

    def abandon(self, stack: "list[_Entry]") -> None:
        """The block was left, and its end did not run."""
        self.is_left = True
        self.watch = None
        if self in stack:
            stack.remove(self)
        if self.is_hooked:
            pop_hooks_to(self.hooks)


def _left(stack: list[_Entry], entry: _Entry, _: Any) -> None:
    if not entry.is_left:
        entry.abandon(stack)


def _nobody() -> None:
    return None


class Offload:
    """Offloads the activations of what runs inside `with`, or of the function it decorates."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._engine: Engine | None = None
        """Held, so that what it learnt lives as long as this."""
        self._entered = threading.local()
        """Of each thread: the blocks that run, and the `__exit__` that was asked for last."""

    @no_graph_inside
    def __enter__(self) -> Self:
        stack = self._stack
        leave = getattr(self._entered, "leave", _nobody)()
        entry = self._entry()
        try:
            if leave is not None:
                entry.watch = ref(leave, partial(_left, stack, entry))
            stack.append(entry)
            if entry.is_hooked:
                push_hooks(entry.engine.pack if entry.engine else partial(Kept), unpack)
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
        if entry.engine is not None:
            entry.engine.pause(failed=error[0] is not None)

    __exit__ = _Exit(_leave)

    def _entry(self) -> "_Entry":
        if func_transform() is not None:  # autograd forbids hooks in transforms
            return _Entry(False, None)
        if is_replaying() or capturing():
            # What a replay saves, or a captured graph, is used at once or in place.
            return _Entry(True, None)
        self._engine = _engine_for(self.options)
        return _Entry(True, self._engine)

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
            with self:
                return function(*args, **kwargs)

        return offloaded  # type: ignore[return-value]

    def trim(self) -> None:
        """Give back the host memory, or the disk, that is set aside and not in use."""
        engine = _engines.get((os.getpid(), self.options))
        if engine is not None:
            engine.trim()

    def __reduce__(self) -> tuple[type["Offload"], tuple[Options]]:
        return Offload, (self.options,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offload) and other.options == self.options

    def __hash__(self) -> int:
        return hash(self.options)

    def __repr__(self) -> str:
        values = {
            **asdict(self.options),
            "quota": "auto" if self.options.quota is None else self.options.quota,
        }
        del values["is_share"], values["hurries"]
        given = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"rekindle.offload({given})"


class kept:  # noqa: N801  (used as a function would be)
    """Inside, activations stay where they are, whatever offloads around."""

    def __init__(self) -> None:
        self._is_hooked = func_transform() is None

    def __enter__(self) -> None:
        if self._is_hooked:
            push_hooks(partial(Kept), unpack)

    def __exit__(self, *error: object) -> None:
        if self._is_hooked:
            pop_hooks()


class Engine:
    """One lane for each device, under one set of options."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._process = os.getpid()
        self._lanes: dict[torch.device, Lane | None] = {}
        self._lock = threading.Lock()

    @not_compiled
    def pack(self, x: Tensor, is_ours: bool = False) -> Saved | Kept:
        """What autograd gets in place of a tensor that it saves.

        Ours: whoever saves it says that nobody else holds it, or is going to.
        """
        if is_traced():  # the graph is made of tensors, not of their bytes
            return Kept(x)
        if may_move(x, self._options.min_bytes) and os.getpid() == self._process:
            device = x.device
            lane = self._lanes.get(device)
            if lane is None and device not in self._lanes:
                with self._lock:
                    lane = self._lanes.setdefault(device, self._lane_for(device))
            if lane is not None:
                return lane.save(x, is_ours)
        return Kept(x)

    def pause(self, failed: bool) -> None:
        for lane in list(self._lanes.values()):
            if lane is not None:
                lane.pause(failed)

    def begin_backward(self) -> None:
        for lane in list(self._lanes.values()):
            if lane is not None:
                lane.begin_backward()

    def trim(self) -> None:
        for lane in list(self._lanes.values()):
            if lane is not None:
                lane.trim()

    def _lane_for(self, device: torch.device) -> Lane | None:
        """The lane of a device, if there is a way from it to the tier."""
        directory, max_bytes = self._options.directory, self._options.max_host_bytes
        if device.type == "cuda" and directory is None:
            return Lane(device, self._options, HostTier(device, max_bytes))
        if device.type == "cuda" and directory is not None:
            return Lane(device, self._options, StagedDiskTier(device, directory, max_bytes))
        if device.type == "cpu" and directory is not None:
            return Lane(device, self._options, DiskTier(directory))
        return None


_RECENT = 4
"""How many engines live on when no `Offload` holds them."""
_engines: WeakValueDictionary[tuple[int, Options], Engine] = WeakValueDictionary()
"""The engines of this process: a forked one begins anew, without the threads of its parent."""
_recent: deque[Engine] = deque(maxlen=_RECENT)


def engine_of(options: Options) -> Engine:
    """The engine for a set of options, with what it learnt so far, while anybody holds it."""
    engine = _engines.get((os.getpid(), options))
    if engine is None:
        engine = _engines.setdefault((os.getpid(), options), Engine(options))
    return engine


def _engine_for(options: Options) -> Engine:
    """The same, held for a while: a training loop may make an `Offload` of them every step."""
    engine = engine_of(options)
    if not _recent or _recent[-1] is not engine:
        with _using:
            others = [other for other in _recent if other is not engine]
            _recent.extend((*others, engine))  # which lets go of as many at the other end
    return engine


_using = threading.Lock()


def living_engines() -> list[Engine]:
    """The engines that there are now."""
    return list(_engines.values())
