"""The places of ops: the module that runs, the line of the user's code, the node of autograd.

An op of the forward is found on Python's stack. In the backward, autograd runs nodes without Python
around them; so the place of each op is noted under the number that autograd gives its node, and an
op of the backward has the place of the op whose node runs.
"""

import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

from rekindle.explanation.types import Phase
from rekindle.modules.unwrapping import places
from rekindle.planner.training_step import TrainingStep
from rekindle.regions.errors.call_sites import library
from rekindle.torch_private.autograd_graph import current_node, nodes_so_far, sequence_number
from rekindle.torch_private.module_calls import MODULE_CALL

_STEP: CodeType = TrainingStep.__call__.__code__
"""The code above which nothing on the stack belongs to the step."""
_NODES_BACK = 4
"""Nodes that one op may have made beside its own, as a write to a view does."""


class Line(NamedTuple):
    """A line of the user's code, as code object and offset."""

    code: CodeType
    at: int


@dataclass(frozen=True, slots=True)
class OpSite:
    """The place of one op."""

    op: str
    module: str
    phase: Phase
    line: Line | None


class _Forward(NamedTuple):
    """The place of an op that autograd recorded, and whatever the recorder knows of it."""

    module: str
    line: Line | None
    note: Any


class SiteFinder:
    """Finds the places of the ops of one step."""

    def __init__(self, step: TrainingStep) -> None:
        model = step.model
        paths = {id(model.get_submodule(at)): path for path, at in places(model).items()}
        self._step = step
        self._paths = paths
        self._owners = {
            id(parameter): paths[id(module)]
            for module in model.modules()
            for parameter in module._parameters.values()
            if parameter is not None and id(module) in paths
        }
        self._forwards: dict[int, _Forward] = {}

    def find(self, op: str, note: Any) -> tuple[OpSite, Any]:
        """Return the place of the op that is about to run, and the note of the forward op behind.

        `note` is kept for the ops that autograd runs for this one in the backward.
        """
        module, line = self._on_stack()
        node = current_node()
        in_backward = self._step.in_backward or node is not None
        behind = self._behind(node) if in_backward else None
        if not in_backward or module is not None:
            self._forwards.setdefault(nodes_so_far() - 1, _Forward(module or "", line, note))
        phase: Phase = "forward"
        if in_backward:
            phase = "backward" if module is None else "replay"
        if behind is None:
            return OpSite(op, module or "", phase, line), None
        place = OpSite(op, behind.module if module is None else module, phase, line or behind.line)
        return place, behind.note if phase == "backward" else None

    def reader(self) -> tuple[str, str]:
        """The node that asks for a saved tensor now, and the module of its forward."""
        node = current_node()
        if node is None:
            return "the step itself", ""
        behind = self._behind(node)
        return node.name().removesuffix("0"), "" if behind is None else behind.module

    def _behind(self, node: Any) -> _Forward | None:
        """The place of the forward op whose node runs."""
        if node is None:
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:  # it adds to a gradient
            return _Forward(self._owners.get(id(variable), ""), None, None)
        number = sequence_number(node)
        for before in range(_NODES_BACK):
            if number - before in self._forwards:
                return self._forwards[number - before]
        return None

    def _on_stack(self) -> tuple[str | None, Line | None]:
        """The innermost module of the model, and the innermost line of user code, that run."""
        module, line = None, None
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if code is _STEP:
                break
            if code is MODULE_CALL:
                if module is None:
                    module = self._paths.get(id(frame.f_locals["self"]))
            elif line is None and not library[code.co_filename]:
                line = Line(code, frame.f_lasti)
            if module is not None and line is not None:
                break
            frame = frame.f_back
        return module, line
