"""What a region holds from forward to backward: the arguments it was called with.

Tensors among them, also inside lists, tuples and dicts, go through the saved-tensor hooks that were
on top when the region was called, exactly as if autograd had saved them: an enclosing region drops
and replays them, `save_on_cpu` moves them. With no hooks they are held as they are.

Note [A changed argument cannot be replayed]. A region that changes an argument in place, or whose
argument is changed afterwards, has lost what the replay would start from. The version counters
tell; the region lets go of its arguments at once (one may be part of the region's own graph by now,
and holding it would make a cycle that nothing collects), and a replay is an error that names it.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rekindle.errors import CheckpointError

_Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
)


class Inputs:
    """The arguments of one call, held for its replay."""

    __slots__ = (
        "_args",
        "_changed",
        "_kwargs",
        "_packed",
        "_tensors",
        "_versions",
        "devices",
        "generators",
    )

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: _Hooks | None) -> None:
        self._changed: int | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self.devices: set[torch.device] = set()
        self.generators: list[torch.Generator] = []
        self._args: Any = args
        self._kwargs: Any = kwargs
        self._packed = hooks is not None or bool(kwargs) or not self._all_simple(args)
        if self._packed:
            self._tensors, self._versions = [], []
            self._args = tuple([self._pack(value, hooks) for value in args])
            self._kwargs = {name: self._pack(value, hooks) for name, value in kwargs.items()}

    def _all_simple(self, args: tuple[Any, ...]) -> bool:
        """Note the tensors among the arguments; False if one of the others is worth a look."""
        for arg in args:
            if isinstance(arg, Tensor):
                self._note(arg)
            elif type(arg) not in _PLAIN:
                return False
        return True

    def _note(self, tensor: Tensor) -> None:
        self._tensors.append(tensor)
        self._versions.append(tensor._version)
        if not tensor.is_cpu:
            self.devices.add(tensor.device)

    def _pack(self, value: Any, hooks: _Hooks | None) -> Any:
        """The value as it is to be held: tensors through the hooks, containers copied."""
        if isinstance(value, Tensor):
            self._note(value)
            return value if hooks is None else _Packed(value, hooks)
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple or kind is list:
            return kind([self._pack(item, hooks) for item in value])
        if kind is dict:
            return {key: self._pack(item, hooks) for key, item in value.items()}
        if kind is torch.Generator:
            self.generators.append(value)
        elif hasattr(kind, "__next__"):
            raise TypeError(
                f"A region was called with an iterator ({kind.__name__}): a region runs twice, and "
                "an iterator can be read once. Pass a list or a tuple."
            )
        return value

    def tensors(self) -> Iterator[Tensor]:
        """The tensors among the arguments; until `close`."""
        return iter(self._tensors)

    def close(self, hooked: bool) -> None:
        """The forward has ended: hold no more than a replay needs."""
        self._look_for_change()
        if self._changed is not None:
            self._args = self._kwargs = None
        if self._changed is not None or hooked:
            self._tensors = []

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they were, in fresh containers."""
        self._look_for_change()
        if self._changed is not None:
            raise CheckpointError(
                f"Tensor argument {self._changed + 1} of a region was changed in place after the "
                "region was called with it, so there is nothing left to replay the region from.\n"
                "Likely cause: an in-place op (`x += …`, `relu_`, `inplace=True`) on the argument, "
                "inside the region or between its call and backward.\n"
                "Try: the out-of-place form of that op, or pass `x.clone()`."
            )
        if not self._packed:
            return self._args, self._kwargs
        return _unpack(self._args), _unpack(self._kwargs)

    def _look_for_change(self) -> None:
        """Note [A changed argument cannot be replayed]."""
        for i, tensor in enumerate(self._tensors):
            if tensor._version != self._versions[i]:
                self._changed = i


class _Packed:
    """A tensor argument in the keeping of somebody's saved-tensor hooks."""

    __slots__ = ("_held", "_hook")

    def __init__(self, tensor: Tensor, hooks: _Hooks) -> None:
        self._hook = hooks[1]
        with torch.no_grad():
            self._held = hooks[0](tensor)

    def get(self) -> Tensor:
        return self._hook(self._held)


def _unpack(value: Any) -> Any:
    kind = type(value)
    if kind is _Packed:
        return value.get()
    if kind is tuple or kind is list:
        return kind([_unpack(item) for item in value])
    if kind is dict:
        return {key: _unpack(item) for key, item in value.items()}
    return value
