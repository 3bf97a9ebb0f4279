"""The start of a replay: the arguments and all state that the forward of a region found."""

from collections.abc import Callable
from typing import Any

from rekindle.regions.recompute import ambient, rng_state
from rekindle.regions.recompute.inputs import Inputs
from rekindle.regions.recompute.module_state import ModuleState
from rekindle.regions.recompute.reachable_state import reached_from
from rekindle.torch_private.cuda import cuda_in_use


class ForwardSnapshot:
    """One call's arguments, random state, ambient state and module state, from before its forward.

    Made when the region is called; `close` ends it with the forward. Nothing changes it after that.
    """

    __slots__ = (
        "_had_cuda",
        "ambient",
        "has_autocast",
        "inputs",
        "modules",
        "rng",
        "sees_all_generators",
    )

    def __init__(
        self,
        inputs: Inputs,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
    ) -> None:
        self.inputs = inputs
        self._had_cuda = had_cuda = cuda_in_use()
        self.ambient = ambient.snapshot(had_cuda)
        self.has_autocast = self.ambient[-2] is not None
        modules, generators, self.sees_all_generators = reached_from(function, args, kwargs)
        self.modules = ModuleState(modules, function) if modules else None
        """None if the function reaches no module."""
        self.rng: rng_state.RngState | None = None
        """None if random numbers may differ in the replay."""
        if preserve_rng_state:
            self.rng = rng_state.snapshot(inputs.devices, generators, had_cuda)
        else:
            self.sees_all_generators = True  # as nobody asks for their state

    def close(self, hooked: bool) -> None:
        """Hold no more than a replay needs: the forward is over."""
        self.inputs.close(hooked)
        if self.modules is not None:
            self.modules.close()
        if not self._had_cuda and self.rng is not None and cuda_in_use():
            self.rng = rng_state.with_first_use(self.rng)
