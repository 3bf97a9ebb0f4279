"""Modules that wrap another one, and recompute or offload its activations.

Note [Torch's wrappers and ours]: each is an instance of the other's class, by the way of abstract
base classes. FSDP asks whether a module is a wrapper before it looks inside, and so do libraries;
a model may be wrapped before `rekindle.patch_torch()` and asked under it, or the other way round.
"""

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.compile.checkpoint_call import checkpoint
from rekindle.offload.context import offload
from rekindle.torch_private.dynamo_frames import break_graph
from rekindle.torch_private.torch_wrappers import torch_wrappers as torchs

WRAPPED = "_checkpoint_wrapped_module"
PREFIX = f"{WRAPPED}."
"""The prefix that a wrapper adds to the names in the module it wraps."""

CheckpointImpl = torchs.CheckpointImpl
"""torch's own: members are compared by identity."""

_TWINS: dict[type, type] = {}
"""Torch's class for each of ours."""


class ActivationWrapper(nn.Module, ABC):
    """A module in another one's place: with its attributes, its items and its state-dict keys.

    >>> import torch, rekindle
    >>> class Doubled(rekindle.ActivationWrapper):
    ...     def forward(self, *args, **kwargs):
    ...         return 2 * self._checkpoint_wrapped_module(*args, **kwargs)
    >>> layer = Doubled(torch.nn.Linear(2, 3))
    >>> layer.out_features, list(layer.state_dict())
    (3, ['weight', 'bias'])
    """

    def __init__(self, mod: nn.Module) -> None:
        if not isinstance(mod, nn.Module):
            raise TypeError(
                f"{type(self).__name__} wraps a module, but got {type(mod).__name__}. For a "
                "function there are rekindle.checkpoint and rekindle.offload, also as decorators."
            )
        super().__init__()
        self._checkpoint_wrapped_module = mod
        self.register_state_dict_post_hook(self._post_state_dict_hook)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._pre_load_state_dict_hook)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(self._post_load_state_dict_hook)  # type: ignore[no-untyped-call]

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:  # not there yet: asked for while it is unpickled, say
                raise
            return getattr(self._checkpoint_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._checkpoint_wrapped_module[key]  # type: ignore[index]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As the wrapped module's."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace(PREFIX, ""), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As the wrapped module's."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(PREFIX, ""), buffer

    # A pickled wrapper of torch's names two of these, so they have torch's names.

    @staticmethod
    def _post_state_dict_hook(
        module: nn.Module,  # noqa: ARG004
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,  # noqa: ARG004
    ) -> None:
        _rename(state_dict, prefix + PREFIX, prefix)

    @staticmethod
    def _pre_load_state_dict_hook(
        module: nn.Module,  # noqa: ARG004
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,  # noqa: ARG004
    ) -> None:
        _rename(state_dict, prefix, prefix + PREFIX)

    @staticmethod
    def _post_load_state_dict_hook(module: nn.Module, incompatible_keys: Any) -> None:  # noqa: ARG004
        """Report missing and unexpected keys by the names that they have in a state dict."""
        for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
            keys[:] = [key.replace(PREFIX, "") for key in keys]

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return _TWINS.get(cls) in other.__mro__ or NotImplemented


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Give the keys that begin with one prefix another, in place and in order."""
    for key in [key for key in state if key.startswith(old)]:
        state[new + key.removeprefix(old)] = state.pop(key)


class CheckpointWrapper(ActivationWrapper):
    """A module whose activations are recomputed; made by `checkpoint_wrapper`."""

    def __init__(
        self,
        mod: nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        if not isinstance(checkpoint_impl, CheckpointImpl):
            raise TypeError(
                "checkpoint_impl should be CheckpointImpl.REENTRANT or CheckpointImpl.NO_REENTRANT,"
                f" but got {checkpoint_impl!r}"
            )
        super().__init__(mod)
        self.checkpoint_impl = checkpoint_impl
        self.checkpoint_fn: Callable[..., Any]
        if checkpoint_fn is None:
            is_reentrant = checkpoint_impl is CheckpointImpl.REENTRANT
            self.checkpoint_fn = partial(
                checkpoint, use_reentrant=is_reentrant, **checkpoint_fn_kwargs
            )
        else:
            self.checkpoint_fn = partial(checkpoint_fn, **checkpoint_fn_kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self._checkpoint_wrapped_module
        if kwargs and self.checkpoint_impl is CheckpointImpl.REENTRANT:
            function = _by_position(module, tuple(kwargs))
            return self.checkpoint_fn(function, *args, *kwargs.values())
        return self.checkpoint_fn(module, *args, **kwargs)


def _by_position(module: nn.Module, names: tuple[str, ...]) -> Callable[..., Any]:
    """The module as a function that takes its keyword arguments by position, after the others."""

    def positional(*values: Any) -> Any:
        count = len(values) - len(names)
        return module(*values[:count], **dict(zip(names, values[count:], strict=True)))

    positional.__qualname__ = type(module).__name__  # what errors and counts call it
    return positional


class OffloadWrapper(ActivationWrapper):
    """A module whose activations are offloaded; made by `offload_wrapper`."""

    _offload = offload(quota=1.0)

    def __init__(self, mod: nn.Module, **offload_kwargs: Any) -> None:
        super().__init__(mod)
        if offload_kwargs:
            self._offload = offload(**{"quota": 1.0} | offload_kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            break_graph("an offload wrapper offloads what the graphs inside it save")
        with self._offload:
            return self._checkpoint_wrapped_module(*args, **kwargs)


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> CheckpointWrapper:
    """Put a module in a wrapper that checkpoints every call of it.

    >>> import torch, rekindle
    >>> layer = rekindle.checkpoint_wrapper(torch.nn.Linear(2, 3), preserve_rng_state=False)
    >>> with rekindle.observe() as seen:
    ...     layer(torch.ones(4, 2)).sum().backward()
    >>> seen.total.forwards
    1

    Args:
        module: what to wrap.
        checkpoint_impl: which variant; the reentrant one takes keyword arguments too.
        checkpoint_fn: called in the place of `rekindle.checkpoint`, with the module and its
            arguments.
        **checkpoint_fn_kwargs: options of `rekindle.checkpoint`, or of `checkpoint_fn`.
    """
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def offload_wrapper(module: nn.Module, **offload_kwargs: Any) -> OffloadWrapper:
    """Put a module in a wrapper that offloads its activations, all of them by default.

    >>> import torch, rekindle
    >>> layers = rekindle.offload_wrapper(torch.nn.Sequential(torch.nn.Linear(2, 3)))
    >>> layers[0].out_features
    3

    Args:
        module: what to wrap.
        **offload_kwargs: options of `rekindle.offload`; `quota` is 1.0, that is everything that
            can go, unless it is given.
    """
    return OffloadWrapper(module, **offload_kwargs)


_PAIRS: tuple[tuple[type, ABCMeta], ...] = (
    (ActivationWrapper, torchs.ActivationWrapper),
    (CheckpointWrapper, torchs.CheckpointWrapper),
    (OffloadWrapper, torchs.OffloadWrapper),
)
for _ours, _theirs in _PAIRS:  # Note [Torch's wrappers and ours]
    _theirs.register(_ours)  # before the hook knows of it, or Python sees a cycle
    _TWINS[_ours] = _theirs
