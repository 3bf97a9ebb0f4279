"""Wrap parts of a model in place: those that a function, or a policy of FSDP's, chooses."""

from collections.abc import Callable
from typing import Any

from torch import nn

from rekindle.modules.wrappers import checkpoint_wrapper
from rekindle.torch_private.fsdp import chosen_by_wrap_policy

_Asks = Callable[[nn.Module, bool, int], bool]
"""Asked with `True` whether to look inside a module, with `False` whether to wrap it. The number
counts the elements of its parameters that are not wrapped yet."""


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Wrap those modules inside a model that `check_fn` chooses, in place; never the model itself.

    Children come before their parents, and a module that occurs in several places gets one wrapper.

    >>> import torch, rekindle
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> rekindle.apply_activation_checkpointing(
    ...     model, check_fn=lambda module: isinstance(module, torch.nn.Linear)
    ... )
    >>> [type(module).__name__ for module in model]
    ['CheckpointWrapper', 'ReLU']

    Args:
        model: what holds the modules.
        checkpoint_wrapper_fn: `checkpoint_wrapper`, `offload_wrapper`, or a `functools.partial` of
            one with options; or any function of a module that returns a module.
        check_fn: is asked for every module.
        auto_wrap_policy: in the place of `check_fn`, one of FSDP's policies, or a function that
            takes `module`, `recurse` and `nonwrapped_numel` as they do.
    """
    _refuse_wrapped(model, checkpoint_wrapper_fn)
    options: dict[nn.Module, dict[str, Any]] = {}
    if auto_wrap_policy is None:

        def asks(module: nn.Module, recurse: bool, numel: int) -> bool:  # noqa: ARG001
            return recurse or check_fn(module)

    elif callable(auto_wrap_policy):

        def asks(module: nn.Module, recurse: bool, numel: int) -> bool:
            answer = auto_wrap_policy(module=module, recurse=recurse, nonwrapped_numel=numel)
            return bool(answer)

    else:
        options = _chosen_by(auto_wrap_policy, model)

        def asks(module: nn.Module, recurse: bool, numel: int) -> bool:  # noqa: ARG001
            return recurse or module in options

    def wrap(module: nn.Module) -> nn.Module:
        wrapped = checkpoint_wrapper_fn(module, **options.get(module, {}))
        if not isinstance(wrapped, nn.Module):
            raise TypeError(
                f"checkpoint_wrapper_fn should return a module, but for {type(module).__name__} it "
                f"returned {wrapped!r}"
            )
        return wrapped

    _Pass(asks, wrap).inside(model)


class _Pass:
    """One walk over a model."""

    def __init__(self, asks: _Asks, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self._asks, self._wrap = asks, wrap
        self._done: dict[nn.Module, tuple[nn.Module, int]] = {}

    def inside(self, module: nn.Module) -> int:
        """Wrap what is inside, and say how many elements of parameters that covers."""
        made = {child: self._instead_of(child) for child in module.children()}
        for name, child in list(module._modules.items()):
            if child is not None and made[child][0] is not child:
                setattr(module, name, made[child][0])
        return sum(covered for _, covered in made.values())

    def _instead_of(self, module: nn.Module) -> tuple[nn.Module, int]:
        """The module or its wrapper, and how many elements of its parameters are wrapped."""
        if module not in self._done:
            self._done[module] = module, 0  # for a module that contains itself
            numel = sum(parameter.numel() for parameter in module.parameters())
            if self._asks(module, True, numel):
                covered = self.inside(module)
                is_chosen = self._asks(module, False, numel - covered)
                self._done[module] = (self._wrap(module), numel) if is_chosen else (module, covered)
        return self._done[module]


def _refuse_wrapped(model: nn.Module, wrapper: Any) -> None:
    """Refuse a model that has a wrapper of this class already; a function does not tell a class."""
    if not isinstance(wrapper, type):
        return
    for name, module in model.named_modules():
        if isinstance(module, wrapper):
            raise ValueError(f"{name or 'the model'} is already wrapped in a {wrapper.__name__}")


def _chosen_by(policy: Any, model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """The modules that an FSDP policy chooses, with options for each."""
    chosen = chosen_by_wrap_policy(policy, model)
    if chosen is None:
        raise ValueError(
            "auto_wrap_policy should be a function or a policy of torch.distributed.fsdp.wrap, "
            f"but got {policy!r}"
        )
    return chosen
