"""Addresses of ops in a block: the module that runs an op, its name, and its index.

Note [Numbers that no cast can shift]. A plan is made from a block that is run alone and carried out
in a step, and the two do not run quite the same ops: under autocast a weight is cast where it is
used first, so its cast is inside the block, or before it, or cached. A count of all ops would shift
with every such cast. So an address counts one op among those of its name, and leaves out views and
results that depend on parameters alone, such as their casts; a plan never keeps those. The module
tells whether the op at that place is the one that was meant. It is looked up on Python's stack, for
results that are to be kept only: for every op that would be slow.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from rekindle.regions.base import region_code_ids
from rekindle.regions.selective.decisions import Decision
from rekindle.torch_private.module_calls import MODULE_CALL

if TYPE_CHECKING:
    from types import FrameType


PlannedDecisions: TypeAlias = Mapping[str, Mapping[int, tuple[str, Decision]]]
"""Module and decision of each result that is not recomputed, by the op's name and its index."""


class ModuleFinder:
    """Finds the module of a block that runs; there is one for each block."""

    def __init__(self, block: nn.Module) -> None:
        self._paths = {id(module): path for path, module in block.named_modules()}

    def path(self) -> str:
        """The path of the innermost module of the block that is being called now."""
        paths = self._paths
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is MODULE_CALL:
                path: str | None = paths.get(id(frame.f_locals["self"]))
                if path is not None:
                    return path
            elif id(code) in region_code_ids:
                return ""
            frame = frame.f_back
        return ""

    def paths(self) -> list[str]:
        """The paths of all modules of the block that are being called now, the innermost first."""
        found: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                path = self._paths.get(id(frame.f_locals["self"]))
                if path is not None:
                    found.append(path)
            frame = frame.f_back
        return found


_known: "WeakKeyDictionary[nn.Module, ModuleFinder]" = WeakKeyDictionary()


def module_finder_of(block: nn.Module) -> ModuleFinder:
    """The `ModuleFinder` of a block."""
    found = _known.get(block)
    if found is None:
        found = _known[block] = ModuleFinder(block)
    return found


def forget(block: nn.Module) -> None:
    """Drop the `ModuleFinder` of a block, some of whose modules may have been exchanged."""
    _known.pop(block, None)


def block_of(function: Any) -> nn.Module | None:
    """The module whose forward a region runs, however it is wrapped; None if there is none."""
    while function is not None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, nn.Module):
            return owner
        function = getattr(function, "__wrapped__", None)
    return None


def is_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor is a parameter; for a plain tensor in no time."""
    kind = type(tensor)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter))


def depends_on_parameters_alone(
    args: Iterable[Any], from_parameters: Callable[[Tensor], bool]
) -> bool:
    """Returns whether parameters alone decide all tensors among an op's arguments; one at least."""
    found = False
    for arg in args:
        if isinstance(arg, Tensor):
            if not from_parameters(arg):
                return False
            found = True
        elif type(arg) is list or type(arg) is tuple:
            tensors = [item for item in arg if isinstance(item, Tensor)]
            if not all(map(from_parameters, tensors)):
                return False
            found = found or bool(tensors)
    return found


class PlannedOpCounter:
    """Counts the ops of one call of a block, of names for which a plan has decisions."""

    def __init__(self, decisions: PlannedDecisions, block: nn.Module) -> None:
        self._decisions = decisions
        self._modules = module_finder_of(block)
        self.counts: dict[str, int] = dict.fromkeys(decisions, 0)
        """Number of ops of each name that ran."""
        self.misplaced: dict[str, str] = {}
        """Modules in which ops ran that were planned in others, by the op's name."""

    def decide_next(self, op: str) -> Decision:
        """The decision on the result of an op of a planned name, which has just run."""
        index = self.counts[op]
        self.counts[op] = index + 1
        planned = self._decisions[op].get(index)
        if planned is None or op in self.misplaced:
            return Decision.RECOMPUTE
        module, decision = planned
        found = self._modules.path()
        if found != module:
            self.misplaced[op] = found
            return Decision.RECOMPUTE
        return decision
