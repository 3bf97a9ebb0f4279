"""The options of one region, checked once where the user gives them."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from rekindle.regions import switches
from rekindle.regions.meant_calls import needs_arguments
from rekindle.torch_private.torch_checkpoint import noop_context_fn

ContextFn: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
DeterminismCheck: TypeAlias = Literal["default", "none", "values"]
_CHECKS = get_args(DeterminismCheck)


@dataclass(frozen=True, slots=True)
class Options:
    """How one region is run and replayed."""

    context_fn: ContextFn | None = None
    """Contexts for forward and replay; None for none."""
    determinism_check: DeterminismCheck = "default"
    debug: bool = False
    early_stop: bool = True
    preserve_rng_state: bool = True
    plain: bool = False
    """True if nothing is asked for beyond a replay with the default check."""


_DEFAULTS = Options(plain=True)


def options_of(
    context_fn: ContextFn,
    determinism_check: DeterminismCheck,
    debug: bool,
    early_stop: bool,
    preserve_rng_state: bool,
) -> Options:
    """The options as a user gave them, checked, with the process-wide switches applied."""
    stop, forced = switches.early_stop(), switches.debug()
    if stop is not None:
        early_stop = stop
    if forced is not None:
        debug = forced
    if (
        context_fn is noop_context_fn
        and determinism_check == "default"
        and early_stop
        and preserve_rng_state
        and not debug
    ):
        return _DEFAULTS
    if determinism_check not in _CHECKS:
        raise ValueError(
            f"determinism_check should be one of {list(_CHECKS)}, but got {determinism_check!r}"
        )
    if not callable(context_fn):
        raise TypeError(
            "context_fn should be a function that returns two context managers, or a policy, such "
            f"as rekindle.policies.keep_matmuls, but got {type(context_fn).__name__}"
        )
    contexts = None if context_fn is noop_context_fn else context_fn
    return Options(contexts, determinism_check, debug, early_stop, preserve_rng_state)


def contexts_from(context_fn: ContextFn) -> tuple[Any, Any]:
    """The contexts of one call of a region."""
    try:
        contexts: Any = context_fn()
    except TypeError as error:
        if not needs_arguments(context_fn):
            raise
        raise TypeError(
            "context_fn is called without arguments and returns two context managers, but it takes "
            f"{inspect.signature(context_fn)}. A function that decides about ops is given as "
            "context_fn=rekindle.policies.of(function)"
        ) from error
    if not (isinstance(contexts, tuple | list) and len(contexts) == 2):
        made = "; a policy is given itself, as in context_fn=rekindle.policies.keep()"
        raise TypeError(
            f"context_fn should return two context managers, but returned {type(contexts).__name__}"
            f"{made if callable(contexts) else ''}"
        )
    return contexts[0], contexts[1]
