"""Warnings that point to the user's line that called rekindle."""

import sys
import warnings


def warn_at_caller(message: str) -> None:
    """Warn at the first line outside rekindle on the way up the stack."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module == "rekindle" or module.startswith("rekindle.")
