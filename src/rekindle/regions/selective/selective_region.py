"""One call of a region under a policy: recorded in forward, made again from its record."""

from _thread import RLock
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from rekindle import observation
from rekindle.errors import CheckpointError
from rekindle.module_attachment import annotate_oom
from rekindle.offload.activation import Kept
from rekindle.regions import base
from rekindle.regions.backward_cleanup import empty_when_backward_ends, empty_when_group_dies
from rekindle.regions.errors import fingerprint
from rekindle.regions.errors.call_sites import frame_at
from rekindle.regions.recompute.slots import Slot
from rekindle.regions.region_options import Options
from rekindle.regions.selective.compiled_code import (
    GraphFrame,
    may_run_compiled_code,
    note_compiled_code,
    saved_by_compiled_code,
    site_of,
)
from rekindle.regions.selective.held_tensor import RecordedSlot
from rekindle.regions.selective.op_graph import RecordedValue, remake
from rekindle.regions.selective.recorder import OpRecorder, is_recording
from rekindle.torch_private.autograd_graph import (
    exec_group,
    graph_task_id,
    keep_graph,
    runs_whole_graph,
)
from rekindle.torch_private.dispatch_modes import past_modes
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.saved_tensor_hooks import pop_hooks, push_hooks, top_hooks

if TYPE_CHECKING:
    from rekindle.policies import Policy


class SelectiveRegion(base.Region):
    """Entered around a region's forward; alive as long as autograd holds something of it."""

    def __init__(
        self,
        policy: "Policy",
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
    ) -> None:
        self._checks_values = options.determinism_check == "values"
        super().__init__(function)
        self._frame: GraphFrame | None = None
        if may_run_compiled_code(function):
            self._frame = GraphFrame(function, args, kwargs, options)
        is_replayed = None if self._frame is None else self._frame.made
        self._hooks = top_hooks(False)
        self._recorder = OpRecorder(policy, self._hooks, self, is_replayed)
        self._lock = RLock()
        self._made: list[ref[RecordedValue]] = []
        self._emptied_after: tuple[str, int] | None = None
        self._saved: list[tuple[ref[RecordedValue], observation.Footprint]] = []
        self._watch: observation.Watch | None = None
        if observation.active and not base.is_replaying():
            self._watch = observation.Watch(function)
            self._watch.ran(())

    def __enter__(self) -> None:
        push_hooks(self._pack, _unpack)
        self._recorder.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self._recorder.__exit__(*error)
        finally:
            pop_hooks()
            held = self._recorder.table.held_values() if self._watch is not None else []
            self._recorder.close(failed=error[0] is not None)
            self._end_frame(failed=error[0] is not None)
            self._report(held)

    def _end_frame(self, failed: bool) -> None:
        """Hold the region's arguments if compiled code in it has to be replayed, and only then."""
        frame, self._frame = self._frame, None
        if frame is None or failed:
            return
        note_compiled_code(self.function, frame.is_used)
        if frame.is_used:
            frame.end(self._hooks)
            if self._watch is not None and self._hooks is None:
                for tensor in frame.inputs.tensors():
                    self._watch.held(tensor)

    def abandon(self) -> None:
        """Let go of what was recorded: the forward failed."""
        self._recorder.abandon()
        self._frame = None

    def _report(self, held: list["ref[RecordedValue]"]) -> None:
        """Count what is held now that nothing keeps values alive but what backward needs."""
        if self._watch is None:
            return
        for weak in held:
            value = weak()
            if value is not None and value.held is not None:
                tensor = value.held.on_device()
                if tensor is not None:
                    self._watch.held(tensor)
        for weak, footprint in self._saved:
            value = weak()
            if value is not None and value.held is None:
                self._watch.count(footprint, "dropped")
        self._saved = []

    @not_compiled
    def _pack(self, x: Tensor) -> "SelectiveSlot | Slot | Kept":
        recorder = self._recorder
        if recorder.is_inside_a_trace():
            if self._frame is not None:
                self._frame.note_trace(site_of(frame_at(1)))
            return Kept(x)
        if self._frame is not None:
            replayed = self._slot_by_replay(x, self._frame, frame_at(1))
            if replayed is not None:
                return replayed
        elif saved_by_compiled_code(x, frame_at(1)):
            note_compiled_code(self.function, True)
        value = recorder.saved(x)
        if self._watch is None and not self._checks_values:
            return SelectiveSlot(self, value)
        slot = SelectiveSlot(self, value)
        if self._watch is not None:
            footprint = observation.footprint_of(x)
            if footprint is not None:
                self._saved.append((ref(value), footprint))
        if self._checks_values and value.held is None:
            slot.before = past_modes(fingerprint.take, x)
        return slot

    def _slot_by_replay(self, x: Tensor, frame: GraphFrame, caller: FrameType) -> Slot | None:
        """A slot for what compiled code made, or what depends on it; None for anything else."""
        known = self._recorder.table.find(x)
        if known is None:
            is_replayed = frame.made(x) or saved_by_compiled_code(x, caller)
        else:
            is_replayed = known.needs_replay
        if not is_replayed:
            frame.pass_by(site_of(caller))
            return None
        if self._watch is not None:
            self._watch.saved(x)
        return frame.slot_for(x, site_of(caller))

    def note_just_saved(self, value: RecordedValue) -> None:
        """Autograd saves a value again, which a region inside this one found."""
        self._recorder.note_just_saved(value)

    def get(self, value: RecordedValue) -> Tensor:
        """The tensor of a value, made again if need be."""
        if not is_recording():
            return self._get(value)
        # A backward inside a region: what is done for it is not the region's doing.
        self._recorder.hold_pending()
        tensor = past_modes(self._get, value)
        self._recorder.set_value(tensor, value)
        return tensor

    def _get(self, value: RecordedValue) -> Tensor:
        with self._lock:
            if value.remade is not None:
                return value.remade
            made: list[RecordedValue] = []
            try:
                tensor = value.tensor(made)
                if tensor is None:
                    tensor = self._make(value, made)
                if made:
                    self._made += map(ref, made)
                    self._empty_in_time()
            except BaseException:
                for value in made:
                    value.remade = None
                raise
            return tensor

    def _make(self, value: RecordedValue, made: list[RecordedValue]) -> Tensor:
        task, group = graph_task_id(), exec_group()
        for_good = task != -1 and group is None and not keep_graph() and runs_whole_graph()
        try:
            ops = remake(value, made, for_good)
        except torch.OutOfMemoryError as error:
            annotate_oom(error, self.function)
            raise
        if observation.active and self._watch is not None:
            self._watch.replayed(ops, again=self._replayed_in == _occasion(task, group))
        self._replayed_in = _occasion(task, group)
        tensor = value.remade
        assert tensor is not None, "the last call made it"
        return tensor

    _replayed_in: tuple[str, int] | None = None
    """The backward, or the exec group, in which something was made again."""

    def _empty_in_time(self) -> None:
        """See to it that what was made is let go when the backward ends; at once, if none runs."""
        task, group = graph_task_id(), exec_group()
        if task == -1:
            self.empty()
        elif self._emptied_after != _occasion(task, group):
            if group is None:
                empty_when_backward_ends(self)
            else:
                empty_when_group_dies(group, self)
            self._emptied_after = _occasion(task, group)

    def empty(self) -> None:
        """A backward has ended: let go of what was made for it."""
        with self._lock:
            for weak in self._made:
                value = weak()
                if value is not None:
                    value.remade = None
            self._made = []


def _occasion(task: int, group: Any) -> tuple[str, int]:
    """Who shares what was made: the nodes of one backward, or of the calls of one exec group."""
    return ("backward", task) if group is None else ("group", id(group))


class SelectiveSlot(RecordedSlot):
    """What autograd holds in place of a tensor that it saved."""

    __slots__ = ("_region", "_value", "before")

    def __init__(self, region: SelectiveRegion, value: RecordedValue) -> None:
        self._region = region
        self._value = value
        self.before: fingerprint.Fingerprint | None = None
        """Its content in forward, if it is to be compared."""

    def note_just_saved(self) -> None:
        """A region inside this one saves it again."""
        self._region.note_just_saved(self._value)

    def get(self) -> Tensor:
        held = self._value.held
        if held is not None and not held.is_elsewhere and not is_recording():
            return held.get()
        tensor = self._region.get(self._value)
        if self.before is not None:
            self._check(tensor, self.before)
        return tensor

    def _check(self, tensor: Tensor, before: "fingerprint.Fingerprint") -> None:
        """`determinism_check="values"`."""
        after = fingerprint.take(tensor)
        if after is not None and not torch.equal(before.checksum, after.checksum):
            raise CheckpointError(
                f"{before.what} was made again with other values than in forward: "
                f"{fingerprint.how_much(before, after)}. An op of the region does not repeat "
                "itself; keep its result by the policy, or turn deterministic algorithms on."
            )


@not_compiled
def _unpack(slot: SelectiveSlot | Slot | Kept) -> Tensor:
    return slot.value if isinstance(slot, Slot) else slot.get()


def run(policy: "Policy", function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a region under a policy."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = SelectiveRegion(policy, function, args, kwargs, Options())
    return base.run_region(region, function, args, kwargs)
