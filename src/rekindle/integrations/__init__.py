"""rekindle in the libraries that train models: a module each, imported when you import it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeAlias

import rekindle
from rekindle.modules.strategy_spelling import Spelling

Strategies: TypeAlias = Spelling | Mapping[str, Spelling] | rekindle.Plan
"""The argument of `rekindle.apply`: a strategy for every block, some by module path, or a plan."""


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
