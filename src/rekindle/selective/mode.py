"""Records a region's forward, op by op, and asks the policy what becomes of each result."""

from threading import local
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.compiled.handover import SAC_IGNORED_OPS
from rekindle.internals import FAKE, capturing, fake_mode, grad_enabled
from rekindle.replay import rng as random_state
from rekindle.replay.switches import recomputing
from rekindle.selective import backends
from rekindle.selective.book import Book
from rekindle.selective.contexts import Counter
from rekindle.selective.fates import Fate
from rekindle.selective.kinds import Kind, depends_on_backends, kind_of
from rekindle.selective.record import Call, Hooks, Value, nbytes_of, source_bytes, tensors_of
from rekindle.selective.tiers import hooks_of, pause

if TYPE_CHECKING:
    from rekindle.policies import Policy

_PURE, _VIEW, _FILLED = Kind.PURE, Kind.VIEW, Kind.FILLED
_RECOMPUTE = Fate.RECOMPUTE


class _Running(local):
    """The regions that are recorded on this thread, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[RecordMode] = []


_running = _Running()


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

    def __init__(self, policy: "Policy", hooks: Hooks | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = policy
        self._hooks = hooks
        self.book = Book(hooks)
        self._ops = _remembered(policy)
        self._counter = Counter()
        self._is_blind = False
        """Whether what runs now is not the region's."""
        self._fake = fake_mode(FAKE)
        self._tiers: set[Fate] = set()

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

    def know(self, tensor: Tensor, value: Value) -> None:
        """A backward inside the region was given this tensor for a value."""
        if self in _running.modes:
            self.book.enter(tensor, value)

    def saved(self, tensor: Tensor) -> Value:
        """The value of a tensor that autograd saves."""
        book = self.book
        value = book.find(tensor)
        if value is None or (value.held is None and self._shows_what_is_held(value)):
            self._is_blind = True
            try:
                if value is None:
                    value = book.value_of(tensor)
                else:
                    book.hold(tensor, value, None)  # which costs no memory
            finally:
                self._is_blind = False
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

    def settle(self) -> None:
        """What the last op made is held from now on, if it is to be."""
        self._is_blind = True
        try:
            self.book.settle()
        finally:
            self._is_blind = False

    def name(self, tensor: Tensor, name: str) -> None:
        """A tensor gets a name: perhaps the policy wants it held for that."""
        fate = self._policy.fate_of_name(name)
        value = self.book.find(tensor)
        if fate is None or fate is _RECOMPUTE or value is None or value.held is not None:
            return
        self.book.hold_soon(tensor, value, name, self._hooks_of(fate))

    def close(self, failed: bool) -> None:
        """The forward is over."""
        try:
            self.book.close(failed)
        finally:
            pause(self._tiers, failed)

    def _hooks_of(self, fate: Fate) -> Hooks | None:
        """Who is to hold what has a fate: hooks around the region, if any, such as a region's.

        What a replay saves is used at once, so there it is kept.
        """
        is_kept = fate is Fate.KEEP or fate is _RECOMPUTE
        if is_kept or self._hooks is not None or recomputing.get() or capturing():
            return self._hooks
        self._tiers.add(fate)
        return hooks_of(fate)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._is_blind or fake_mode(FAKE) is not self._fake:  # the latter: somebody traces
            return func(*args, **(kwargs or {}))
        book = self.book
        if book.fresh:
            book.settle()
        op = self._ops.get(id(func))
        if op is None:
            op = self._ops[id(func)] = _Op(func, self._policy)
        kind = op.kind
        rng = None
        if kind is _PURE or kind is _VIEW or (kind is _FILLED and grad_enabled()):
            out = func(*args, **kwargs) if kwargs else func(*args)
        elif kind is Kind.RANDOM and not (kwargs and kwargs.get("generator") is not None):
            rng = random_state.take(())
            out = func(*args, **(kwargs or {}))
        else:
            return self._run_loose(func, kind, args, kwargs or {})
        if book.just_saved:
            book.just_saved.clear()
        inputs: list[Value] = []
        noted = book.noted(args, inputs)
        call = Call(func, noted, kwargs and book.noted_kwargs(kwargs, inputs), inputs)
        call.rng = rng
        if op.is_special:
            self._treat(op, call, args)
        fate = op.fate or self._fate(func, out, args, kwargs or {})
        for tensor in (out,) if isinstance(out, Tensor) else tensors_of(out):
            value = Value(call)
            call.outs.append(ref(value))
            if fate is not _RECOMPUTE or tensor.is_nested:  # which has other ids if made again
                book.hold_soon(tensor, value, func, self._hooks_of(fate))
            else:
                book.enter(tensor, value)
        return out

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
        keys = book.will_change(changed)
        book.just_saved.clear()
        out = func(*args, **kwargs)
        if changed:
            book.has_changed(changed, keys)
        if kind is not Kind.CHANGES:
            for tensor in tensors_of(out):
                book.hold(tensor, Value(None), func)
        return out

    def _treat(self, op: "_Op", call: Call, args: tuple[Any, ...]) -> None:
        """What most ops do not ask for."""
        if op.needs_switches:
            call.switches = backends.take()
        if not op.keeps_inputs:
            return
        for tensor in tensors_of(args):
            value = self.book.value_of(tensor)
            if value.held is None and nbytes_of(tensor) <= source_bytes(value):
                self.book.hold(tensor, value, "an input that is kept")

    def _fate(self, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fate:
        """Ask the policy."""
        if self._ops[id(func)].is_ignored:
            return _RECOMPUTE
        ctx = self._counter.context(func, out, args, kwargs, is_recompute=False)
        fate = self._policy.fate(ctx) or _RECOMPUTE
        if self._policy.by_op_alone:
            self._ops[id(func)].fate = fate
        return fate


class _Op:
    """How an op is treated under a policy."""

    __slots__ = (
        "fate",
        "func",
        "is_ignored",
        "is_special",
        "keeps_inputs",
        "kind",
        "needs_switches",
    )

    def __init__(self, func: Any, policy: "Policy") -> None:
        self.func = func  # so that its id, by which this is found, stays its own
        self.kind = kind_of(func)
        self.is_ignored = func in SAC_IGNORED_OPS
        self.fate: Fate | None = None
        """What the policy said of it, if it says the same every time."""
        self.keeps_inputs = policy.keeps_inputs(func)
        self.needs_switches = depends_on_backends(func)
        self.is_special = self.keeps_inputs or self.needs_switches


_ops_of: dict[Any, dict[int, _Op]] = {}
"""For each policy that looks at ops alone, what it has said of them so far."""


def _remembered(policy: "Policy") -> dict[int, _Op]:
    return _ops_of.setdefault(policy, {}) if policy.by_op_alone else {}


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an op changes, by its schema."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name)
            if position < len(args):
                given = args[position]
            found += tensors_of(given)
    return found
