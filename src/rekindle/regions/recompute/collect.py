"""The saved-tensor hook of one replay: collects tensors until all that are needed are there.

It is a generator, and its `send` is the hook: autograd calls it for every activation, and resuming
a generator is the cheapest way to run Python from there. It takes tensors as they are and hands
back their position; what is needed of them is looked at when the replay is over.

Note [When a replay may stop]. A replay stops once the last living slot's activation is there.
Autograd saves an op's inputs *before* its kernel runs, and an op may write to an input that it
saves (`rrelu` and its noise): stopping inside such a save would hand out a tensor that was never
written. A tensor that an earlier op made with a gradient, or a parameter, is surely written; any
other is loose until the op that saves it has ended. With a loose save at the call site of the last
one, the replay goes on to the next save from another call site, or to the end.

Note [A replay that runs to its end]. Where it need not stop, and nothing is to be looked at on the
way, the replay is unchecked: the hook is the list's own `append`, and no Python runs at all. It
hands back nothing, so a replay of a region that runs a backward of its own is checked, and so is
one whose parameters' data are exchanged before it ends (as ZeRO does): that shows as a mismatch,
and the replay is repeated, checked.

Note [When stopping pays]. To stop is to raise through autograd's C++, which takes the host 20 µs
with torch's CPU build and over 500 µs with its CUDA build. What is saved is the op that saves last,
and what follows it. On a device the host's time counts for more than a small op's: there a replay
stops only if the op that saves last has a millisecond's fraction of work to do, and else runs on.
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


class Collected:
    """The tensors that a replay saved and, if asked for, the call site of each."""

    where: list[RawSite] | None = None
    """The call site of each save, if they are wanted."""
    depth = 3
    """Python frames between the region's code and where it is looked for."""
    detached = 0
    """Ops that the collecting itself ran."""
    unchecked = False
    """Note [A replay that runs to its end]."""
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
            self.where = []

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
        """The hook, for what no graph is made of by an op of the region."""
        tracer = entered_mode(PROXY)
        self.depth += 1
        return lambda x: hook(x) if entered_mode(PROXY) is tracer else filled(x)

    def detach(self, x: Tensor, position: int) -> Tensor:
        """A parameter's data may be exchanged before backward wants it: hold the data, not it."""
        if not isinstance(x, nn.Parameter):
            return x
        self.parameters.add(position)
        self.detached += 1
        return x.detach()

    def copy_before_change(self, tensor: Tensor, copy_of: Callable[[Tensor], Tensor]) -> None:
        """A region inside handed this on and is about to change it: have a copy in its place."""
        found = [i for i, x in enumerate(self.tensors) if x is tensor and i not in self.copied]
        if found:
            copy, version = copy_of(tensor), tensor._version
            for position in found:
                self.tensors[position] = copy
                self.copied[position] = version

    def is_old(self, position: int) -> bool:
        """True if what was saved there is surely no stand-in for a buffer, whose version is new."""
        x = self.tensors[position]
        return (
            x.requires_grad
            or position in self.parameters
            or (is_view(x) and isinstance(x._base, nn.Parameter))
        )

    def may_be_unwritten(self, sites: list[RawSite]) -> bool:
        """True if the op that saves now may yet write to a save. Note [When a replay may stop]."""
        last = len(self.tensors) - 1
        if self.tensors[last].requires_grad and (
            not last or sites[last - 1][1] != sites[last][1]
        ):  # surely written, and the op's only save: no need to look at others
            return False
        for position in by_the_last_op(sites, len(self.tensors)):
            if not (self.is_old(position) or sites[position][0] is PACKING):
                return True
        return False

    def look(self, x: Tensor) -> None:
        """Take down where the region is, and what the tensor holds."""
        assert self.where is not None
        self.where.append(record(self.depth))
        if self.values is not None:
            self.values.compare(len(self.tensors), x, self.where[-1])


@not_compiled
def collect(
    found: Collected, needed: int, sites: list[RawSite], early_stop: bool
) -> Generator[int, Tensor | None, None]:
    """Collect `needed` activations, one at least; `sites` are the forward's. Prime with `next`."""
    keep, closely, last = found.tensors.append, found.where is not None, needed - 1
    position = -1
    while position < last:
        x = yield position
        if closely:
            found.look(x)  # type: ignore[arg-type]
        position += 1
        keep(x if type(x) is Tensor else found.detach(x, position))  # type: ignore[arg-type]
        x = None  # a generator that is closed may keep its variables
    try:
        caller = _getframe(1)
    except ValueError:  # in a thread of autograd's own, which no Python calls
        caller = _getframe(0)
    op = caller.f_code, caller.f_lasti
    del caller
    if early_stop:
        found.ended_elsewhere = op != sites[last][:2] and any(
            op == site[:2] and not library[op[0].co_filename] for site in sites
        )
        if not found.may_be_unwritten(sites):
            _stop(found)
    while True:
        x = yield position
        if early_stop and _call_site() != op:
            _stop(found)
        if closely:
            found.look(x)  # type: ignore[arg-type]
        position += 1
        keep(found.detach(x, position))  # type: ignore[arg-type]
        x = None


def _stop(found: Collected) -> NoReturn:
    """End the replay; what its code still runs on the way out is nobody's."""
    found.stopped = True
    push = functools.partial(push_hooks, StandInHook(), _same)
    swap: tuple[Callable[[], None], ...] = pop_hooks, push
    tuple(map(operator.call, swap))  # Note [In one call]
    raise stop_inside(found._region())


def _same(value: Tensor) -> Tensor:
    return value


def _call_site() -> tuple[CodeType, int]:
    caller = frame_at(2)
    return caller.f_code, caller.f_lasti
