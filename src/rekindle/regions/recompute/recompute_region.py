"""The recompute engine: one frame per call of a region.

Forward runs under a pair of saved-tensor hooks. Autograd asks the frame to pack each activation and
gets a slot, an empty box; the activation itself is let go. The slots belong to autograd alone: the
frame knows them weakly, so a slot dies with the graph node that owns it. When backward asks a slot
for its activation, the frame runs the region again, collects what it saves, in order, and puts it
into the slots that still live. From then on a slot owns its activation, and frees it when autograd
frees the slot.

Note [What frees a replayed activation]. Without `retain_graph` a node frees its slots right after
it ran. With `retain_graph` it keeps them, so a slot gives its activation away when asked for it,
and a second question replays once more. What was replayed for nodes that a backward never runs is
emptied when it ends; under an exec group, which has more calls to come, when the group dies. A
backward of the whole graph runs every node that leads to a region's one output, so there is nothing
to empty then: what the region put aside for later keeps its activations until it is used, or dies.

Note [A trace inside a region]. Some ops (`flex_attention`, `cond`) make graphs of their own
functions and of the gradients of these, while they run. What autograd saves for that it asks for
before the op returns, and the graph is right only if it gets the same tensors. So these are left
alone, in forward and in replay.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, nullcontext, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from rekindle import observation
from rekindle.errors import CheckpointError
from rekindle.regions.base import Region, Running, current, runs_region
from rekindle.regions.errors import mismatch
from rekindle.regions.errors.call_sites import RawSite, library, with_user_code
from rekindle.regions.errors.fingerprint import Drift, Fingerprints, is_read
from rekindle.regions.errors.op_trace import OpTrace
from rekindle.regions.recompute import ambient
from rekindle.regions.recompute import rng_state as random_state
from rekindle.regions.recompute.collect import (
    Collected,
    by_the_last_op,
    collect,
    is_worth_stopping,
)
from rekindle.regions.recompute.early_stop import Stop, StopForHooks
from rekindle.regions.recompute.inputs import Inputs
from rekindle.regions.recompute.module_state import ModuleState
from rekindle.regions.recompute.random_generators import DrawWatch
from rekindle.regions.recompute.reachable_state import reached_from
from rekindle.regions.recompute.slots import Slot, filled, read_value, unpack
from rekindle.regions.recompute.torch_state import Surroundings
from rekindle.regions.region_options import Options
from rekindle.torch_private.autograd_graph import (
    exec_group,
    graph_task_id,
    keep_graph,
    runs_whole_graph,
)
from rekindle.torch_private.cuda import cuda_in_use
from rekindle.torch_private.dispatch_modes import PROXY, entered_mode
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.func_transforms import func_transform, old_vmap_level
from rekindle.torch_private.grad_mode import grad_enabled, outside_inference_mode, set_grad_enabled
from rekindle.torch_private.saved_tensor_hooks import pop_hooks, pop_hooks_to, push_hooks, top_hooks
from rekindle.torch_private.tensor_identity import shape_of

_getframe = sys._getframe
_NOTHING = nullcontext()


class RecomputeRegion(Region):
    """One call of a region: entered around its forward, alive until its last slot dies."""

    had_cuda = False
    modules: ModuleState | None = None
    rng: random_state.RngState | None = None
    contexts: tuple[Any, Any] | None = None
    values: Fingerprints | None = None
    trace: OpTrace | None = None
    watches_draws = False
    """Whether the forward is watched for generators. Note [How generators are found]."""
    running = False
    careful = False
    """Whether a replay is to be looked at save by save. Note [A replay that runs to its end]."""
    full = False
    """Whether a replay has filled the slots, and nobody emptied them since."""
    looking = False
    """Whether somebody wants to see what is saved."""
    away: "WeakKeyDictionary[Slot, Tensor | _Spoiled | _Drifted] | None" = None
    """Activations to be given away when they are asked for; spoiled ones are among them."""
    tracer: Any = None
    """Who makes a graph of the forward. Note [A trace inside a region]."""
    traces = False
    """Whether ops of the region made graphs of their own."""
    _entered: ExitStack | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        contexts: tuple[Any, Any] | None = None,
        holds_at_end: bool = False,
    ) -> None:
        super().__init__(function)
        self.options = options
        hooks = None if holds_at_end else top_hooks(False)
        self.hooked = hooks is not None
        self.inputs = Inputs(function, args, kwargs, hooks)
        self.function = self.inputs.function
        self.ambient = ambient.take()
        modules, generators, saw_all = reached_from(function, args, kwargs)
        if modules:
            self.modules = ModuleState(modules, function)
        if options.preserve_rng_state:
            self.had_cuda = cuda_in_use()
            self.rng = random_state.take(self.inputs.devices, generators)
            self.watches_draws = not saw_all
        self.tracer = entered_mode(PROXY)
        self.slots: list[ref[Slot]] = []
        self.sites: list[RawSite] = []
        if not options.plain:
            self.contexts = contexts
            if options.determinism_check == "values":
                self.values = Fingerprints()
                self.looking = True
            if options.debug:
                self.trace = OpTrace()

    def __enter__(self) -> None:
        self.running = True
        super().__enter__()
        if observation.active:
            self.count_forward(self.inputs.tensors(), held=not self.hooked)
            self.looking = self.looking or self.watch is not None
        if self.contexts is not None or self.trace is not None or self.watches_draws:
            self._entered = ExitStack()
            try:
                if self.watches_draws:
                    self._entered.enter_context(DrawWatch(self))
                if self.contexts is not None:
                    self._entered.enter_context(self.contexts[0])
                if self.trace is not None:
                    self._entered.enter_context(self.trace.forward())
            except BaseException:
                self.__exit__(*sys.exc_info())
                raise

    def __exit__(self, *error: object) -> None:
        try:
            if self._entered is not None:
                self._entered.__exit__(*error)  # type: ignore[arg-type]
        finally:
            self._entered = None
            super().__exit__(*error)

    def end_forward(self, failed: bool) -> None:  # noqa: ARG002
        """Hold what a replay needs, and nothing else: the forward is over."""
        self.running = False
        self.inputs.close(self.hooked)
        if self.modules is not None:
            self.modules.close()
        if self.values is not None:
            self.values.close()
        if self.rng is not None and not self.had_cuda and cuda_in_use():
            self.rng = random_state.with_first_use(self.rng)

    def abandon(self) -> None:
        self.running = False

    unpack = unpack

    @not_compiled
    def pack(self, x: Tensor) -> Slot:
        if entered_mode(PROXY) is not self.tracer:
            self.traces = True
            return filled(x)
        slot = Slot()
        slot.region = self
        slot.meta = shape_of(x), x.dtype, x.device
        slot.version = x._version
        self.slots.append(ref(slot))
        try:
            caller = _getframe(1)
        except ValueError:  # in a thread of autograd's own, which no Python calls
            caller = _getframe(0)
        code = caller.f_code
        site = with_user_code(caller) if library[code.co_filename] else (code, caller.f_lasti)
        self.sites.append(site)
        if self.looking:
            if self.values is not None:
                self.values.add(x, site)
            if self.watch is not None:
                self.watch.saved(x)
        return slot

    def fill(self, slot: Slot) -> Tensor:
        """The activation of a slot that has none: from those to be given away, or from a replay."""
        with self.lock:  # threads of one backward, or of several, may ask at the same time
            self.careful = self.careful or self.running
            value = self._taken(slot)
            if value is None:
                self.with_oom_note(self._replay)
                value = self._taken(slot)
        if graph_task_id() == -1:  # somebody reads `grad_fn._saved_…` outside a backward
            self.empty()
        if isinstance(value, _Spoiled):
            raise mismatch.changed_in_place(self, *value)
        if isinstance(value, _Drifted):
            if is_read(slot):
                self.empty()
                raise mismatch.drifted(self, value.drifts)
            value = value.tensor
        assert value is not None, "a replay fills every slot that lives"
        return value

    def _taken(self, slot: Slot) -> "Tensor | _Spoiled | _Drifted | None":
        """What a replay left for a slot, if it did."""
        if not self.full:
            return None
        value = None if self.away is None else self.away.pop(slot, None)
        if value is None:
            with suppress(AttributeError):
                value = read_value(slot)
        return value

    def release(self) -> None:
        self.full = False
        self.away = None
        for weak in self.slots:
            slot = weak()
            if slot is not None:
                with suppress(AttributeError):
                    del slot.value

    def _replay(self) -> None:
        """Run the region again and fill the slots that live, or raise and fill none."""
        found = Collected(self, values=self.values)
        try:
            self._run_again(found)
            try:
                self._distribute(found)
            except _TooHastyError:
                found.tensors.clear()
                self.careful = True
                if self.modules is not None:
                    self.modules.note_exchange()
                found = Collected(self, values=self.values)
                self._run_again(found)
                self._distribute(found)
        except BaseException as error:
            self.inputs.note_on(error)
            self.empty()
            raise
        finally:
            found.tensors.clear()  # the replay's own graph leads back to this list
            self.inputs.forget_replay()
        if graph_task_id() != -1 and (
            exec_group() is not None or not (self.has_one_output and runs_whole_graph())
        ):
            self.empty_in_time()

    def _hook(self, found: Collected) -> "Callable[[Tensor], Any]":
        """What takes the activations of a replay."""
        needed = len(self.slots)
        while self.slots[needed - 1]() is None:
            needed -= 1
        stop = self.running or (self.options.early_stop and self._is_worth_stopping(needed))
        stop = stop and not self.traces
        used_up = None in [weak() for weak in self.slots]  # by a backward inside, or by another
        exchanged = self.modules is not None and self.modules.exchanges_data()
        unchecked = self.options.determinism_check == "none"  # nothing would tell of an exchange
        careful = used_up or exchanged or unchecked or self.careful or found.where is not None
        careful = careful or self.traces
        if not (stop or careful):
            found.hasty = True
            return found.tensors.append
        hook = collect(found, needed, self.sites, stop)
        next(hook)
        return found.outside_traces(hook.send) if self.traces else hook.send

    def _is_worth_stopping(self, needed: int) -> bool:
        last = self.slots[needed - 1]()
        if last is None or last.meta[2].type == "cpu":
            return True
        slots = [self.slots[i]() for i in by_the_last_op(self.sites, needed)]
        return is_worth_stopping([slot.meta[0] for slot in slots if slot is not None])

    @runs_region
    def _run_again(self, found: Collected) -> None:
        changed = self.inputs.changed()
        if changed is not None:
            raise mismatch.argument_changed(self, changed)
        hook = self._hook(found)
        around = self._around()
        hooks, outer, grad = top_hooks(False), current.get(), grad_enabled()
        now = None if self.rng is None else random_state.now(self.rng)
        try:
            try:
                current.set(Running(self, outer, is_replay=True))
                if self.rng is not None:
                    random_state.restore(self.rng)
                set_grad_enabled(True)
                if around is None:
                    function, args, kwargs = self.inputs.again()
                    push_hooks(hook, found.saved)
                    function(*args, **kwargs)
                else:
                    around.enter(self.ambient)
                    with outside_inference_mode(), self._counted(found):
                        set_grad_enabled(True)
                        function, args, kwargs = self.inputs.again()
                        push_hooks(hook, found.saved)
                        with (
                            _NOTHING if self.contexts is None else _reusable(self.contexts[1]),
                            _NOTHING if self.trace is None else self.trace.replay(),
                        ):
                            function(*args, **kwargs)
            except (Stop, StopForHooks):
                pass
            except Exception:  # the region swallowed the stop, and fell over something of its own
                if not found.stopped:
                    raise
            pop_hooks()
            self.inputs.take_off_hooks()
            if around is not None:
                around.put_back()
            current.set(outer)
            set_grad_enabled(grad)
            if now is not None:
                random_state.restore(now)
        except BaseException:  # Note [Put back as often as asked]
            pop_hooks_to(hooks)
            self.inputs.take_off_hooks()
            if around is not None:
                around.put_back()
            current.set(outer)
            set_grad_enabled(grad)
            if now is not None:
                random_state.restore(now)
            raise

    def _around(self) -> "_Around | None":
        """What a replay changes around it; None if all is as in forward and nobody looks on."""
        modules = self.modules
        moved = modules is not None and not modules.is_as_before()
        same = self.ambient == ambient.take() and not ambient.has_autocast(self.ambient)
        inference, transform = torch.is_inference_mode_enabled(), func_transform()
        looked_at = self.contexts or self.trace or observation.active
        if same and not (moved or looked_at or inference or transform or old_vmap_level()):
            return None
        return _Around(modules if moved else None, same)

    def _counted(self, found: Collected) -> "AbstractContextManager[Any]":
        """Counts what the replay runs, for those who observe."""
        if not observation.active:
            return _NOTHING
        return observation.Watch(self.function).replay(lambda: found.detached)

    def _distribute(self, found: Collected) -> None:
        """Put what a replay saved into the slots, checked against what the forward saved."""
        checks = self.options.determinism_check != "none"
        # Note [What frees a replayed activation]
        give_away = graph_task_id() == -1 or (keep_graph() and exec_group() is None)
        self.away = None
        self.full = True
        slots, tensors = self.slots, found.tensors
        for position, (weak, saved) in enumerate(zip(slots, tensors, strict=False)):
            slot = weak()
            if slot is None:
                continue
            x = saved if type(saved) is Tensor else found.detach(saved, position)
            if checks and slot.meta != (shape_of(x), x.dtype, x.device):
                if found.hasty:
                    raise _TooHastyError
                raise self._explain(position, x)
            version = found.copied.get(position, x._version)
            if slot.version != version:
                version = self.inputs.version_as_called(saved, version)
            if slot.version != version and (found.is_old(position) or not self._stands_in()):
                self._keep_for(slot, _Spoiled(position, slot.version, version))
            elif give_away:
                self._keep_for(slot, x)
            else:
                slot.value = x
        if len(tensors) != len(slots) or found.ended_elsewhere or self.values is not None:
            self._check_whole(found, checks)

    def _check_whole(self, found: Collected, checks: bool) -> None:
        """Neither more was saved than in forward, nor less, nor something else."""
        slots, tensors = self.slots, found.tensors
        if len(tensors) > len(slots) and not self.running:
            raise self._explain(len(slots), None)
        if found.ended_elsewhere and checks:
            raise self._explain(len(tensors) - 1, tensors[-1])
        for position in range(len(tensors), len(slots)):
            if slots[position]() is not None:
                raise mismatch.fewer_saved(self, len(tensors), position)
        if self.values is None:
            return
        drifts = self.values.check(self, found)
        for drift in drifts:
            slot = slots[drift.position]()
            if slot is not None:
                with suppress(AttributeError):
                    del slot.value
                self._keep_for(slot, _Drifted(tensors[drift.position], drifts))

    def _stands_in(self) -> bool:
        """Whether the replay ran on copies of buffers: their versions begin anew."""
        return self.modules is not None and self.modules.has_stand_ins()

    def _keep_for(self, slot: Slot, value: "Tensor | _Spoiled | _Drifted") -> None:
        if self.away is None:
            self.away = WeakKeyDictionary()
        self.away[slot] = value

    def _explain(self, position: int, seen: Tensor | None) -> CheckpointError:
        """The error of a replay that went another way: replay once more, to see where."""
        again = Collected(self, closely=True)
        try:
            with suppress(Exception):
                self._run_again(again)
            return mismatch.different(self, position, seen, again)
        finally:
            again.tensors.clear()


class _Around:
    """What is around a replay, and of its modules, that is not as in forward."""

    def __init__(self, modules: ModuleState | None, is_same: bool) -> None:
        self._modules = modules
        self._is_same = is_same
        """Whether the ambient state is that of the forward."""
        self._before = Surroundings()
        self._modules_before = None if modules is None else modules.now()

    def enter(self, then: ambient.Ambient) -> None:
        """Have everything as in forward."""
        self._before.leave_transforms()
        if self._modules is not None:
            self._modules.enter()
        if not self._is_same:
            ambient.enter(then)

    def put_back(self) -> None:
        """Have everything as it was before."""
        if self._modules is not None and self._modules_before is not None:
            self._modules.put_back(self._modules_before)
        self._before.put_back()


class _TooHastyError(Exception):
    """A replay that was not looked at save by save did not fit: look at it."""


class _Spoiled(NamedTuple):
    """In place of an activation that was changed in place after it was saved."""

    position: int
    expected: int
    version: int


class _Drifted(NamedTuple):
    """An activation with other content than in forward, which perhaps nothing reads."""

    tensor: Tensor
    drifts: list[Drift]


def _reusable(context: Any) -> Any:
    """A context to enter, so that the same one can be entered again for the next replay.

    What `contextlib.contextmanager` makes can be entered once; as a decorator it makes itself anew
    for every call, and so it does here.
    """
    return context._recreate_cm() if isinstance(context, ContextDecorator) else context
