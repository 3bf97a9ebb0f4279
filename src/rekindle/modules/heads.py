"""Heads: modules whose outputs, such as logits, a loss takes row by row.

A head is found by where it is and by what it does, not by its class: it comes after the blocks, it
learns a matrix that makes more numbers than it is given, and its output goes by rows. What is
called by another name, or comes first, a user names.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from rekindle.modules.patterns import is_inside
from rekindle.modules.unwrapping import places
from rekindle.regions.tile import by_tiles, learning, token_dimension
from rekindle.rows.by_rows import by_rows, goes_by_rows
from rekindle.strategy import Rows
from rekindle.torch_private.dynamo_frames import is_compiled
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.saved_tensor_hooks import top_hooks


def heads_of(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Module]:
    """Modules that may be heads, by their paths without wrappers: the outermost outside the blocks.

    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(2)], nn.Linear(4, 9))
    >>> list(heads_of(model, ["0", "1"]))
    ['2']
    """
    around, where = set(blocks), places(model)
    if not around or "" in around:
        return {}
    in_blocks = {m for path in around for m in model.get_submodule(where[path]).modules()}
    found: dict[str, nn.Module] = {}
    for path, place in where.items():
        module = model.get_submodule(place)
        if module in in_blocks:  # by another path
            continue
        if not path or any(path == b or is_inside(path, b) or is_inside(b, path) for b in around):
            continue
        if any(is_inside(path, other) for other in found):
            continue
        if _widens(module) and not _is_compiled(module):
            found[path] = module
    return found


def saved_by_rows(head: nn.Module) -> int | None:
    """Bytes that a head by rows has saved, as `HeadEngine.saved_bytes`."""
    forward = vars(head).get("forward")
    engine = getattr(forward, "engine", None)
    return engine.saved_bytes if isinstance(engine, HeadEngine) else None


def _is_compiled(module: nn.Module) -> bool:
    """True if a module, or one inside it, runs in compiled or scripted code."""
    return any(is_compiled(m) or isinstance(m, torch.jit.ScriptModule) for m in module.modules())


def _widens(module: nn.Module) -> bool:
    """True if a module has a matrix with more rows than columns."""
    own = [p for p in module.parameters() if p.dim() == 2]
    return any(p.shape[0] > p.shape[1] for p in own)


class HeadEngine:
    """Runs a module by a `strategy.Rows`."""

    def __init__(self, module: nn.Module, strategy: Rows) -> None:
        self._module = ref(module)
        self._strategy = strategy
        self._is_token_wise: bool | None = None
        self.saved_bytes: int | None = None
        """Bytes that copies and gradients of an output would have taken at most, and did not; None
        if no output went by rows."""

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward, and return its output by rows, if that can be."""
        if top_hooks(False) is not None or func_transform() is not None:
            return forward(*args, **kwargs)
        if not self._strategy.exact and self._goes_in_tiles(forward, args, kwargs):
            module = self._module()
            assert module is not None, "it is being called"
            self._note_saved(0)
            return by_tiles(forward, learning(module), args[0], self._note_saved)
        out = forward(*args, **kwargs)
        if not self._has_rows_of(args, out):
            return out
        self._note_saved(0)
        return by_rows(out, self._note_saved)

    def _note_saved(self, nbytes: int) -> None:
        self.saved_bytes = max(self.saved_bytes or 0, nbytes)

    def _has_rows_of(self, args: tuple[Any, ...], out: Any) -> bool:
        """True if an output goes by rows, and has a row for each of the input."""
        if not goes_by_rows(out) or not args or not isinstance(args[0], Tensor):
            return False
        given: Tensor = args[0]
        return given.shape[:-1] == out.shape[:-1] and given.is_floating_point()

    def _goes_in_tiles(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if len(args) != 1 or kwargs or not torch.is_grad_enabled():
            return False
        (hidden,) = args
        if not goes_by_rows(hidden):
            return False
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self._is_token_wise is None:
            self._is_token_wise = token_dimension(forward, flat) == 0
        return self._is_token_wise
