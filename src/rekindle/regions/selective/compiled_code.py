"""Code that inductor made, called in a region under a policy.

Note [Compiled code in a recorded region]. Inductor's kernels pass the dispatcher by, and reuse each
other's memory: an op that is seen between two of them cannot be run again from what it was given.
So nothing inside such code is recorded, and no policy is asked about it. What the code saves for
backward, and whatever the region makes from its results, comes back as in a region without a
policy: the region's own code is run again. What the policy keeps of other ops is kept all the same,
and what does not depend on compiled code is made again op by op. Backends that run a graph op by op
(`aot_eager`) are recorded like any code.
"""

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor

from rekindle.regions.errors.call_sites import RawSite, frame_at, library, with_user_code
from rekindle.regions.recompute.recompute_region import RecomputeRegion
from rekindle.regions.recompute.slots import Slot
from rekindle.regions.region_options import Options
from rekindle.torch_private.autograd_graph import (
    FUNCTION_APPLY,
    function_class,
    grad_fn_of,
    nodes_so_far,
    runs_compiled_graph,
    sequence_number,
)
from rekindle.torch_private.dispatch_modes import PROXY, entered_mode
from rekindle.torch_private.inductor import (
    dynamo_is_loaded,
    is_written_by_inductor,
)
from rekindle.torch_private.storages import storage_key
from rekindle.torch_private.tensor_identity import shape_of

_DEEP = 16
"""Number of frames to look up: dispatch modes and torch's Python may be between op and caller."""


def called_by_generated_code() -> bool:
    """Returns whether code that inductor wrote runs the op that the calling dispatch mode sees.

    Asked only if `inductor_has_written()`.
    """
    frame: FrameType | None = frame_at(2)
    for _ in range(_DEEP):
        if frame is None:
            return False
        code = frame.f_code
        if not library[code.co_filename] and code.co_name != "__torch_dispatch__":
            return is_written_by_inductor(frame)
        frame = frame.f_back
    return False


_runs_compiled_code: dict[int, tuple[ref[Any], bool]] = {}
"""For a function's code, or a class, by its id: True if regions of it ran compiled code."""


def may_run_compiled_code(function: Callable[..., Any]) -> bool:
    """Returns whether compiled code may run in a region: False if it ran none before.

    A region that first runs some after it ran none holds what that saves, this once.
    """
    if not dynamo_is_loaded():
        return False
    key = _key(function)
    known = _runs_compiled_code.get(id(key))
    return known is None or known[0]() is not key or known[1]


def note_compiled_code(function: Callable[..., Any], found: bool) -> None:
    """Remember that compiled code ran in a region, or that none did."""
    key = _key(function)
    known = _runs_compiled_code.get(id(key))
    if found or known is None or known[0]() is not key:
        forget = functools.partial(_forget, id(key))
        _runs_compiled_code[id(key)] = ref(key, forget), found


def _forget(key: int, _: Any) -> None:
    _runs_compiled_code.pop(key, None)


def _key(function: Callable[..., Any]) -> Any:
    """The key of a function here: its code, or the class of a callable object."""
    return getattr(function, "__code__", None) or type(function)


_DEAD: "ref[Slot]" = ref(Slot())


class CompiledCodeRegion(RecomputeRegion):
    """Replays a recorded region for what compiled code in it made.

    Note [Compiled code in a recorded region]. It exists while the region's forward runs; then it
    lives as long as one of its slots, or goes at once if there is none.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
    ) -> None:
        early_stop, rng = options.early_stop, options.preserve_rng_state
        super().__init__(
            *(function, args, kwargs),
            Options(early_stop=early_stop, preserve_rng_state=rng, plain=True),
            holds_at_end=True,
        )
        self._first_node = nodes_so_far()
        self.is_used = False
        self.running = True

    def made(self, tensor: Tensor) -> bool:
        """Returns whether compiled code in this region made a tensor, and autograd follows it."""
        node = grad_fn_of(tensor)
        if node is None or not runs_compiled_graph(function_class(node)):
            return False
        return sequence_number(node) >= self._first_node

    def slot_for(self, x: Tensor, site: RawSite) -> Slot:
        """A slot for a tensor that autograd saves, which a replay fills."""
        self.is_used = True
        slot = Slot()
        slot.region = self
        slot.meta = shape_of(x), x.dtype, x.device
        slot.version = x._version
        self.saved.slots.append(ref(slot))
        self.saved.sites.append(site)
        return slot

    def pass_by(self, site: RawSite) -> None:
        """Note that autograd saves a tensor that needs no replay."""
        self.saved.slots.append(_DEAD)
        self.saved.sites.append(site)

    def note_trace(self, site: RawSite) -> None:
        """Note that autograd saves a tensor for an op that makes a graph of its own."""
        if entered_mode(PROXY) is not self.proxy_mode:
            self.has_inner_graphs = True
        else:
            self.pass_by(site)

    def end(self, hooks: Any) -> None:
        """End the forward: hold the arguments, by the hooks around the region, if there are any."""
        self.hooked = hooks is not None
        if hooks is not None and self.inputs.changed() is None:
            self.inputs.hand_to(hooks)
        self.end_forward(failed=False)


def site_of(frame: FrameType) -> RawSite:
    """The site at which a tensor is saved; `frame` is the one that called the hook."""
    code = frame.f_code
    return with_user_code(frame) if library[code.co_filename] else (code, frame.f_lasti)


def saved_by_compiled_code(x: Tensor, frame: FrameType) -> bool:
    """Returns whether compiled code saves a tensor of its own; `frame` called the hook."""
    if frame.f_code is not FUNCTION_APPLY:
        return False
    called = frame.f_locals
    if not runs_compiled_graph(called["cls"]):
        return False
    given = {_memory_of(arg) for arg in called["args"] if isinstance(arg, Tensor)}
    return _memory_of(x) not in given


def _memory_of(tensor: Tensor) -> int:
    try:
        return storage_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass without a storage
        return id(tensor)
