"""The arguments of a region's call, which it holds from forward to backward.

Tensors among them, also inside lists, tuples and dicts, go through the saved-tensor hooks that were
on top when the region was called, exactly as if autograd had saved them: an enclosing region drops
and replays them, `save_on_cpu` moves them. With no hooks they are held as they are.

Note [A changed argument cannot be replayed]. A region that changes an argument in place, or whose
argument is changed afterwards, has lost what the replay would start from. The version counters
tell; the region lets go of its arguments at once (one may be part of the region's own graph by now,
and holding it would make a cycle that nothing collects), and a replay is an error that names it.

Objects that hold state, such as a cache that the region fills, are in the replay what they were
before the forward: Note [Objects among the arguments] in object_state.py.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rekindle.regions.recompute.call_state import Bound, CallState, bound_state, name_of
from rekindle.regions.recompute.containers import Hooks, hand_tensors
from rekindle.regions.recompute.packing import Packing
from rekindle.regions.recompute.random_generators import PLAIN
from rekindle.regions.recompute.unpacking import Rebuilding, paths_of_tensors
from rekindle.torch_private.autograd_graph import tensor_hooks
from rekindle.torch_private.version_counters import counter_owner, version_of

_NO_DEVICES: frozenset[torch.device] = frozenset()


class Inputs:
    """The arguments of one call of a region, held for its replay."""

    __slots__ = (
        "_args",
        "_changed",
        "_hooks",
        "_kwargs",
        "_shifts",
        "_simple",
        "_tensors",
        "_versions",
        "_wanted",
        "devices",
        "function",
        "state",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hooks: Hooks | None,
        keep_graphs: bool = False,
    ) -> None:
        self._changed: str | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._wanted: list[bool] = []
        """Which tensors required a gradient, in the order in which they are met."""
        self.devices: frozenset[torch.device] = _NO_DEVICES
        self.function = function
        """The function to run: that in a partial, if the partial brings objects with it."""
        self._args: Any = args
        self._kwargs: Any = kwargs
        self._hooks: Sequence[int] = ()
        """How many hooks each tensor has when the forward has ended."""
        self._shifts: Sequence[tuple[Tensor, int]] = ()
        """Tensors that hooks gave back for this replay, and how far their versions are behind."""
        self.state: CallState | None = None
        """Objects that the region may write to, if there are any among the arguments."""
        bound = bound_state(function) if type(function) is functools.partial else None
        self._simple = not kwargs and hooks is None and bound is None and self._all_simple(args)
        if not self._simple:
            self._tensors, self._versions, self._wanted = [], [], []
            self._pack(hooks, bound, keep_graphs)

    def _pack(self, hooks: Hooks | None, bound: Bound | None, keep_graphs: bool) -> None:
        """Take the arguments apart, for holding."""
        args, kwargs = self._args, self._kwargs
        if bound is not None:
            self.function = bound.function
            args, kwargs = (*bound.args, *args), bound.kwargs | kwargs
        packing = Packing(hooks, self._note, self.function, (args, kwargs), keep_graphs)
        self._args = packing.pack(self._args)
        self._kwargs = packing.pack(self._kwargs)
        packed = None if bound is None else packing.pack_bound(bound.args, bound.kwargs)
        if packed is not None or packing.objects or packing.left_alone:
            self.state = CallState(self.function, packing, packed)
            self.devices |= packing.devices

    def _all_simple(self, args: tuple[Any, ...]) -> bool:
        """Note the tensors among the arguments; False if there is more to look at."""
        for arg in args:
            if isinstance(arg, Tensor):
                self._tensors.append(arg)
                self._versions.append(version_of(arg))
                self._wanted.append(arg.requires_grad)
                if not arg.is_cpu:
                    self.devices |= {arg.device}
            elif type(arg) not in PLAIN:
                return False
        return len(self._tensors) < 2 or len(set(map(id, self._tensors))) == len(self._tensors)

    def _note(self, tensor: Tensor) -> None:
        self._tensors.append(tensor)
        self._versions.append(version_of(tensor))
        self._wanted.append(tensor.requires_grad)
        if not tensor.is_cpu:
            self.devices |= {tensor.device}

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments; until `close`, if hooks keep them."""
        return self._tensors

    def hand_to(self, hooks: Hooks) -> None:
        """Hand the tensors to hooks that were not asked when the region was called."""
        self._args, self._kwargs = hand_tensors((self._args, self._kwargs), hooks, {})
        self._simple = False

    def close(self, hooked: bool) -> None:
        """The forward has ended: hold no more than a replay needs."""
        if self.changed() is not None:
            self._args = self._kwargs = None
            self._tensors = []
        elif hooked:
            self._tensors = []
        tensors = self._tensors
        if tensors:
            self._hooks = [len(tensor_hooks(t) or ()) for t in tensors]
        if self.state is not None:
            self.state.close()

    def changed(self) -> str | None:
        """Number and name of a tensor argument that was changed in place since the call, or None.

        Note [A changed argument cannot be replayed].
        """
        for i, version in enumerate(self._versions if self._tensors else ()):
            if version >= 0 and self._tensors[i]._version != version:
                self._changed = f"{i + 1} ({self._name_of_tensor(i)})"
        return self._changed

    def _name_of_tensor(self, index: int) -> str:
        bound = self.state.bound if self.state is not None else None
        paths = paths_of_tensors(self._args, self._kwargs, 0 if bound is None else len(bound[0]))
        return name_of(next(islice(paths, index, None)), self.function)

    def again(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments as they were, containers new."""
        if self._simple and self._wanted == [tensor.requires_grad for tensor in self._tensors]:
            return self.function, self._args, self._kwargs
        fresh = Rebuilding(iter(self._wanted), iter(self._versions), self.state)
        self._shifts = fresh.shifts
        args, kwargs = fresh.of(self._args), fresh.of(self._kwargs)
        if self.state is None or self.state.bound is None:
            return self.function, args, kwargs
        bound_args, bound_kwargs = fresh.of(self.state.bound)
        return self.function, (*bound_args, *args), bound_kwargs | kwargs

    def version_as_called(self, tensor: Tensor, version: int) -> int:
        """The version that what a replay saved would have, had it begun with the call's arguments.

        Hooks that copy, as `save_on_cpu` does, give an argument back at version 0, whatever it was.
        """
        owner = counter_owner(tensor)
        return version + next((shift for x, shift in self._shifts if x is owner), 0)

    def forget_replay(self) -> None:
        """Let go of the arguments that hooks gave back."""
        self._shifts = ()

    def note_on(self, error: BaseException) -> None:
        """Add a note to an error of a replay that names arguments which may have caused it."""
        if self.state is not None:
            self.state.note_on(error)

    def take_off_hooks(self) -> None:
        """A hook that a region puts on an argument is there already: the replay's goes."""
        for tensor, count in zip(self._tensors, self._hooks, strict=False):
            hooks = tensor_hooks(tensor)
            while hooks and len(hooks) > count:
                hooks.popitem()
