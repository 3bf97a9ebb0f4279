"""Patterns of module paths: which modules they name, and which of two is more specific.

A pattern is a path with the wildcards of file names within its parts (`layers.*`,
`layers.[0-3].mlp`); `**` stands for any number of parts.
"""

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(path: str, pattern: str) -> bool:
    """Returns whether a pattern names the module at a path; the model itself is at ``""``."""
    return _match(path.split(".") if path else [], pattern.split(".") if pattern else [])


def is_inside(path: str, outer: str) -> bool:
    """Returns whether the module at a path is inside the one at another path."""
    return path != outer and (not outer or path.startswith(f"{outer}."))


def outer_paths(path: str) -> list[str]:
    """Returns the paths of the modules around the one at a path, the model itself first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts))]


def has_wildcards(pattern: str) -> bool:
    """Returns whether a pattern may name modules at other paths than itself."""
    return any(c in pattern for c in "*?[")


def _match(parts: list[str], wanted: list[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_match(parts[i:], wanted[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _match(parts[1:], wanted[1:])


def specificity(pattern: str) -> tuple[int, ...]:
    """Sorts patterns: more parts are more specific, then parts without wildcards, then letters."""
    parts = pattern.split(".")
    exact = sum(not has_wildcards(part) for part in parts)
    letters = len(re.sub(r"\[[^]]*\]|[*?.]", "", pattern))
    count = len([part for part in parts if part != "**"])
    return count, exact, letters, -pattern.count("*"), -parts.count("**")


def no_match(pattern: str, paths: Iterable[str]) -> ValueError:
    """The error of a pattern that names no module, with what may have been meant."""
    known = [path for path in paths if path]
    near = difflib.get_close_matches(pattern, [*_general(known), *known], n=3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return ValueError(f"No module of the model matches {pattern!r}.{hint}")


def names_a_list(pattern: str) -> ValueError:
    """The error of a pattern that names nothing but lists of modules."""
    return ValueError(
        f"{pattern!r} names a list of modules, which is never called itself. "
        f"Did you mean '{pattern}.*'?"
    )


def _general(paths: list[str]) -> list[str]:
    return list(dict.fromkeys(map(generalized, paths)))


def generalized(path: str) -> str:
    """A path with its numbers replaced by `*`."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def spanned(paths: list[str]) -> str:
    """Paths that differ in one number alone as one, `layers.0-7.mlp`; others as they are.

    >>> spanned(["layers.0.mlp", "layers.1.mlp"]), spanned(["stem", "layers.0"])
    ('layers.0-1.mlp', 'stem, layers.0')
    """
    if len({path.count(".") for path in paths}) > 1:
        return ", ".join(paths)
    parts = [list(dict.fromkeys(part)) for part in zip(*(p.split(".") for p in paths), strict=True)]
    differing = [part for part in parts if len(part) > 1]
    if len(differing) > 1 or not all(each.isdigit() for part in differing for each in part):
        return ", ".join(paths)
    return ".".join(map(_span, parts))


def _span(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(map(int, parts))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
