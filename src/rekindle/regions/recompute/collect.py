"""The saved-tensor hook of one replay: collects tensors until all that are needed are there.

It is a generator, and its `send` is the hook: autograd calls it for every activation, and resuming
a generator is the cheapest way to run Python from there. It stores tensors as they are and
returns their position; they are compared with the forward's when the replay is over.

Note [When a replay may stop]. A replay stops once the last living slot's activation is there.
Autograd saves an op's inputs *before* its kernel runs, and an op may write to an input that it
saves (`rrelu` and its noise): stopping inside such a save would hand out a tensor that was never
written. A result of an earlier op that requires a gradient, or a parameter, is surely written; any
other tensor may be unwritten until the op that saves it has ended. If such a tensor is saved at the
call site of the last needed save, the replay goes on to the next save from another call site, or to
the end.

Note [A replay that runs to its end]. A replay that need not stop, and whose saves need not be
looked at one by one, is unchecked: the hook is the list's own `append`, and no Python runs at all.
This hook returns no position, so a replay of a region that runs a backward of its own is checked.
So is one whose parameters' data are exchanged before it ends (as ZeRO does): the exchange shows as
a mismatch, and the replay is repeated, checked.

Note [When stopping pays]. To stop is to raise through autograd's C++, which takes the host 20 µs
with torch's CPU build and over 500 µs with its CUDA build. A stop saves running the op that makes
the last needed save, and what follows it. On a device the host's time counts for more than a small
op's: there a replay stops only if that op is estimated to take about 0.2 ms or more
(`stopping_pays` in slots.py), and else runs to its end.
"""

import functools
import operator
import sys
from collections.abc import Callable, Generator
from types import CodeType
from typing import TYPE_CHECKING, NoReturn
from weakref import ref

from torch import Tensor, nn

from rekindle.errors import CheckpointError
from rekindle.regions.errors.call_sites import RawSite, frame_at, library, record
from rekindle.regions.recompute.containers import PACKING
from rekindle.regions.recompute.early_stop import stop_inside
from rekindle.regions.recompute.slots import Slot, by_the_last_op, filled
from rekindle.torch_private.autograd_graph import is_view
from rekindle.torch_private.dispatch_modes import PROXY, entered_mode
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.saved_tensor_hooks import StandInHook, pop_hooks, push_hooks

if TYPE_CHECKING:
    from rekindle.regions.errors.fingerprint import Fingerprints
    from rekindle.regions.recompute.recompute_region import RecomputeRegion


_getframe = sys._getframe


class Collector:
    """Holds the tensors that a replay saved and, if asked for, the call site of each."""

    replay_sites: list[RawSite] | None = None
    """The call site of each save of this replay, if they are wanted."""
    depth = 3
    """Python frames between the region's code and `record`, which looks for it."""
    detached = 0
    """Number of ops that the collector itself ran."""
    checked = True
    """True if the hook looks at every save. Note [A replay that runs to its end]."""
    stopped = False
    """True if all that was needed was there before the region ended."""
    ended_elsewhere = False
    """True if the last activation that was needed came from a call that the forward made too, but
    in another place: what was saved has shifted."""

    def __init__(
        self, region: "RecomputeRegion", closely: bool = False, values: "Fingerprints | None" = None
    ) -> None:
        self._region = ref(region)
        self.tensors: list[Tensor] = []
        self.values = values
        """Fingerprints to compare with, if contents are compared."""
        self.parameters: set[int] = set()
        """Positions of parameters."""
        self.copied: dict[int, int] = {}
        """Positions of copies, each with the version of what was copied."""
        if closely or values is not None:
            self.replay_sites = []

    @not_compiled
    def saved(self, position: int | Slot) -> Tensor:
        """The tensor that was saved there: for a backward through the replay's own graph.

        The region itself runs it, or a region nested in it, when this replay is over and its
        activations are in the slots; or an op that makes a graph of its own.
        """
        if isinstance(position, Slot):
            return position.value
        if position < len(self.tensors):
            return self.tensors[position]
        region = self._region()
        slot = None if region is None else region.saved.slots[position]()
        if slot is None:
            raise CheckpointError(
                "A backward went through a graph that was made in a replay, after the replay: its "
                "activations are gone. Keep what the region makes in its forward, not in a replay "
                "(`rekindle.is_recomputing()` tells them apart)."
            )
        return slot.value

    def outside_traces(self, hook: Callable[[Tensor], int]) -> Callable[[Tensor], int | Slot]:
        """Returns a hook that leaves alone what is saved for a graph that an op makes.

        Note [A trace inside a region] in recompute_region.py.
        """
        proxy_mode = entered_mode(PROXY)
        self.depth += 1
        return lambda x: hook(x) if entered_mode(PROXY) is proxy_mode else filled(x)

    def detach(self, x: Tensor, position: int) -> Tensor:
        """Returns a parameter's data, as the parameter may get other data; others as they are."""
        if not isinstance(x, nn.Parameter):
            return x
        self.parameters.add(position)
        self.detached += 1
        return x.detach()

    def copy_before_change(self, tensor: Tensor, copy_of: Callable[[Tensor], Tensor]) -> None:
        """Replace a tensor that a region inside handed on, and is about to change, by a copy."""
        positions = [i for i, x in enumerate(self.tensors) if x is tensor and i not in self.copied]
        if positions:
            copy, version = copy_of(tensor), tensor._version
            for position in positions:
                self.tensors[position] = copy
                self.copied[position] = version

    def is_old(self, position: int) -> bool:
        """True if the tensor at a position is surely no stand-in for a buffer.

        A stand-in is a copy that a replay runs on: its version counter starts anew.
        """
        x = self.tensors[position]
        return (
            x.requires_grad
            or position in self.parameters
            or (is_view(x) and isinstance(x._base, nn.Parameter))
        )

    def may_be_unwritten(self, forward_sites: list[RawSite]) -> bool:
        """True if the op that saves now may yet write to a save. Note [When a replay may stop]."""
        last = len(self.tensors) - 1
        if self.tensors[last].requires_grad and (
            not last or forward_sites[last - 1][1] != forward_sites[last][1]
        ):  # surely written, and the op's only save: no need to look at others
            return False
        for position in by_the_last_op(forward_sites, len(self.tensors)):
            if not (self.is_old(position) or forward_sites[position][0] is PACKING):
                return True
        return False

    def look(self, x: Tensor) -> None:
        """Record the call site of a save and, if contents are compared, its fingerprint."""
        assert self.replay_sites is not None
        self.replay_sites.append(record(self.depth))
        if self.values is not None:
            self.values.compare(len(self.tensors), x, self.replay_sites[-1])


@not_compiled
def collect(
    collector: Collector, needed: int, forward_sites: list[RawSite], early_stop: bool
) -> Generator[int, Tensor | None, None]:
    """Collect `needed` activations, one at least. Prime it with `next`."""
    keep, closely, last = collector.tensors.append, collector.replay_sites is not None, needed - 1
    position = -1
    while position < last:
        x = yield position
        if closely:
            collector.look(x)  # type: ignore[arg-type]
        position += 1
        keep(x if type(x) is Tensor else collector.detach(x, position))  # type: ignore[arg-type]
        x = None  # a generator that is closed may keep its variables
    try:
        caller = _getframe(1)
    except ValueError:  # in a thread of autograd's own, which no Python calls
        caller = _getframe(0)
    op = caller.f_code, caller.f_lasti
    del caller
    if early_stop:
        collector.ended_elsewhere = op != forward_sites[last][:2] and any(
            op == site[:2] and not library[op[0].co_filename] for site in forward_sites
        )
        if not collector.may_be_unwritten(forward_sites):
            _stop(collector)
    while True:
        x = yield position
        if early_stop and _call_site() != op:
            _stop(collector)
        if closely:
            collector.look(x)  # type: ignore[arg-type]
        position += 1
        keep(collector.detach(x, position))  # type: ignore[arg-type]
        x = None


def _stop(collector: Collector) -> NoReturn:
    """End the replay; what its code saves on the way out belongs to no region."""
    collector.stopped = True
    push = functools.partial(push_hooks, StandInHook(), _same)
    swap: tuple[Callable[[], None], ...] = pop_hooks, push
    tuple(map(operator.call, swap))  # Note [In one call]
    raise stop_inside(collector._region())


def _same(value: Tensor) -> Tensor:
    return value


def _call_site() -> tuple[CodeType, int]:
    caller = frame_at(2)
    return caller.f_code, caller.f_lasti
