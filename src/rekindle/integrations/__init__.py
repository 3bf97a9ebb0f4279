"""rekindle in the libraries that train models: a module each, imported when you import it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeAlias

import rekindle
from rekindle.modules.strategy_spelling import Spelling, strategy_of
from rekindle.planner.plan_for_budget import refuse_unlikely_budget

Strategies: TypeAlias = Spelling | Mapping[str, Spelling] | rekindle.Plan
"""The argument of `rekindle.apply`: a strategy for every block, some by module path, or a plan."""


def strategies_or_budget(what: Strategies | None, budget: Any) -> Strategies:
    """Return the strategies of a callback; refuse what is none, and a budget beside them.

    >>> strategies_or_budget(None, None), strategies_or_budget(None, "24GiB")
    ('recompute', 'recompute')
    >>> strategies_or_budget("recomput", None)
    Traceback (most recent call last):
    ValueError: A strategy is one of ..., but got 'recomput': 'recompute', perhaps?
    """
    if budget is not None:
        refuse_unlikely_budget(budget)
        if what is not None:
            raise ValueError(
                f"A callback takes strategies or a budget, but got {what!r} and {budget!r}: with "
                "a budget, a plan chooses the strategies"
            )
    for each in what.values() if isinstance(what, Mapping) else (what,):
        if each is not None and not isinstance(each, rekindle.Plan):
            strategy_of(each)
    return "recompute" if what is None else what


def library(name: str) -> Any:
    """Import a library that rekindle does not depend on.

    >>> library("an_absent_library")
    Traceback (most recent call last):
    ImportError: This needs an_absent_library, which is not installed: pip install an_absent_library
    """
    top = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise  # it is there, and something that it needs is not
        raise ImportError(
            f"This needs {top}, which is not installed: pip install {top}", name=top
        ) from error
