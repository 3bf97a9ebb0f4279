"""The dispatch mode that records a region's forward, and asks the policy about each result."""

from collections.abc import Callable, Sequence
from threading import local
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from rekindle.regions.base import is_replaying
from rekindle.regions.recompute import rng_state
from rekindle.regions.selective import kernel_backends
from rekindle.regions.selective.compiled_code import called_by_generated_code
from rekindle.regions.selective.decisions import AS_PLANNED, Decision
from rekindle.regions.selective.held_tensor import Hooks, nbytes_of
from rekindle.regions.selective.offload_bridge import hooks_of, pause
from rekindle.regions.selective.op_addresses import (
    PlannedOpCounter,
    block_of,
    depends_on_parameters_alone,
    forget,
)
from rekindle.regions.selective.op_graph import (
    RecordedOp,
    RecordedValue,
    Settings,
    shows_a_parameter,
    source_bytes,
    tensors_of,
)
from rekindle.regions.selective.op_kinds import OpKind, OpTraits, can_be_run_again
from rekindle.regions.selective.policy_contexts import PolicyState
from rekindle.regions.selective.tensor_table import NO_TENSORS, TensorTable
from rekindle.torch_private.cuda import is_capturing
from rekindle.torch_private.dispatch_modes import (
    FAKE,
    PROXY,
    TorchDispatchMode,
    dispatch_modes,
    entered_mode,
)
from rekindle.torch_private.grad_mode import grad_enabled
from rekindle.torch_private.inductor import inductor_has_written
from rekindle.torch_private.op_types import schema_of

if TYPE_CHECKING:
    from rekindle.regions.selective.policy_kinds import Policy

_METADATA, _CHANGES = OpKind.METADATA, OpKind.CHANGES
_KEEP, _RECOMPUTE = Decision.KEEP, Decision.RECOMPUTE
_PLANNED = frozenset(AS_PLANNED.values())


class _ThreadState(local):
    """The regions that are recorded on this thread, and whether they are to record what runs."""

    is_paused = False
    """True while ops of rekindle's own run, which are no region's."""
    is_saving = False
    """True while such ops run because autograd saves a tensor just now."""

    def __init__(self) -> None:
        self.recorders: list[OpRecorder] = []
        """Recorders of the regions whose forwards run, the innermost last."""


_thread = _ThreadState()


def _unrecorded(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose ops no region is to record."""
    thread = _thread
    was = thread.is_paused
    thread.is_paused = True
    try:
        return function(*args)
    finally:
        thread.is_paused = was


def _unrecorded_for_save(is_saving: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function unrecorded; `is_saving`: autograd is saving the tensor that it is to hold."""
    was = _thread.is_saving
    try:
        _thread.is_saving = is_saving
        return _unrecorded(function, *args)
    finally:
        _thread.is_saving = was


def is_recording() -> bool:
    """Returns whether a region is being recorded on this thread."""
    return bool(_thread.recorders)


def name_tensor(tensor: Tensor, name: str) -> None:
    """Give a tensor a name in every region that is being recorded."""
    for recorder in _thread.recorders:
        recorder.name(tensor, name)


class OpRecorder(TorchDispatchMode):
    """Records the ops of one region: entered around its forward."""

    supports_higher_order_operators = True

    def __init__(
        self,
        policy: "Policy",
        hooks: Hooks | None,
        region: Any = None,
        is_replayed: Callable[[Tensor], bool] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = policy
        self._hooks = hooks
        self.table = TensorTable(hooks, is_replayed)
        self._may_replay = is_replayed is not None
        self._traits = _traits_under(policy)
        self._by_number = policy.by_number
        self._by_address = policy.by_address
        self._counter: PlannedOpCounter | None = None
        if policy.by_address:
            self._block = block_of(region.function)
            if self._block is not None:
                self._counter = PlannedOpCounter(policy.by_address, self._block)
        self._state = PolicyState(region)
        self._fake = entered_mode(FAKE)
        self._proxy_mode = entered_mode(PROXY)
        self.modes = dispatch_modes() + 1
        """Number of modes up to this one; 0 if one of them makes a graph, or fake tensors."""
        if self._fake is not None or self._proxy_mode is not None:
            self.modes = 0
        self._used_tiers: set[Decision] = set()
        self._was_paused = _thread.is_paused

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep the compiler out of every op costs as much as recording it

    def __enter__(self) -> Any:
        _thread.recorders.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        _thread.recorders.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        """Stop recording, however far `__enter__` or `__exit__` has come."""
        if self in _thread.recorders:
            _thread.recorders.remove(self)
        _thread.is_paused = self._was_paused

    def close(self, failed: bool) -> None:
        """End the region: hand what tiers are to hold to them, and let go of the rest."""
        try:
            _unrecorded(self.table.close, failed)
        finally:
            pause(self._used_tiers, failed)
        if self._counter is not None and not failed:
            self._check_addresses(self._counter)

    def move_input(self, tensor: Tensor | None, decision: Decision) -> None:
        """Have a tensor that the region is given moved, when it comes to hold it."""
        if tensor is not None:
            self.table.hooks_of_input = id(tensor), self._hooks_for(decision)

    def is_inside_a_trace(self) -> bool:
        """Returns whether an op of the region runs others to make a graph: they are not its own.

        It need not be asked while there are `modes`: whoever makes a graph enters one more.
        """
        return entered_mode(FAKE) is not self._fake or entered_mode(PROXY) is not self._proxy_mode

    def hold_pending(self) -> None:
        """Hold what the last op made, if it is to be held."""
        _unrecorded(self.table.hold_pending)

    def set_value(self, tensor: Tensor, value: RecordedValue) -> None:
        """Note that a backward inside the region was given a tensor for a value."""
        if self in _thread.recorders:
            self.table.set_value(tensor, value)

    def value_saved(self, tensor: Tensor) -> RecordedValue:
        """The value of a tensor that autograd saves."""
        table = self.table
        # False if a region inside hands on a tensor that it holds, made and saved earlier.
        is_saved = _thread.is_saving or not _thread.is_paused
        value = table.find(tensor)
        if value is None:
            value = _unrecorded_for_save(is_saved, table.value_of, tensor)
        elif value.held is None:
            if _is_view_of_held(value):
                _unrecorded_for_save(is_saved, table.hold, tensor, value, None)  # costs no memory
        elif is_saved:
            value.note_just_saved()
        if is_saved:
            table.just_saved.add(value)
        return value

    def note_just_saved(self, value: RecordedValue) -> None:
        """Note that a region inside this one has autograd save a value of this one again."""
        self.table.just_saved.add(value)
        value.note_just_saved()

    def name(self, tensor: Tensor, name: str) -> None:
        """Hold a tensor that was given a name, if the policy wants that."""
        value = self.table.find(tensor)
        if value is None or value.held is not None or self.table.is_pending(value):
            return
        ctx = self._state.context(None, tensor, (), {}, is_recompute=False)
        decision = self._policy.decide_named(name, ctx)
        if decision is None or decision is _RECOMPUTE:
            return
        self.table.hold_after_op(tensor, value, name, self._hooks_for(decision))

    def _hooks_for(self, decision: Decision) -> Hooks | None:
        """The hooks that are to hold a result: those around the region, if any, or a tier's.

        In a replay nothing goes to a tier: it is used at once.
        """
        is_kept = decision is _KEEP or decision is _RECOMPUTE
        if is_kept or self._hooks is not None or is_replaying() or is_capturing():
            return self._hooks
        self._used_tiers.add(decision)
        return hooks_of(decision)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        thread = _thread
        if thread.is_paused or (dispatch_modes() + 1 != self.modes and self.is_inside_a_trace()):
            return func(*args, **(kwargs or {}))
        traits = self._traits.get(id(func))
        if traits is None:
            traits = self._traits[id(func)] = OpTraits(func)
        kind = traits.kind
        if kind is _METADATA or (
            inductor_has_written() and kind is not _CHANGES and called_by_generated_code()
        ):
            return func(*args, **(kwargs or {}))
        if self.table.pending:  # not by `_unrecorded`: this is the hot path
            thread.is_paused = True
            try:
                self.table.hold_pending()
            finally:
                thread.is_paused = False
        rng = None
        if traits.is_pure:
            out = traits.call(*args, **kwargs) if kwargs else traits.call(*args)
        elif can_be_run_again(kind, args, kwargs):
            rng = rng_state.snapshot(()) if kind is OpKind.RANDOM else None
            out = func(*args, **(kwargs or {}))
        else:
            return self._run_once(func, kind, args, kwargs or {})
        thread.is_paused = True
        try:
            self._record(traits, out, args, kwargs or {}, rng)
        finally:
            thread.is_paused = False
        return out

    def _record(
        self, traits: OpTraits, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rng: Any
    ) -> None:
        """Record an op that can be run again, and what it made."""
        table = self.table
        self._state.number += 1
        if table.just_saved:
            table.just_saved.clear()
        decision = traits.decision
        if decision is None:
            decision = self._decide(traits, out, args, kwargs)
        tensors = (out,) if type(out) is Tensor else tensors_of(out)
        if traits.is_view:
            if table.has_unwritten and args and table.is_unwritten(args[0]):
                table.add_unwritten(tensors, traits.func)
                return
        elif decision is _KEEP:  # how it was made is of no interest
            for tensor in tensors:
                table.hold_after_op(tensor, RecordedValue(None), traits.func, self._hooks)
            return
        op = self._recorded(traits, args, kwargs, rng)
        inputs = op.inputs
        if decision is not _RECOMPUTE and traits.is_view and shows_a_parameter(op):
            decision = _RECOMPUTE  # whose memory may be exchanged
        from_parameters = _are_from_parameters(inputs)
        needs_replay = self._may_replay and decision is _RECOMPUTE and _need_replay(inputs)
        for tensor in tensors:
            value = RecordedValue(op)
            value.from_parameters = from_parameters
            value.needs_replay = needs_replay
            op.outputs.append(ref(value))
            # A nested tensor is always held: made again, its sizes would have other names.
            if decision is not _RECOMPUTE or (type(tensor) is not Tensor and tensor.is_nested):
                hooks, at_once = self._hooks_for(decision), decision in _PLANNED
                table.hold_after_op(tensor, value, traits.func, hooks, at_once)
            else:
                table.set_value(tensor, value)

    def _recorded(
        self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any], rng: Any
    ) -> RecordedOp:
        """An op with values in place of tensors, and with the settings that decide what it does."""
        table = self.table
        count = traits.leading
        while count and type(args[count - 1]) in NO_TENSORS:  # a number in the place of a tensor
            count -= 1
        inputs = table.values_of(args[:count]) if count else None
        if inputs is not None:
            op = RecordedOp(traits, inputs, args[count:], kwargs, is_flat=True)
        else:
            inputs = []
            args = table.values_for(args, inputs)
            kwargs = table.values_for_kwargs(kwargs, inputs)
            op = RecordedOp(traits, inputs, args, kwargs, is_flat=False)
        if traits.has_settings or rng is not None:
            op.settings = Settings(
                rng,
                kernel_backends.snapshot() if traits.depends_on_backends else None,
                grad_enabled() if traits.depends_on_grad_mode else None,
            )
        return op

    def _run_once(
        self, func: Any, kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op that is never run again: Note [What is not made again]."""
        table = self.table
        changed: list[Tensor] = []
        if kind is _CHANGES:
            changed = _changed_arguments(func, args, kwargs)
        elif kind is OpKind.OPAQUE:
            changed = [x for x in tensors_of([*args, *kwargs.values()]) if not x.requires_grad]
        keys = _unrecorded(table.copy_before_change, changed)
        table.just_saved.clear()
        out = func(*args, **kwargs)
        if changed:
            _unrecorded(table.forget_changed, changed, keys)
        if kind is OpKind.UNWRITTEN or kind is OpKind.FILLED:
            table.add_unwritten(tensors_of(out), func)
        elif kind is not _CHANGES:
            for tensor in tensors_of(out):
                _unrecorded(table.hold, tensor, RecordedValue(None), func)
        return out

    def _decide(
        self, traits: OpTraits, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Decision:
        """The decision on an op's result: by address, by number, or as the policy says."""
        if self._by_address is not None:
            if traits.name not in self._by_address:
                traits.decision = _RECOMPUTE  # the policy's own traits, whose names only get fewer
                return _RECOMPUTE
            return self._decide_by_address(traits.name, (*args, *kwargs.values()))
        if self._by_number is not None:
            return self._by_number.get(self._state.number, _RECOMPUTE)
        return self._ask_policy(traits, out, args, kwargs)

    def _decide_by_address(self, name: str, given: tuple[Any, ...]) -> Decision:
        """The decision by the op's address; `given` are all arguments of the op."""
        counter = self._counter
        if counter is None:
            return _RECOMPUTE
        if depends_on_parameters_alone(given, self.table.is_from_parameters):
            return _RECOMPUTE
        return counter.decide_next(name)

    def _ask_policy(
        self, traits: OpTraits, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Decision:
        """Ask the policy about an op's result, and whether the op's arguments are to be kept."""
        if traits.is_ignored:
            return _RECOMPUTE
        policy = self._policy
        ctx = self._state.context(traits.func, out, args, kwargs, is_recompute=False)
        decision = policy.decide(ctx) or _RECOMPUTE
        if policy.keeps_inputs(ctx):
            self._keep_inputs(args)
        elif policy.by_op_alone:
            traits.decision = decision
        return decision

    def _keep_inputs(self, args: tuple[Any, ...]) -> None:
        """Keep an op's arguments rather than what they were made from, where that is as large."""
        for tensor in tensors_of(args):
            value = self.table.value_of(tensor)
            if value.held is None and nbytes_of(tensor) <= source_bytes(value):
                self.table.hold(tensor, value, "an input that is kept")

    def _check_addresses(self, counter: PlannedOpCounter) -> None:
        """Have the policy check that the block ran what it was planned for."""
        block = self._block
        if block is None or not block.training:  # then dropout does not run, and no plan is for it
            return
        if not self._policy.matches(counter, type(block).__name__):
            forget(block)


_traits_by_policy: dict[Any, dict[int, OpTraits]] = {}
"""Traits of ops under each policy that looks at ops alone, with what it has decided so far."""

_TRAITS: dict[int, OpTraits] = {}
"""Traits of ops under all other policies."""


def _traits_under(policy: "Policy") -> dict[int, OpTraits]:
    """Traits of ops under a policy, by the id of each op."""
    if policy.by_address is not None:
        return policy.op_traits
    return _traits_by_policy.setdefault(policy, {}) if policy.by_op_alone else _TRAITS


def _is_view_of_held(value: RecordedValue) -> bool:
    """True if a value that is not held is a view of one that is held here."""
    while value.held is None:
        op = value.op
        if op is None or not op.traits.is_view or not op.inputs:
            return False
        value = op.inputs[0]
    return value.held.can_have_views


def _need_replay(inputs: Sequence[RecordedValue]) -> bool:
    """True if only a replay of the region makes an input again."""
    return any(value.needs_replay for value in inputs)


def _are_from_parameters(inputs: Sequence[RecordedValue]) -> bool:
    """True if parameters alone decide all inputs, and there is one."""
    if not inputs or not inputs[0].from_parameters:
        return False
    return all(value.from_parameters for value in inputs)


def _changed_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an op changes, by its schema."""
    found: list[Tensor] = []
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name)
            if position < len(args):
                given = args[position]
            found += tensors_of(given)
    return found
