"""Text of a profile or a plan, for `print`; `report.text` writes it."""

from functools import singledispatch


@singledispatch
def as_text(value: object) -> str:
    """The text that a report has registered for values of a class; else their `repr`."""
    return repr(value)
