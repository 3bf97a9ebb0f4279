"""The recompute engine: a region that is run again in backward.

Forward runs under a pair of saved-tensor hooks. Autograd asks the region to pack each activation
and gets a slot, an empty box; the activation itself is let go. The slots belong to autograd alone:
the region knows them weakly, so a slot dies with the graph node that owns it. When backward asks a
slot for its activation, the region is run again (replay.py), what it saves is collected in order
(collect.py) and put into the slots that still live. From then on a slot owns its activation, and
frees it when autograd frees the slot.

Note [What frees a replayed activation]. Without `retain_graph` a node frees its slots right after
it ran. With `retain_graph` it keeps them, so a slot hands out its activation once; the next
request replays again. What was replayed for nodes that a backward never runs is emptied when that
backward ends; under an exec group, which has more calls to come, when the group dies. A backward of
the whole graph runs every node that leads to a region's one output, so nothing is emptied. If the
region stored another tensor elsewhere, what was replayed for that tensor lives until it is used or
freed.

Note [A trace inside a region]. Some ops (`flex_attention`, `cond`) make graphs of their own
functions and of the gradients of these, while they run. Autograd saves tensors for that
graph and asks for them before the op returns, and the graph is right only if it gets the same
tensors. So these are left alone, in forward and in replay.
"""

import sys
from _thread import RLock
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from rekindle import observation
from rekindle.errors import CheckpointError
from rekindle.regions.base import Region
from rekindle.regions.errors import mismatch
from rekindle.regions.errors.call_sites import RawSite, library, with_user_code
from rekindle.regions.errors.fingerprint import Drift, Fingerprints, is_read
from rekindle.regions.errors.op_trace import OpTrace
from rekindle.regions.recompute.collect import Collector
from rekindle.regions.recompute.forward_snapshot import ForwardSnapshot
from rekindle.regions.recompute.inputs import Inputs
from rekindle.regions.recompute.random_generators import DrawWatch
from rekindle.regions.recompute.replay import replay
from rekindle.regions.recompute.slots import Slot, SlotTable, filled, read_value, unpack
from rekindle.regions.region_options import Options
from rekindle.torch_private.autograd_graph import (
    exec_group,
    graph_task_id,
    keep_graph,
    nodes_so_far,
    runs_whole_graph,
)
from rekindle.torch_private.dispatch_modes import PROXY, entered_mode
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.saved_tensor_hooks import pop_hooks, push_hooks, top_hooks
from rekindle.torch_private.tensor_identity import shape_of

_getframe = sys._getframe


class RecomputeRegion(Region):
    """One call of a function, entered around its forward; alive until its last slot dies."""

    unpack = unpack

    contexts: tuple[Any, Any] | None = None
    """The user's contexts for forward and replay."""
    values: Fingerprints | None = None
    """Fingerprints of what the forward saved, with `determinism_check="values"`."""
    op_trace: OpTrace | None = None
    """Ops of forward and replay, with `debug=True`."""
    running = False
    """True while the forward runs."""
    must_check = False
    """True if every replay is to look at each save. Note [A replay that runs to its end] in
    collect.py."""
    has_inner_graphs = False
    """True if ops of the region made graphs of their own. Note [A trace inside a region]."""
    _full = False
    """True if a replay has filled the slots, and nobody emptied them since."""
    _looks_at_saves = False
    """True if fingerprints or an observer read each saved tensor."""
    _given_away: "WeakKeyDictionary[Slot, Tensor | ModifiedInPlace | Drifted] | None" = None
    """Replayed activations that slots do not own, each for the first request; or, in place of one,
    why it cannot be handed out (`ModifiedInPlace`), or that its content differs (`Drifted`)."""
    _node = -1
    """Number of the last op in torch's own Python whose call site was looked for."""
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
        hooks = None if holds_at_end else top_hooks(False)
        self.hooked = hooks is not None
        """True if saved-tensor hooks around the region keep its arguments."""
        self.options = options
        self.inputs = inputs = Inputs(function, args, kwargs, hooks)
        self.function = inputs.function  # these two as in Region.__init__, inlined: a hot path
        self.lock = RLock()
        self.snapshot = ForwardSnapshot(inputs, function, args, kwargs, options.preserve_rng_state)
        """Arguments and state from before the forward."""
        self.saved = SlotTable()
        """Slots of what autograd saved in forward."""
        self.proxy_mode = entered_mode(PROXY)
        """The mode that makes a graph of the forward, if any. Note [A trace inside a region]."""
        if not options.plain:
            self.contexts = contexts
            if options.determinism_check == "values":
                self.values = Fingerprints()
                self._looks_at_saves = True
            if options.debug:
                self.op_trace = OpTrace()

    def __enter__(self) -> None:
        self.running = True
        push_hooks(self.pack, unpack)
        if observation.active:
            self.count_forward(self.inputs.tensors(), held=not self.hooked)
            self._looks_at_saves = self._looks_at_saves or self.watch is not None
        if self.contexts or self.op_trace or not self.snapshot.sees_all_generators:
            self._enter_contexts()

    def _enter_contexts(self) -> None:
        """Enter what has to look at every op of the forward, and the user's context."""
        self._entered = ExitStack()
        try:
            if not self.snapshot.sees_all_generators:
                self._entered.enter_context(DrawWatch(self.snapshot))
            if self.contexts is not None:
                self._entered.enter_context(self.contexts[0])
            if self.op_trace is not None:
                self._entered.enter_context(self.op_trace.forward())
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: object) -> None:
        if self._entered is None:
            pop_hooks()
            self.end_forward()
            return
        try:
            self._entered.__exit__(*error)  # type: ignore[arg-type]
        finally:
            self._entered = None
            pop_hooks()
            self.end_forward()

    def end_forward(self, failed: bool = False) -> None:  # noqa: ARG002
        """Hold what a replay needs, and nothing else: the forward is over."""
        self.running = False
        self.snapshot.close(self.hooked)
        if self.values is not None:
            self.values.close()

    def abandon(self) -> None:
        self.running = False

    @not_compiled
    def pack(self, x: Tensor) -> Slot:
        """Saved-tensor hook: an empty slot in place of an activation."""
        if entered_mode(PROXY) is not self.proxy_mode:
            self.has_inner_graphs = True
            return filled(x)
        slot = Slot()
        slot.region = self
        try:
            slot.meta = x.shape, x.dtype, x.device
        except RuntimeError:  # a nested tensor that is not jagged
            slot.meta = shape_of(x), x.dtype, x.device
        slot.version = x._version
        saved = self.saved
        saved.slots.append(ref(slot))
        try:
            caller = _getframe(1)
        except ValueError:  # in a thread of autograd's own, which no Python calls
            caller = _getframe(0)
        code, sites = caller.f_code, saved.sites
        site: RawSite = code, caller.f_lasti
        if library[code.co_filename]:
            node = nodes_so_far()
            if node == self._node and sites[-1][:2] == site:  # one op saves several tensors
                site = sites[-1]
            else:
                self._node = node
                site = with_user_code(caller)
        sites.append(site)
        if self._looks_at_saves:
            if self.values is not None:
                self.values.add(x, site)
            if self.watch is not None:
                self.watch.saved(x)
        return slot

    def fill(self, slot: Slot) -> Tensor:
        """The activation of a slot that has none: from those to be given away, or from a replay."""
        with self.lock:  # threads of one backward, or of several, may ask at the same time
            self.must_check = self.must_check or self.running
            value = self._take(slot) if self._full else None
            if value is None:
                self.with_oom_note(self._replay)
                value = self._take(slot)
        if graph_task_id() == -1:  # somebody reads `grad_fn._saved_…` outside a backward
            self.empty()
        if isinstance(value, ModifiedInPlace):
            raise mismatch.changed_in_place(self, *value)
        if isinstance(value, Drifted):
            if is_read(slot):
                self.empty()
                raise mismatch.drifted(self, value.drifts)
            value = value.tensor
        assert value is not None, "a replay fills every slot that lives"
        return value

    def _take(self, slot: Slot) -> "Tensor | ModifiedInPlace | Drifted | None":
        """Take what a replay left for a slot, if it left anything."""
        value = None if self._given_away is None else self._given_away.pop(slot, None)
        if value is None:
            with suppress(AttributeError):
                value = read_value(slot)
        return value

    def release(self) -> None:
        self._full = False
        self._given_away = None
        self.saved.release()

    def _replay(self) -> None:
        """Run the region again and fill the slots that live, or raise and fill none."""
        collector = Collector(self, values=self.values)
        try:
            replay(self, collector)
            try:
                self._distribute(collector)
            except _UncheckedMismatchError:
                collector.tensors.clear()
                self.must_check = True
                if self.snapshot.modules is not None:
                    self.snapshot.modules.note_exchange()
                collector = Collector(self, values=self.values)
                replay(self, collector)
                self._distribute(collector)
        except BaseException as error:
            self.inputs.note_on(error)
            self.empty()
            raise
        finally:
            collector.tensors.clear()  # the replay's own graph leads back to this list
            self.inputs.forget_replay()
        if graph_task_id() != -1 and not (
            self.has_one_output and runs_whole_graph() and exec_group() is None
        ):
            self.empty_when_unshared()

    def _distribute(self, collector: Collector) -> None:
        """Fill the slots with what a replay saved, checked against what the forward saved."""
        checks = self.options.determinism_check != "none"
        # Note [What frees a replayed activation]
        give_away = graph_task_id() == -1 or (keep_graph() and exec_group() is None)
        self._given_away = None
        self._full = True
        slots, tensors = self.saved.slots, collector.tensors
        for position, (weak, saved) in enumerate(zip(slots, tensors, strict=False)):
            slot = weak()
            if slot is None:
                continue
            x = saved if type(saved) is Tensor else collector.detach(saved, position)
            if checks:
                try:
                    meta = x.shape, x.dtype, x.device
                except RuntimeError:  # a nested tensor that is not jagged
                    meta = shape_of(x), x.dtype, x.device
                if slot.meta != meta:
                    if not collector.checked:
                        raise _UncheckedMismatchError
                    raise self._explain(position, x)
            version = collector.copied.get(position, x._version) if collector.copied else x._version
            if slot.version != version:
                version = self.inputs.version_as_called(saved, version)
                if slot.version != version and (
                    collector.is_old(position) or not self._stands_in()
                ):
                    self._give_away(slot, ModifiedInPlace(position, slot.version, version))
                    continue
            if give_away:
                self._give_away(slot, x)
            else:
                slot.value = x
        if len(tensors) != len(slots) or collector.ended_elsewhere or self.values is not None:
            self._check_whole(collector, checks)

    def _check_whole(self, collector: Collector, checks: bool) -> None:
        """Raise if a replay saved more than the forward, or less, or something else."""
        slots, tensors = self.saved.slots, collector.tensors
        if len(tensors) > len(slots) and not self.running:
            raise self._explain(len(slots), None)
        if collector.ended_elsewhere and checks:
            raise self._explain(len(tensors) - 1, tensors[-1])
        for position in range(len(tensors), len(slots)):
            if slots[position]() is not None:
                raise mismatch.fewer_saved(self, len(tensors), position)
        if self.values is None:
            return
        drifts = self.values.check(self, collector)
        for drift in drifts:
            slot = slots[drift.position]()
            if slot is not None:
                with suppress(AttributeError):
                    del slot.value
                self._give_away(slot, Drifted(tensors[drift.position], drifts))

    def _stands_in(self) -> bool:
        """True if replays run on copies of buffers: their versions begin anew."""
        return self.snapshot.modules is not None and self.snapshot.modules.has_stand_ins()

    def _give_away(self, slot: Slot, value: "Tensor | ModifiedInPlace | Drifted") -> None:
        if self._given_away is None:
            self._given_away = WeakKeyDictionary()
        self._given_away[slot] = value

    def _explain(self, position: int, seen: Tensor | None) -> CheckpointError:
        """The error of a replay that went another way: replay once more, to see where."""
        again = Collector(self, closely=True)
        try:
            with suppress(Exception):
                replay(self, again)
            return mismatch.different(self, position, seen, again)
        finally:
            again.tensors.clear()


class _UncheckedMismatchError(Exception):
    """An unchecked replay did not save what the forward did: repeat it, checked."""


class ModifiedInPlace(NamedTuple):
    """In place of an activation that was changed in place after it was saved."""

    position: int
    expected: int
    version: int


class Drifted(NamedTuple):
    """An activation with other content than in forward, which perhaps nothing reads."""

    tensor: Tensor
    drifts: list[Drift]
