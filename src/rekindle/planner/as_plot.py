"""Plots of a value; `report` draws them."""

from functools import singledispatch
from typing import Any


@singledispatch
def as_plot(value: object, axes: Any) -> Any:
    """Draw the plot that a report has registered for values of a class; return its axes."""
    raise TypeError(f"There is no plot of a {type(value).__name__} for {axes}")
