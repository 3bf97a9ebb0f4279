"""Modules inside a block that treat each token by itself: they may run in tiles of tokens.

Found by running a block, not by class: a module counts if its first argument is its only tensor,
and if on some tokens alone it has the results that it has on all. Fake tensors have no values to
compare, so there modules that run an op which is known to mix tokens do not count.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.modules.patterns import is_inside
from rekindle.planner.op_words import word_of
from rekindle.planner.trace.block_calls import BlockCall
from rekindle.planner.types import BlockTrace
from rekindle.regions.tile import token_dimension
from rekindle.torch_private.pytrees import tree_leaves

_LEAST_SHARE = 0.05
"""Share of what a block makes that a module has to make, so that tiles of it are worth a try."""
_MIXING = frozenset(
    ("attention", "bmm", "baddbmm", "convolution", "cumsum", "sort", "roll", "flip")
)
"""Words for ops that mix tokens."""


def token_wise_modules(call: BlockCall, trace: BlockTrace) -> tuple[str, ...]:
    """The outermost modules of a block that go token by token and make much of its results."""
    paths = [path for path in trace.called if _is_worth(trace, path)]
    token_wise: dict[str, bool] = {}
    hooks = [
        call.block.get_submodule(path).register_forward_pre_hook(
            partial(_on_call, token_wise, path), with_kwargs=True
        )
        for path in paths
    ]
    try:
        args, kwargs = call.fresh_arguments()
        with torch.no_grad(), call.entered():
            call.block(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    found = [path for path in paths if token_wise.get(path)]
    return tuple(p for p in found if not any(is_inside(p, other) for other in found))


def _is_worth(trace: BlockTrace, path: str) -> bool:
    """Return whether a module makes a good part of a block's results, by ops that mix nothing."""

    def is_in(module: str) -> bool:
        return module == path or is_inside(module, path)

    made = sum(value.nbytes for value in trace.values if is_in(value.module))
    everything = sum(value.nbytes for value in trace.values)
    mixes = any(word_of(op.name) in _MIXING for op in trace.ops if is_in(op.module))
    return made >= max(_LEAST_SHARE * everything, 1) and not mixes


def _on_call(
    token_wise: dict[str, bool], path: str, module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Note whether a module goes token by token, in each of its calls."""
    found = False
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
        tokens, *others = args
        others_are_plain = not any(isinstance(x, Tensor) for x in tree_leaves((others, kwargs)))
        found = others_are_plain and (
            token_dimension(lambda tile: module.forward(tile, *others, **kwargs), tokens)
            is not None
        )
    token_wise[path] = token_wise.get(path, True) and found
