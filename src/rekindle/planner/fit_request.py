"""The request of a `fit`, kept so that the model can be fitted again to larger calls."""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from rekindle.planner.loss import Loss
from rekindle.planner.rest import Rest

VerifyLevel: TypeAlias = Literal["auto", "gradients", "peak"]
"""The checks of a plan, by a step that is run: `"gradients"` too, the `"peak"` alone, or `"auto"`:
gradients too if a step is short enough."""


@dataclass(frozen=True)
class FitRequest:
    """The arguments of a `fit`, in the form in which they apply to larger calls of the model."""

    budget: int | str
    optimizer_bytes: int
    rests: tuple[Rest, ...] = ()
    """Costs of the head and a loss outside the model, by each way to run them, that without a
    strategy first; empty if the model is the step."""
    output_held: int = 0
    """Bytes of the output that stay until the backward has ended."""
    spill: bool = False
    """True if results are moved to disk."""
    max_offload: int | None = None
    """Bytes that are moved at most, if that was given."""
    loss: Loss | None = None
    """The loss that was given."""
    verify: VerifyLevel = "auto"
    exact: bool = True
    """False if strategies that change the last bits of gradients may be planned."""
    blocks: tuple[str, ...] | None = None
    """Paths of the blocks, if they were named; else they are found again for each call."""

    def scaled(self, elements: int, before: int) -> "FitRequest":
        """Return the request for a larger call, whose parts outside the model grow as inputs do."""
        return replace(
            self,
            rests=tuple(rest.scaled(elements, before) for rest in self.rests),
            output_held=self.output_held * elements // before,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the loss, which may be any function: a pickle of the model goes without it."""
        return {**vars(self), "loss": None}

    def __deepcopy__(self, _memo: dict[int, Any]) -> "FitRequest":
        return self
