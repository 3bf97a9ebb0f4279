"""The plot of a frontier, by matplotlib, which is imported when a plot is asked for."""

import sys
from importlib.util import find_spec
from typing import Any

from rekindle.planner.as_plot import as_plot
from rekindle.planner.frontier import Frontier

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@as_plot.register
def plot_frontier(frontier: Frontier, axes: Any) -> Any:
    """Draw time against memory, a marker for each plan, and one for a step without a plan."""
    axes = _new_axes() if axes is None else axes
    if not frontier:
        return axes
    plan = frontier[0].plan
    largest = max(plan.plain_peak, *(point.peak for point in frontier))
    unit, size = next((unit, size) for unit, size in _UNITS if largest >= size or size == 1)
    axes.plot(
        [point.peak / size for point in frontier],
        [point.seconds * 1e3 for point in frontier],
        marker="o",
        label="plans",
    )
    axes.plot([plan.plain_peak / size], [plan.plain_time * 1e3], "kx", label="without a plan")
    axes.set_xlabel(f"peak ({unit})")
    axes.set_ylabel("time of a step (ms)")
    axes.set_title(f"{plan.model} on {plan.device}")
    axes.grid(alpha=0.3)
    axes.legend()
    return axes


def _new_axes() -> Any:
    """Axes of a new figure.

    It is one of pyplot's where pyplot shows figures: in a notebook, or once it is imported. Else
    nothing but its axes holds it, so a program that plots in every epoch piles none up.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("A frontier is plotted by matplotlib: pip install 'rekindle[plot]'")
    if "matplotlib.pyplot" in sys.modules or "ipykernel" in sys.modules:
        from matplotlib import pyplot  # noqa: PLC0415

        return pyplot.subplots()[1]
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure().add_subplot()
