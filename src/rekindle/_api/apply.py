"""`apply` and `remove`."""

from collections.abc import Mapping

from torch import nn

from rekindle.modules.applied import Applied
from rekindle.modules.apply_strategies import apply_strategies, remove_strategies
from rekindle.modules.strategy_spelling import Spelling
from rekindle.planner.plan import Plan
from rekindle.planner.runtime import apply_plan


def apply(model: nn.Module, what: Spelling | Mapping[str, Spelling] | Plan) -> Applied:
    """Have the modules of a model run by strategies, in place. `remove` undoes it.

    No module is replaced and no name, key, class or signature changes. Applying again replaces what
    was applied before; what is refused, or fails, changes nothing. Returns what is applied, which
    prints as a tree.

    >>> import torch, rekindle
    >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> model = torch.nn.Sequential(*[block() for _ in range(4)])
    >>> rekindle.apply(model, "recompute")
    Sequential
      0-3: 4 x Sequential: recompute
    >>> rekindle.apply(model, {"[0-1]": "recompute", "3.0": "keep"})
    Sequential
      0-1: 2 x Sequential: recompute
      3.0: Linear: keep
    >>> rekindle.remove(model)

    Args:
        model: a model, or a part of one.
        what: a strategy (`"keep"`, `"recompute"`, `"offload"`, `"spill"`, a policy,
            `rekindle.offload(...)`) for every block of the model; or a mapping from patterns of
            module paths to strategies. The most specific pattern decides, also inside a module that
            another one names. Or a plan.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply() takes a model, but got {type(model).__name__}")
    if isinstance(what, Plan):
        return apply_plan(model, what)
    return apply_strategies(model, what, compiled=())


def remove(model: nn.Module) -> None:
    """Undo `apply`: every module of the model is as before.

    Host memory and disk that were set aside for it, and that nothing uses, are given back.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"remove() takes a model, but got {type(model).__name__}")
    remove_strategies(model)
