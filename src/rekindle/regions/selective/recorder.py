"""Records a region's forward, op by op, and asks the policy what becomes of each result."""

from collections.abc import Callable
from threading import local
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from rekindle.regions.base import is_replaying
from rekindle.regions.recompute import rng_state as random_state
from rekindle.regions.selective import kernel_backends
from rekindle.regions.selective.compiled_code import called_by_generated_code
from rekindle.regions.selective.decisions import AS_PLANNED, Decision
from rekindle.regions.selective.offload_bridge import hooks_of, pause
from rekindle.regions.selective.op_addresses import (
    PlannedOpCounter,
    block_of,
    depends_on_parameters_alone,
    forget,
)
from rekindle.regions.selective.op_graph import (
    Call,
    Hooks,
    Value,
    is_of_a_parameter,
    nbytes_of,
    note_just_saved,
    source_bytes,
    tensors_of,
)
from rekindle.regions.selective.op_kinds import (
    Kind,
    can_be_run_again,
    depends_on_backends,
    depends_on_grad_mode,
    kind_of,
)
from rekindle.regions.selective.policy_contexts import Counter
from rekindle.regions.selective.tensor_table import Book
from rekindle.torch_private.cuda import capturing
from rekindle.torch_private.dispatch_modes import FAKE, PROXY, TorchDispatchMode, entered_mode
from rekindle.torch_private.op_types import schema_of
from rekindle.torch_private.torch_checkpoint import SAC_IGNORED_OPS

if TYPE_CHECKING:
    from rekindle.policies import Policy

_PURE, _VIEW, _FILLED, _METADATA = Kind.PURE, Kind.VIEW, Kind.FILLED, Kind.METADATA
_RECOMPUTE = Decision.RECOMPUTE


class _Running(local):
    """The regions that are recorded on this thread, the innermost last."""

    is_blind = False
    """Whether what runs now is the engine's doing, and no region's."""
    is_saving = False
    """Whether that is done for a tensor that autograd saves just now."""

    def __init__(self) -> None:
        self.modes: list[RecordMode] = []


_running = _Running()


def _blindly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; what it runs is the engine's doing."""
    running = _running
    was = running.is_blind
    running.is_blind = True
    try:
        return function(*args)
    finally:
        running.is_blind = was


def _saving(enable: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function blindly; what it holds is what autograd saves just now, or is not."""
    was = _running.is_saving
    try:
        _running.is_saving = enable
        return _blindly(function, *args)
    finally:
        _running.is_saving = was


def is_recording() -> bool:
    """Whether a region is being recorded on this thread."""
    return bool(_running.modes)


def name_tensor(tensor: Tensor, name: str) -> None:
    """A tensor gets a name in every region that is being recorded."""
    for mode in _running.modes:
        mode.name(tensor, name)


class RecordMode(TorchDispatchMode):
    """Entered around a region's forward."""

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
        self.book = Book(hooks, is_replayed)
        self._may_replay = is_replayed is not None
        self._ops = _remembered(policy)
        self._by_number = policy.by_number
        self._by_address = policy.by_address
        self._addresses: PlannedOpCounter | None = None
        if policy.by_address:
            self._block = block_of(region.function)
            if self._block is not None:
                self._addresses = PlannedOpCounter(policy.by_address, self._block)
        self._counter = Counter(region)
        self._fake = entered_mode(FAKE)
        self._tracer = entered_mode(PROXY)
        self._tiers: set[Decision] = set()
        self._was_blind = _running.is_blind

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep the compiler out of every op costs as much as noting it

    def __enter__(self) -> Any:
        _running.modes.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        _running.modes.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        """It is not entered any more, however far its beginning or its end has come."""
        running = _running
        if self in running.modes:
            running.modes.remove(self)
        running.is_blind = self._was_blind

    def is_inside_a_trace(self) -> bool:
        """Whether an op of the region runs others to make a graph: they are not the region's."""
        return entered_mode(FAKE) is not self._fake or entered_mode(PROXY) is not self._tracer

    def settle(self) -> None:
        """What the last op made is held from now on, if it is to be."""
        _blindly(self.book.settle)

    def know(self, tensor: Tensor, value: Value) -> None:
        """A backward inside the region was given this tensor for a value."""
        if self in _running.modes:
            self.book.enter(tensor, value)

    def saved(self, tensor: Tensor) -> Value:
        """The value of a tensor that autograd saves."""
        book = self.book
        # Else a region inside this one hands on what it holds, which was made, and saved, before.
        is_saved = _running.is_saving or not _running.is_blind
        value = book.find(tensor)
        if value is None or (value.held is None and self._shows_what_is_held(value)):
            if value is None:
                value = _saving(is_saved, book.value_of, tensor)
            else:
                _saving(is_saved, book.hold, tensor, value, None)  # which costs no memory
        elif is_saved:
            note_just_saved(value)
        if is_saved:
            book.just_saved.add(value)
        return value

    def _shows_what_is_held(self, value: Value) -> bool:
        """Whether a value is a view of one that is held here."""
        while value.held is None and value.maker is not None:
            op = self._ops.get(id(value.maker.func))
            if op is None or op.kind is not _VIEW or not value.maker.inputs:
                return False
            value = value.maker.inputs[0]
        return value.held is not None and value.held.can_be_shown

    def note_just_saved(self, value: Value) -> None:
        """Autograd saves a value of this region again, which a region inside it found."""
        self.book.just_saved.add(value)
        note_just_saved(value)

    def name(self, tensor: Tensor, name: str) -> None:
        """A tensor gets a name: perhaps the policy wants it held for that."""
        value = self.book.find(tensor)
        if value is None or value.held is not None or self.book.is_to_be_held(value):
            return
        ctx = self._counter.context(None, tensor, (), {}, is_recompute=False)
        decision = self._policy.decide_named(name, ctx)
        if decision is None or decision is _RECOMPUTE:
            return
        self.book.hold_soon(tensor, value, name, self._hooks_of(decision))

    def close(self, failed: bool) -> None:
        """The forward is over."""
        try:
            _blindly(self.book.close, failed)
        finally:
            pause(self._tiers, failed)
        if self._addresses is not None and not failed:
            self._check_addresses(self._addresses)

    def _hooks_of(self, decision: Decision) -> Hooks | None:
        """Who is to hold what has a decision: hooks around the region, if any, such as a region's.

        What a replay saves is used at once, so there it is kept.
        """
        is_kept = decision is Decision.KEEP or decision is _RECOMPUTE
        if is_kept or self._hooks is not None or is_replaying() or capturing():
            return self._hooks
        self._tiers.add(decision)
        return hooks_of(decision)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (  # the last two are `is_inside_a_trace`, without the call
            _running.is_blind
            or entered_mode(FAKE) is not self._fake
            or entered_mode(PROXY) is not self._tracer
        ):
            return func(*args, **(kwargs or {}))
        op = self._ops.get(id(func))
        if op is None:
            op = self._ops[id(func)] = _Op(func)
        kind = op.kind
        if kind is _METADATA or (called_by_generated_code() and kind is not Kind.CHANGES):
            return func(*args, **(kwargs or {}))
        if self.book.fresh:
            _running.is_blind = True
            try:
                self.book.settle()
            finally:
                _running.is_blind = False
        rng = None
        if kind is _PURE or kind is _VIEW:
            out = func(*args, **kwargs) if kwargs else func(*args)
        elif can_be_run_again(kind, args, kwargs):
            rng = random_state.take(()) if kind is Kind.RANDOM else None
            out = func(*args, **(kwargs or {}))
        else:
            return self._run_loose(func, kind, args, kwargs or {})
        running = _running
        running.is_blind = True  # not `_blindly`: this is the hot path
        try:
            self._record(op, out, args, kwargs or {}, rng)
        finally:
            running.is_blind = False
        return out

    def _record(
        self, op: "_Op", out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rng: Any
    ) -> None:
        """Note an op that can be run again, and what it made."""
        book = self.book
        self._counter.number += 1
        if book.just_saved:
            book.just_saved.clear()
        decision = op.decision
        if self._by_address is not None:
            decision = self._decide_at_address(
                op.name, (*args, *kwargs.values()) if kwargs else args
            )
        elif self._by_number is not None:
            decision = self._by_number.get(self._counter.number, _RECOMPUTE)
        elif decision is None or op.keeps_inputs:
            decision = self._ask(op, out, args, kwargs)
        tensors = (out,) if isinstance(out, Tensor) else tensors_of(out)
        if op.kind is _VIEW and book.unwritten and args and book.is_unwritten(args[0]):
            book.leave_unwritten(tensors, op.func)
            return
        if decision is Decision.KEEP and op.kind is not _VIEW:  # how it was made is of no interest
            for tensor in tensors:
                book.hold_soon(tensor, Value(None), op.func, self._hooks)
            return
        inputs: list[Value] = []
        noted = book.noted(args, inputs)
        call = Call(op.func, noted, kwargs and book.noted_kwargs(kwargs, inputs), inputs)
        call.rng = rng
        call.needs_grad = op.needs_grad
        if op.needs_switches:
            call.switches = kernel_backends.take()
        if op.kind is _VIEW and decision is not _RECOMPUTE and is_of_a_parameter(call):
            decision = _RECOMPUTE  # whose memory may be exchanged
        is_fixed = self._addresses is not None and _are_fixed(inputs)
        needs_replay = self._may_replay and decision is _RECOMPUTE and _need_replay(inputs)
        for tensor in tensors:
            value = Value(call)
            value.is_fixed = is_fixed
            value.needs_replay = needs_replay
            call.outs.append(ref(value))
            if decision is not _RECOMPUTE or (type(tensor) is not Tensor and tensor.is_nested):
                at_once = decision in AS_PLANNED.values()
                book.hold_soon(tensor, value, op.func, self._hooks_of(decision), at_once)
            else:  # of a nested tensor that is made again, sizes would have other names
                book.enter(tensor, value)

    def _run_loose(
        self, func: Any, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op that is not made again: Note [What is not made again]."""
        book = self.book
        changed: list[Tensor] = []
        if kind is Kind.CHANGES:
            changed = _changed(func, args, kwargs)
        elif kind is Kind.OPAQUE:
            changed = [x for x in tensors_of([*args, *kwargs.values()]) if not x.requires_grad]
        keys = _blindly(book.will_change, changed)
        book.just_saved.clear()
        out = func(*args, **kwargs)
        if changed:
            _blindly(book.has_changed, changed, keys)
        if kind is Kind.LOOSE or kind is _FILLED:
            book.leave_unwritten(tensors_of(out), func)
        elif kind is not Kind.CHANGES:
            for tensor in tensors_of(out):
                _blindly(book.hold, tensor, Value(None), func)
        return out

    def _decide_at_address(self, name: str, given: tuple[Any, ...]) -> Decision:
        """The decision of an op's result by its address; `given` is all that the op was given."""
        addresses = self._addresses
        if addresses is None or name not in addresses.counts:
            return _RECOMPUTE
        if depends_on_parameters_alone(given, self.book.is_fixed):
            return _RECOMPUTE
        return addresses.decide_next(name)

    def _check_addresses(self, addresses: PlannedOpCounter) -> None:
        """Have the policy see whether the block ran what it was planned for."""
        block = self._block
        if block is None or not block.training:  # then dropout does not run, and no plan is for it
            return
        if not self._policy.matches(addresses, type(block).__name__):
            forget(block)

    def _ask(self, op: "_Op", out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        """Ask the policy what becomes of an op's result, and of what it was given."""
        if op.is_ignored:
            return _RECOMPUTE
        policy = self._policy
        ctx = self._counter.context(op.func, out, args, kwargs, is_recompute=False)
        decision = policy.decide(ctx) or _RECOMPUTE
        keeps_inputs = policy.keeps_inputs(ctx)
        if keeps_inputs:
            self._keep_inputs(args)
        if policy.by_op_alone:
            op.decision, op.keeps_inputs = decision, keeps_inputs
        return decision

    def _keep_inputs(self, args: tuple[Any, ...]) -> None:
        """Keep what an op was given rather than what that was made from, where it is as large."""
        for tensor in tensors_of(args):
            value = self.book.value_of(tensor)
            if value.held is None and nbytes_of(tensor) <= source_bytes(value):
                self.book.hold(tensor, value, "an input that is kept")


class _Op:
    """How an op is treated under a policy."""

    __slots__ = (
        *("decision", "func", "is_ignored", "keeps_inputs", "kind", "name", "needs_grad"),
        "needs_switches",
    )

    def __init__(self, func: Any) -> None:
        self.func = func  # so that its id, by which this is found, stays its own
        self.kind = kind_of(func)
        self.name = func.name() if hasattr(func, "name") else str(func)
        self.is_ignored = func in SAC_IGNORED_OPS
        self.decision: Decision | None = None
        """What the policy said of it, if it says the same every time."""
        self.keeps_inputs = False
        """Whether it said, too, that what the op is given is to be kept."""
        self.needs_switches = depends_on_backends(func)
        self.needs_grad = depends_on_grad_mode(func)


_ops_of: dict[Any, dict[int, _Op]] = {}
"""For each policy that looks at ops alone, what it has said of them so far."""


_OPS: dict[int, _Op] = {}
"""What is known of ops under all other policies."""


def _remembered(policy: "Policy") -> dict[int, _Op]:
    return _ops_of.setdefault(policy, {}) if policy.by_op_alone else _OPS


def _need_replay(inputs: list[Value]) -> bool:
    """Whether anything that an op was given comes back by a replay of the region alone."""
    return any(value.needs_replay for value in inputs)


def _are_fixed(inputs: list[Value]) -> bool:
    """Whether parameters alone decide all that an op was given."""
    return bool(inputs) and inputs[0].is_fixed and all(value.is_fixed for value in inputs)


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an op changes, by its schema."""
    found: list[Tensor] = []
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name)
            if position < len(args):
                given = args[position]
            found += tensors_of(given)
    return found
