"""The public names that `import rekindle` leaves for their first use: plans, and what makes them.

A program that trains with `rekindle.checkpoint` or `rekindle.offload` alone imports no planner.
`rekindle/__init__.py` imports every name of this file for type checkers, and has it in `__all__`.
"""

from rekindle._api.apply import apply, remove
from rekindle._api.explaining import explain
from rekindle._api.largest import largest
from rekindle._api.planning import fit, frontier, profile, solve
from rekindle.explanation.types import Explanation
from rekindle.planner.devices import Device
from rekindle.planner.frontier import Frontier, Point
from rekindle.planner.largest import Largest, TriedSize
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import BudgetError
from rekindle.planner.runtime import plan_of
from rekindle.planner.types import Profile

__all__ = [
    "BudgetError",
    "Device",
    "Explanation",
    "Frontier",
    "Largest",
    "Plan",
    "Point",
    "Profile",
    "TriedSize",
    "apply",
    "explain",
    "fit",
    "frontier",
    "largest",
    "plan_of",
    "profile",
    "remove",
    "solve",
]
