"""One call of a region under a policy: recorded in forward, made again from its record."""

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from rekindle import observation
from rekindle.errors import CheckpointError
from rekindle.offload.saved_tensors import KeptTensor
from rekindle.regions.base import Region, Sharing, replay_is_shared_by, run_region
from rekindle.regions.errors import fingerprint
from rekindle.regions.errors.call_sites import frame_at
from rekindle.regions.recompute.slots import Slot
from rekindle.regions.region_options import Options
from rekindle.regions.selective.compiled_code import (
    CompiledCodeRegion,
    may_run_compiled_code,
    note_compiled_code,
    saved_by_compiled_code,
    site_of,
)
from rekindle.regions.selective.held_tensor import RecordedSlot
from rekindle.regions.selective.main_input import main_input
from rekindle.regions.selective.op_graph import RecordedValue, remake
from rekindle.regions.selective.recorder import OpRecorder, is_recording
from rekindle.torch_private.autograd_graph import (
    FUNCTION_APPLY,
    keep_graph,
    runs_whole_graph,
)
from rekindle.torch_private.dispatch_modes import dispatch_modes, past_modes
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.saved_tensor_hooks import top_hooks

if TYPE_CHECKING:
    from rekindle.policies import Policy


class SelectiveRegion(Region):
    """A region whose ops a policy decides about: recorded in forward, made again op by op."""

    _shared_by: Sharing | None = ("no replay yet", 0)
    """The backward, or the exec group, in which something was made again last."""
    _emptied_after: Sharing | None = None
    """The backward, or the exec group, after which the region is emptied."""

    def __init__(
        self,
        policy: "Policy",
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
    ) -> None:
        super().__init__(function)
        self._checks_values = options.determinism_check == "values"
        self._replay: CompiledCodeRegion | None = None
        """Replays compiled code in the region; there only while the forward runs."""
        if may_run_compiled_code(function):
            self._replay = CompiledCodeRegion(function, args, kwargs, options)
        is_replayed = None if self._replay is None else self._replay.made
        self._hooks = top_hooks(False)
        self._recorder = OpRecorder(policy, self._hooks, self, is_replayed)
        if policy.input_decision is not None:
            self._recorder.move_input(main_input(args, kwargs), policy.input_decision)
        self._remade: list[ref[RecordedValue]] = []
        """Values that have their tensors for the backward that runs."""
        self._saved: list[tuple[ref[RecordedValue], observation.Footprint]] = []
        """Values that autograd saved, with their sizes, if somebody observes."""
        if observation.active:
            self.count_forward()

    def __enter__(self) -> None:
        super().__enter__()
        self._recorder.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self._recorder.__exit__(*error)
        finally:
            super().__exit__(*error)

    def end_forward(self, failed: bool) -> None:
        """Hold what backward needs, and count it."""
        held = self._recorder.table.held_values() if self.watch is not None else []
        self._recorder.close(failed)
        self._end_replay(failed)
        if self.watch is not None:
            self._report(self.watch, held)

    def _end_replay(self, failed: bool) -> None:
        """Hold the region's arguments if compiled code in it has to be replayed, and only then."""
        replay, self._replay = self._replay, None
        if replay is None or failed:
            return
        note_compiled_code(self.function, replay.is_used)
        if replay.is_used:
            replay.end(self._hooks)
            if self.watch is not None and self._hooks is None:
                for tensor in replay.inputs.tensors():
                    self.watch.held(tensor)

    def _report(self, watch: observation.Watch, held: list["ref[RecordedValue]"]) -> None:
        """Count what is held now that nothing keeps values alive but what backward needs."""
        for weak in held:
            value = weak()
            if value is not None and value.held is not None:
                tensor = value.held.on_device()
                if tensor is not None:
                    watch.held(tensor)
        for weak, footprint in self._saved:
            value = weak()
            if value is not None and value.held is None:
                watch.count(footprint, "dropped")
        self._saved = []

    def abandon(self) -> None:
        """Stop recording: the forward failed."""
        self._recorder.abandon()
        self._replay = None

    @not_compiled
    def pack(self, x: Tensor) -> "SelectiveSlot | Slot | KeptTensor":
        """OffloadedTensor-tensor hook: a slot for the value that the tensor has now."""
        recorder = self._recorder
        if dispatch_modes() != recorder.modes and recorder.is_inside_a_trace():
            if self._replay is not None:
                self._replay.note_trace(site_of(frame_at(1)))
            return KeptTensor(x)
        if self._replay is not None:
            replayed = self._slot_by_replay(x, self._replay, frame_at(1))
            if replayed is not None:
                return replayed
        elif frame_at(1).f_code is FUNCTION_APPLY and saved_by_compiled_code(x, frame_at(1)):
            note_compiled_code(self.function, True)
        value = recorder.value_saved(x)
        slot = SelectiveSlot(self, value)
        if self.watch is not None:
            footprint = observation.footprint_of(x)
            if footprint is not None:
                self._saved.append((ref(value), footprint))
        if self._checks_values and value.held is None:
            slot.before = past_modes(fingerprint.fingerprint_of, x)
        return slot

    @staticmethod
    @not_compiled
    def unpack(slot: "SelectiveSlot | Slot | KeptTensor") -> Tensor:
        """OffloadedTensor-tensor hook: the tensor of a slot, made again if it has to be."""
        return slot.value if isinstance(slot, Slot) else slot.get()

    def _slot_by_replay(
        self, x: Tensor, replay: CompiledCodeRegion, caller: FrameType
    ) -> Slot | None:
        """A slot for what compiled code made, or what depends on it; None for anything else."""
        known = self._recorder.table.find(x)
        if known is None:
            is_replayed = replay.made(x) or saved_by_compiled_code(x, caller)
        else:
            is_replayed = known.needs_replay
        if not is_replayed:
            replay.pass_by(site_of(caller))
            return None
        if self.watch is not None:
            self.watch.saved(x)
        return replay.slot_for(x, site_of(caller))

    def note_just_saved(self, value: RecordedValue) -> None:
        """Note that a region inside this one has autograd save a value of this one again."""
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
        with self.lock:
            if value.remade is not None:
                return value.remade
            remade: list[RecordedValue] = []
            try:
                tensor = value.tensor(remade)
                if tensor is None:
                    tensor = self._remake(value, remade)
                if remade:
                    self._remade += map(ref, remade)
                    self._empty_after_backward()
            except BaseException:
                for value in remade:
                    value.remade = None
                raise
            return tensor

    def _remake(self, value: RecordedValue, remade: list[RecordedValue]) -> Tensor:
        """Run the ops again that make a value; what else they make is added to `remade`."""
        shared_by = replay_is_shared_by()
        for_good = (
            shared_by is not None
            and shared_by[0] == "backward"
            and not keep_graph()
            and runs_whole_graph()
        )
        ops = self.with_oom_note(remake, value, remade, for_good)
        if observation.active and self.watch is not None:
            self.watch.replayed(ops, again=shared_by == self._shared_by)
        self._shared_by = shared_by
        tensor = value.remade
        assert tensor is not None, "the last op made it"
        return tensor

    def _empty_after_backward(self) -> None:
        """Have what was made let go when nobody shares it any more, asked for once."""
        shared_by = replay_is_shared_by()
        if shared_by is None or self._emptied_after != shared_by:
            self.empty_when_unshared()
            self._emptied_after = shared_by

    def release(self) -> None:
        """Let go of the tensors that were made again."""
        for weak in self._remade:
            value = weak()
            if value is not None:
                value.remade = None
        self._remade = []


class SelectiveSlot(RecordedSlot):
    """A saved tensor, as the value that it had."""

    __slots__ = ("_region", "_value", "before")

    def __init__(self, region: SelectiveRegion, value: RecordedValue) -> None:
        self._region = region
        self._value = value
        self.before: fingerprint.Fingerprint | None = None
        """Fingerprint of the content in forward, if it is to be compared."""

    def note_just_saved(self) -> None:
        self._region.note_just_saved(self._value)

    def get(self) -> Tensor:
        """The tensor: held, or made again."""
        held = self._value.held
        if held is not None and not held.is_elsewhere and not is_recording():
            return held.get()
        tensor = self._region.get(self._value)
        if self.before is not None:
            self._check(tensor, self.before)
        return tensor

    def _check(self, tensor: Tensor, before: "fingerprint.Fingerprint") -> None:
        """Raise if the content differs: `determinism_check="values"`."""
        after = fingerprint.fingerprint_of(tensor)
        if after is not None and not torch.equal(before.checksum, after.checksum):
            raise CheckpointError(
                f"{before.what} was made again with other values than in forward: "
                f"{fingerprint.format_change(before, after)}. An op of the region does not repeat "
                "itself; keep its result by the policy, or turn deterministic algorithms on."
            )


def run(policy: "Policy", function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a region under a policy."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = SelectiveRegion(policy, function, args, kwargs, Options())
    return run_region(region, function, args, kwargs)
