"""State of torch that a replay changes, read before it is changed and put back after.

Note [Put back as often as asked]. Ctrl-C may strike anywhere, also while state is being put back.
So state is read first, whole; it is changed by setting it, never by entering contexts of which only
their own end would know the way back; and it is put back by setting it, which does no harm when it
is done twice. Whoever changes it does so as follows, and then one interrupt can leave nothing
behind:

    before = TorchState()
    try:
        ...  # change it, and run what needs it changed
        before.put_back()
    except BaseException:
        before.put_back()
        raise

Contexts whose `__enter__` and `__exit__` are functions of C are as good, in a `with` statement.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rekindle.regions.base import current
from rekindle.regions.recompute import ambient
from rekindle.torch_private.autocast import autocast_level, set_autocast_level
from rekindle.torch_private.cuda import cuda_in_use
from rekindle.torch_private.dispatch_modes import dispatch_state, set_dispatch_state
from rekindle.torch_private.func_transforms import (
    LeftTransforms,
    func_transform,
    old_vmap_level,
    set_old_vmap_level,
)
from rekindle.torch_private.grad_mode import grad_enabled, set_grad_enabled
from rekindle.torch_private.kernel_switches import set_attention_order
from rekindle.torch_private.saved_tensor_hooks import pop_hooks_to, top_hooks
from rekindle.torch_private.torch_function import (
    default_device_mode_state,
    entered_function_modes,
    set_default_device_mode_state,
    set_function_modes,
    set_torch_function_state,
    torch_function_state,
)


class TorchState:
    """State of torch that is around a replay now. Note [Put back as often as asked]."""

    def __init__(self) -> None:
        self._hooks = top_hooks(False)
        self._running = current.get()
        self._grad = grad_enabled()
        self._dispatch = dispatch_state()
        self._function_modes = entered_function_modes()
        self._function_state = torch_function_state()
        self._device = default_device_mode_state()
        self._vmap_level = old_vmap_level()
        self._transforms = None if func_transform() is None else LeftTransforms()
        self._autocast_level = autocast_level()
        self._casts = ambient.casts()
        self._ambient = ambient.snapshot()

    def leave_transforms(self) -> None:
        """Leave `torch.func` and vmap: a batched backward runs there, its forward did not."""
        if self._transforms is not None:
            self._transforms.leave()
        if self._vmap_level:
            set_old_vmap_level(0)

    def put_back(self) -> None:
        """Set all of it to what it was when this was made."""
        pop_hooks_to(self._hooks)
        current.set(self._running)
        set_grad_enabled(self._grad)
        set_dispatch_state(self._dispatch)
        set_function_modes(self._function_modes)
        set_torch_function_state(self._function_state)
        set_default_device_mode_state(self._device)
        if old_vmap_level() != self._vmap_level:
            set_old_vmap_level(self._vmap_level)
        if self._transforms is not None:
            self._transforms.enter_again()
        if autocast_level() != self._autocast_level:
            set_autocast_level(self._autocast_level)
        ambient.set_casts(self._casts)
        self._put_back_ambient()

    def _put_back_ambient(self) -> None:
        dtype, *attention, _, names, priority, _, _ = self._ambient
        ambient.names.set(names)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        ambient.allow_attention(attention, ambient.snapshot()[1:5])
        if priority is not None and cuda_in_use():
            set_attention_order(list(priority))


@contextmanager
def entered(then: ambient.Ambient) -> Iterator[None]:
    """A context with the surrounding state of a snapshot; puts back what was there before."""
    before = TorchState()
    try:
        ambient.enter(then)
        yield
    finally:
        before.put_back()
