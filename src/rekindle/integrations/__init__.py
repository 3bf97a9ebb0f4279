"""rekindle in the libraries that train models: a module each, imported when you import it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import rekindle

Fate = str | rekindle.policies.Policy | rekindle.Offload
"""What `rekindle.apply` gives a module: a fate by its name, a policy, `rekindle.offload(...)`."""

What = Fate | Mapping[str, Fate] | rekindle.Plan
"""One of these for every block of a model, or by patterns of module paths; or a plan."""


def library(name: str) -> Any:
    """A library that rekindle does not depend on.

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
