"""One replay: runs the function of a region again and collects what autograd saves.

How it collects is chosen once, before it runs. A *checked* replay looks at every save, and stops
when it has what backward needs; an *unchecked* one runs to the end and looks at nothing on the way.
Note [A replay that runs to its end] in collect.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rekindle import observation
from rekindle.regions.base import RunningRegion, current, runs_region
from rekindle.regions.errors import mismatch
from rekindle.regions.recompute import ambient, rng_state
from rekindle.regions.recompute.collect import Collector, collect
from rekindle.regions.recompute.early_stop import Stop, StopForHooks
from rekindle.regions.recompute.forward_snapshot import ForwardSnapshot
from rekindle.regions.recompute.module_state import ModuleState
from rekindle.regions.recompute.torch_state import TorchState
from rekindle.torch_private.func_transforms import func_transform, old_vmap_level
from rekindle.torch_private.grad_mode import grad_enabled, outside_inference_mode, set_grad_enabled
from rekindle.torch_private.saved_tensor_hooks import pop_hooks, pop_hooks_to, push_hooks, top_hooks

if TYPE_CHECKING:
    from rekindle.regions.recompute.recompute_region import RecomputeRegion

_NOTHING = nullcontext()


@runs_region
def replay(region: "RecomputeRegion", collector: Collector) -> None:
    """Run the function of a region again as in its forward, and collect what it saves."""
    snapshot = region.snapshot
    changed = snapshot.inputs.changed()
    if changed is not None:
        raise mismatch.argument_changed(region, changed)
    hook = _hook(region, collector)
    surroundings = _surroundings(region)
    outer, hooks, grad = current.get(), top_hooks(False), grad_enabled()
    rng = None if snapshot.rng is None else rng_state.now(snapshot.rng)
    try:
        try:
            current.set(RunningRegion(region, outer, is_replay=True))
            if snapshot.rng is not None:
                rng_state.restore(snapshot.rng)
            set_grad_enabled(True)
            if surroundings is None:
                function, args, kwargs = snapshot.inputs.again()
                push_hooks(hook, collector.saved)
                function(*args, **kwargs)
            else:
                surroundings.enter()
                with surroundings.outside_inference_mode(), surroundings.counted(region, collector):
                    set_grad_enabled(True)
                    function, args, kwargs = snapshot.inputs.again()
                    push_hooks(hook, collector.saved)
                    with surroundings.context_of(region), surroundings.traced(region):
                        function(*args, **kwargs)
        except (Stop, StopForHooks):
            pass
        except Exception:  # the region swallowed the stop, and fell over something of its own
            if not collector.stopped:
                raise
        pop_hooks()
        _put_back(snapshot, surroundings, outer, grad, rng)
        if collector.stopped and snapshot.modules is not None:
            snapshot.modules.restore_buffers()
    except BaseException:  # Note [Put back as often as asked] in torch_state.py
        pop_hooks_to(hooks)
        _put_back(snapshot, surroundings, outer, grad, rng)
        if snapshot.modules is not None:
            snapshot.modules.restore_buffers()
        raise


def _put_back(
    snapshot: ForwardSnapshot,
    surroundings: "_Surroundings | None",
    outer: RunningRegion | None,
    grad: bool,
    rng: rng_state.RngState | None,
) -> None:
    """Undo what a replay changed; does no harm when it is done twice."""
    snapshot.inputs.take_off_hooks()
    if surroundings is not None:
        surroundings.put_back()
    current.set(outer)
    set_grad_enabled(grad)
    if rng is not None:
        rng_state.restore(rng)


def _hook(region: "RecomputeRegion", collector: Collector) -> Callable[[Tensor], Any]:
    """The saved-tensor hook of a replay: where it stops, and whether it is checked."""
    saved = region.saved
    needed = saved.needed()
    stop = not region.has_inner_graphs and (
        region.running or (region.options.early_stop and saved.stopping_pays(needed))
    )
    if not (stop or _is_checked(region, collector)):
        collector.checked = False
        return collector.tensors.append
    hook = collect(collector, needed, saved.sites, stop)
    next(hook)
    return collector.outside_traces(hook.send) if region.has_inner_graphs else hook.send


def _is_checked(region: "RecomputeRegion", collector: Collector) -> bool:
    """True if a replay that runs to its end is to look at every save."""
    modules = region.snapshot.modules
    return (
        region.must_check
        or region.has_inner_graphs
        or collector.replay_sites is not None
        or region.options.determinism_check == "none"  # nothing would tell of an exchange
        or (modules is not None and modules.exchanges_data())
        or region.saved.any_dead()  # used up by a backward inside, or by another
    )


def _surroundings(region: "RecomputeRegion") -> "_Surroundings | None":
    """The state to change around a replay; None if all is as in forward and nobody looks on."""
    snapshot = region.snapshot
    modules = snapshot.modules
    if modules is not None and modules.is_as_before():
        modules = None
    same = not snapshot.has_autocast and snapshot.ambient == ambient.snapshot()
    is_plain = same and not (
        region.contexts
        or region.op_trace
        or observation.active
        or torch.is_inference_mode_enabled()
        or func_transform()
        or old_vmap_level()
    )
    if is_plain and modules is None:
        return None
    return _Surroundings(modules, None if is_plain else TorchState(), None if same else snapshot)


class _Surroundings:
    """State around a replay that is not as in its forward, and contexts that look on."""

    __slots__ = ("_before", "_modules", "_modules_before", "_snapshot")

    def __init__(
        self,
        modules: ModuleState | None,
        before: TorchState | None,
        snapshot: ForwardSnapshot | None,
    ) -> None:
        self._modules = modules
        self._modules_before = None if modules is None else modules.now()
        self._before = before
        """State of torch to put back; None if only modules differ."""
        self._snapshot = snapshot
        """The snapshot whose ambient state is to be entered; None if it is that of now."""

    def enter(self) -> None:
        """Have everything as in forward."""
        if self._before is not None:
            self._before.leave_transforms()
        if self._modules is not None:
            self._modules.enter()
        if self._snapshot is not None:
            ambient.enter(self._snapshot.ambient)

    def put_back(self) -> None:
        """Have everything as it was before `enter`."""
        if self._modules is not None and self._modules_before is not None:
            self._modules.put_back(self._modules_before)
        if self._before is not None:
            self._before.put_back()

    def outside_inference_mode(self) -> AbstractContextManager[Any]:
        return _NOTHING if self._before is None else outside_inference_mode()

    def counted(
        self, region: "RecomputeRegion", collector: Collector
    ) -> AbstractContextManager[Any]:
        """Counts what the replay runs, for those who observe."""
        if not observation.active:
            return _NOTHING
        return observation.Watch(region.function).replay(lambda: collector.detached)

    def context_of(self, region: "RecomputeRegion") -> AbstractContextManager[Any]:
        """The user's context for a replay.

        One that `contextlib.contextmanager` made can be entered once; as a decorator it makes
        itself anew for every call, and so it does here for every replay.
        """
        if region.contexts is None:
            return _NOTHING
        context: Any = region.contexts[1]
        if isinstance(context, ContextDecorator):
            context = context._recreate_cm()
        return context  # type: ignore[no-any-return]

    def traced(self, region: "RecomputeRegion") -> AbstractContextManager[Any]:
        """Takes down the ops of the replay, with `debug=True`."""
        return _NOTHING if region.op_trace is None else region.op_trace.replay()
