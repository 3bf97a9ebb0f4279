"""Measures a model's training step, block by block, so that it need not fit without help.

One step runs with every block recomputed, to see the order of the blocks, what they are given, and
what the rest of the step takes. Then each distinct block is run alone, forward and backward, by
every option that is worth having: bytes and times are those of the real thing.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rekindle.attachment import put_back, set_aside
from rekindle.budget.agreement import agreed
from rekindle.budget.alone import Lone
from rekindle.budget.fake import has_no_memory
from rekindle.budget.graph import Graph
from rekindle.budget.link import bytes_per_second
from rekindle.budget.memory import Meter, bytes_of, metered
from rekindle.budget.names import named
from rekindle.budget.noted import notes_put_back
from rekindle.budget.options import deriving, offloading, undominated
from rekindle.budget.progress import each, tell
from rekindle.budget.shapes import elements, input_shapes
from rekindle.budget.simulate import simulate
from rekindle.budget.static import static_bytes
from rekindle.budget.timing import Clock, DeviceClock
from rekindle.budget.together import told_together
from rekindle.budget.traits import Traits, traits_of
from rekindle.budget.values import BlockProfile, Option, Profile
from rekindle.modules.application import apply, undo
from rekindle.modules.blocks import blocks_of
from rekindle.modules.caches import no_caches
from rekindle.modules.forward import forward_of
from rekindle.offload.options import TierName
from rekindle.replay import ambient


@dataclass
class _Seen:
    """What one step showed of its blocks."""

    order: list[str] = field(default_factory=list)
    calls: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What each block was given, the first time."""
    around: dict[str, ambient.Ambient] = field(default_factory=dict)
    """What was around it, such as autocast."""
    between: list[int] = field(default_factory=list)
    before: int = 0
    rest_peak: int = 0
    first_peak: int = 0
    last_peak: int = 0
    inputs: tuple[tuple[int, ...], ...] = ()
    """The shapes that the model was called with; the largest, of several calls."""


@dataclass(frozen=True)
class Call:
    """What a model is called with, by position and by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Step:
    """One training step of a model on a batch, forward and backward."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model = model
        self.batch = batch
        self.function: Callable[[], Any] | None = None
        self._others: dict[Tensor, Tensor | None] | None = None
        """What else gets gradients, with those it had; None before the first step."""
        self.call = Call((), {})
        if isinstance(batch, Call):
            self.call = batch
        elif callable(batch) and not isinstance(batch, Tensor):
            self.function = batch
        elif isinstance(batch, Mapping):
            self.call = Call((), dict(batch))
        elif isinstance(batch, tuple | list):
            self.call = Call(tuple(batch), {})
        else:
            self.call = Call((batch,), {})

    def __call__(self) -> None:
        loss = self.loss()
        if self._others is None:
            own = set(self.model.parameters())
            self._others = {leaf: leaf.grad for leaf in _leaves_of(loss) if leaf not in own}
            for leaf in self._others:
                leaf.grad = None
        loss.backward()

    @contextmanager
    def leaving_no_gradients(self) -> Iterator[None]:
        """What is outside the model, as a head or the batch, ends with the gradients it had."""
        try:
            yield
        finally:
            for leaf, gradient in (self._others or {}).items():
                leaf.grad = gradient
            self._others = None

    def loss(self) -> Tensor:
        if self.function is not None:
            return _loss_of(self.function())
        return _loss_of(self.model(*self.call.args, **self.call.kwargs))

    def tensors(self) -> list[Tensor]:
        """What the batch consists of."""
        leaves = tree_leaves((self.call.args, self.call.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def shapes(self) -> str:
        """The batch in words, by which it is known again."""
        if self.function is not None:
            return "a function"
        if not isinstance(self.batch, Call):
            return str(tree_map(_shape, self.batch))
        args, kwargs = tree_map(_shape, (self.call.args, self.call.kwargs))
        by_position = args[0] if len(args) == 1 else args
        return str(by_position if not kwargs else kwargs if not args else (*args, kwargs))


def _leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors that a backward gives gradients to."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        stack += [following for following, _ in node.next_functions]
    return found


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        learns = " that learns" if leaf.requires_grad else ""
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{learns}"
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf).__name__


def _loss_of(out: Any) -> Tensor:
    """The loss of what a model returned; if it returned none, the sum of all it did."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise ValueError("The step's result requires no gradient: there is nothing to train")
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()


@dataclass(frozen=True)
class Bench:
    """What a step is run on, and what is known of it."""

    device: torch.device
    name: str
    clock: Clock
    bytes_per_second: float
    """To the tier and back; 0 if there is no way."""
    tier: TierName = "host"
    known: Profile | None = None
    """If its blocks were measured before: that profile."""
    shows_more_together: bool = False
    """Whether host and device work at once, so that blocks alone do not tell all."""


def bench_of(device: torch.device, spill: bool = False) -> Bench:
    """A device that is there, to be measured; with a link to disk, or else to host memory."""
    tier: TierName = "disk" if spill else "host"
    return Bench(
        device,
        _name(device),
        DeviceClock(device),
        bytes_per_second(device, tier),
        tier,
        shows_more_together=device.type == "cuda",
    )


def measure(model: nn.Module, batch: Any, optimizer: Any, bench: Bench) -> Profile:
    """The profile of a model's training step; the model ends as it was."""
    device = bench.device
    step = Step(model, batch)
    blocks = blocks_of(model)
    before = bytes_of([p.grad for p in model.parameters() if p.grad is not None])
    with untouched(model), step.leaving_no_gradients():
        static = static_bytes(model, optimizer, device, step.tensors(), before)
        tell("outline")
        seen, seconds = _outline(step, blocks, bench)
        if not seen.order:
            raise ValueError("The step ran none of the model's blocks: does it call the model?")
        profiles, order = _profiles(blocks, seen, bench)
        found = Profile(
            model=type(model).__name__,
            device=bench.name,
            batch=step.shapes(),
            static_bytes=static,
            before_bytes=seen.before,
            rest_peak=seen.rest_peak,
            rest_seconds=0.0,
            bytes_per_second=bench.bytes_per_second,
            blocks=tuple(profiles),
            order=tuple(order),
            first_peak=seen.first_peak,
            last_peak=seen.last_peak,
            between=tuple(seen.between),
            inputs=seen.inputs,
            unused=tuple(path for path in blocks if path not in seen.order),
        )
        found = replace(found, rest_seconds=max(seconds - _recomputed_seconds(found), 0.0))
        if bench.shows_more_together:
            tell("all blocks together")
            found = told_together(model, found, partial(bench.clock.timed, step))
    return found


def _recomputed_seconds(profile: Profile) -> float:
    """What all blocks take together if all of them are recomputed."""
    menus = (profile.options(i) for i in range(len(profile.order)))
    recomputed = [next(option for option in menu if option.fate == "recompute") for menu in menus]
    return simulate(profile, recomputed).seconds


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside: gradients, buffers, fates and the random state end as they were.

    So does what modules note. A plan that stands on the model says nothing meanwhile, and no cache
    of keys and values is kept.
    """
    aside = set_aside(model)
    gradients = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers() if not has_no_memory(b)}
    places = {module: dict(module._buffers) for module in model.modules()}
    fates = {module: forward_of(module) for module in model.modules()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with (
            torch.random.fork_rng(devices),
            other_random_state(),
            no_caches(model),
            notes_put_back(model),
        ):
            for parameter in gradients:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            yield
    finally:
        undo(model)
        for module, forward in fates.items():
            if forward is not None:
                vars(module)["forward"] = forward
                forward.is_on = True
        put_back(aside)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for module, own in places.items():
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, before in buffers.items():
                if not torch.equal(buffer, before):  # else a graph that uses it stays valid
                    buffer.copy_(before)


@contextmanager
def other_random_state() -> Iterator[None]:
    """The random state of Python, and of numpy where it is in use, ends as it was."""
    numpy = sys.modules.get("numpy")
    before, there = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(there)


def _outline(step: Step, blocks: dict[str, nn.Module], bench: Bench) -> tuple[_Seen, float]:
    """A step with every block recomputed: what its blocks are given, and what is around them."""
    apply(step.model, dict.fromkeys(blocks, "recompute"))
    known = [*step.model.parameters(), *step.model.buffers()]
    known += [p.grad for p in step.model.parameters() if p.grad is not None]
    known += step.tensors()
    clock = bench.clock
    with metered(bench.device, known) as meter:
        watch = _Watch(step.model, blocks, meter)
        with watch.entered():
            begin = clock.mark()
            step()
            end = clock.mark()
    seconds = clock.seconds(begin, end) if clock.is_exact else clock.timed(step)
    undo(step.model)
    return watch.seen, seconds


class _Watch:
    """Notes, while a step runs, how its blocks are called and what memory is around them."""

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module], meter: Meter) -> None:
        self.seen = _Seen()
        self._model = model
        self._blocks = blocks
        self._meter = meter
        self._after_block = 0
        self._has_turned = self._has_ended = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            called = self._model.register_forward_pre_hook(self._called, with_kwargs=True)
            stack.callback(called.remove)
            for path, block in self._blocks.items():
                before = partial(self._before, path)
                hooks = (
                    block.register_forward_pre_hook(before, with_kwargs=True),
                    block.register_forward_hook(self._after),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            yield
        if self._has_ended:
            self.seen.last_peak = self._meter.peak()

    def _called(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        self.seen.inputs = max(self.seen.inputs, input_shapes(args, kwargs), key=elements)

    def _before(self, path: str, _block: nn.Module, args: Any, kwargs: Any) -> None:
        seen, meter = self.seen, self._meter
        if self._has_turned:
            return
        if seen.order:
            seen.between.append(max(meter.now() - self._after_block, 0))
        else:
            seen.before, seen.first_peak = meter.now(), meter.peak()
            seen.between.append(0)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                    leaf.register_hook(self._end)
        seen.order.append(path)
        seen.calls.setdefault(path, (args, kwargs))
        seen.around.setdefault(path, ambient.take())

    def _after(self, _block: nn.Module, _args: Any, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._turn)
        self._after_block = self._meter.now()
        self._meter.reset()

    def _turn(self, _grad: Tensor) -> None:
        if not self._has_turned:
            self._has_turned = True
            self.seen.rest_peak = self._meter.peak() - self._after_block

    def _end(self, _grad: Tensor) -> None:
        self._has_ended = True
        self._meter.reset()


def _profiles(
    blocks: dict[str, nn.Module], seen: _Seen, bench: Bench
) -> tuple[list[BlockProfile], list[tuple[str, int]]]:
    traits = traits_of(blocks)
    keys = {
        path: (_signature(blocks[path], seen.calls[path], traits[path]), str(seen.around[path]))
        for path in seen.order
    }
    first: dict[tuple[str, str], str] = {}
    for path, key in keys.items():
        first.setdefault(key, path)
    profiles = []
    for (signature, around), path in each(list(first.items()), "block"):
        block = blocks[path]
        if bench.known is not None:
            options = _known_menu(bench.known, path, signature, around)
        else:
            with ambient.entered(seen.around[path]):
                options = _menu(block, seen.calls[path], bench)
        profiles.append(BlockProfile(type(block).__name__, signature, options, around))
    known = {key: index for index, key in enumerate(first)}
    return profiles, [(path, known[keys[path]]) for path in seen.order]


def _known_menu(known: Profile, path: str, signature: str, around: str) -> tuple[Option, ...]:
    """The menu of a block that was measured before."""
    found = [block for block in known.blocks if block.signature == signature]
    if len(found) > 1:  # what is around a block says, too, which devices there are
        found = [block for block in found if block.around == around]
    if not found:
        measured = "".join(f"\n  {block.signature}" for block in known.blocks)
        raise ValueError(
            f"The block {path!r} is not among those that were measured on {known.device}:\n"
            f"  {signature}\nThose are:{measured}"
        )
    return found[0].options


def _signature(block: nn.Module, call: tuple[Any, Any], traits: Traits) -> str:
    shapes = [f"{name} {_shape(p)}" for name, p in block.named_parameters()]
    settings = [f"{path}.{name}={value!r}".lstrip(".") for (path, name), value in traits.items()]
    given = tree_map(_shape, call)
    return f"{type(block).__name__}({', '.join([*shapes, *settings])}) of {given}"


def _menu(block: nn.Module, call: tuple[Any, Any], bench: Bench) -> tuple[Option, ...]:
    """The options of a block, each measured, without those that another is better than."""
    from rekindle.budget.menu import keep_sets  # needs scipy  # noqa: PLC0415

    run = Lone(block, call, bench.device, bench.clock)
    graph = run.graph()
    candidates = [Option("keep"), Option("recompute")]
    candidates += deriving(run.derivable(graph), graph)
    candidates += [Option("select", tuple(sorted(kept))) for kept in keep_sets(graph)]
    candidates = agreed(candidates)  # a block that is sharded is gathered by all ranks at a time
    options = [run.measured(option) for option in each(candidates, "option")]
    if bench.bytes_per_second:
        whole = run.measured(Option("derive"))  # keeps all, but can send it away
        host = _host_of_a_move(run, whole, graph, bench.tier)
        several = [whole, *(o for o in options if o.fate in ("derive", "select"))]
        options += [
            less for option in several for less in offloading(option, graph, host, bench.tier)
        ]
    return tuple(named(option, graph) for option in undominated(options))


def _host_of_a_move(run: Lone, whole: Option, graph: Graph, tier: TierName) -> tuple[float, float]:
    """Seconds that it takes the host to send a result away, and to bring it back."""
    moving = offloading(whole, graph, tier=tier)[:-1]  # the n-th moves n results, the last any
    if not whole.forward_host or not moving:
        return 0.0, 0.0
    moved = run.measured(moving[-1])
    count = max(len(moving) - _STAYING, 1)
    return (
        max(moved.forward_host - whole.forward_host, 0.0) / count,
        max(moved.backward_host - whole.backward_host, 0.0) / count,
    )


_STAYING = 2
"""Results that stay after all, because the backward wants them first."""


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
