"""`linear_per_token`: a head, and any function of its logits per token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rekindle._api.loss_checks import check_head, check_tile
from rekindle.compile.checkpoint_call import checkpoint
from rekindle.errors import RekindleError
from rekindle.losses.by_autograd import Autocast, ByAutograd, name_of
from rekindle.losses.head_values import exact_rows, logits_of, run_rows, tile_rows
from rekindle.regions.recompute import rng_state
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.pytrees import tree_flatten, tree_map


def linear_per_token(
    hidden: Tensor,
    weight: Tensor,
    function: Callable[..., Any],
    *args: Any,
    bias: Tensor | None = None,
    exact: bool = True,
    tile: int | None = None,
) -> Any:
    """`function(linear(hidden, weight, bias), *args)`, a tile of tokens at a time.

    For any loss or log-probability per token. `function` gets logits of shape (tokens, classes) and
    returns a tensor with a row per token, or a container of such tensors; each row depends on the
    logits and arguments of its token alone. Gradients reach hidden states, weight, bias and
    arguments. Memory and accuracy are as for `linear_cross_entropy`.

    >>> import torch, rekindle
    >>> hidden, weight = torch.randn(2, 6, 8), torch.randn(100, 8, requires_grad=True)
    >>> teacher = torch.randn(2, 6, 100).log_softmax(-1)
    >>> def distill(logits, teacher):
    ...     log_probs = logits.float().log_softmax(-1)
    ...     return (teacher.exp() * (teacher - log_probs)).sum(-1)
    >>> rekindle.linear_per_token(hidden, weight, distill, teacher).mean().backward()

    Args:
        hidden: hidden states, (..., features).
        weight: the head's weight, (classes, features).
        function: runs on each tile in forward, and again in backward. It uses no trainable tensor
            but its arguments, and draws no random numbers.
        *args: tensors whose first dimensions are those of `hidden` are cut into tiles; everything
            else is given to each tile whole.
        bias: the head's bias, (classes,).
        exact: as for `linear_cross_entropy`. With `False`, backward runs the matmul again.
        tile: as for `linear_cross_entropy`.
    """
    check_head(hidden, weight, bias)
    check_tile(tile)
    leading = hidden.shape[:-1]
    by_token = [
        isinstance(arg, Tensor) and arg.dim() > 0 and arg.shape[: len(leading)] == leading
        for arg in args
    ]
    flat = [
        arg.reshape(-1, *arg.shape[len(leading) :]) if by else arg
        for arg, by in zip(args, by_token, strict=True)
    ]
    if torch.compiler.is_compiling():
        rows = (exact_rows if exact else tile_rows)(weight, tile)
        found = _traced(function, hidden, weight, bias, flat, by_token, exact, rows)
    elif func_transform() is not None:  # transforms go through plain ops
        found = function(logits_of(hidden, weight, bias), *flat)
    else:
        row_function = ByAutograd(function, by_token, Autocast.now(hidden.device.type))
        with _refusing_random_numbers(function, hidden.device):
            values = run_rows(row_function, hidden, weight, bias, flat, exact=exact, tile=tile)
        found = row_function.structure.unflatten(values)
    return tree_map(lambda value: value.reshape(*leading, *value.shape[1:]), found)


def _traced(
    function: Callable[..., Any],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    args: Sequence[Any],
    by_token: Sequence[bool],
    exact: bool,
    rows: int,
) -> Any:
    """The function in a graph: a region per tile, so that the compiler knows what to run again."""

    def of_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Any:
        return function(functional.linear(hidden, weight, bias), *args)

    if exact:
        parts, first, shared = logits_of(hidden, weight, bias).split(rows), function, ()
    else:
        parts, first = hidden.reshape(-1, hidden.shape[-1]).split(rows), of_hidden
        shared = weight, bias  # type: ignore[assignment]
    given = [
        arg.split(rows) if by else [arg] * len(parts)
        for arg, by in zip(args, by_token, strict=True)
    ]
    tiles = [
        tree_flatten(checkpoint(first, part, *shared, *tile))
        for part, *tile in zip(parts, *given, strict=True)
    ]
    values = [torch.cat(column) for column in zip(*(leaves for leaves, _ in tiles), strict=True)]
    return tiles[0][1].unflatten(values)


@contextmanager
def _refusing_random_numbers(function: Any, device: torch.device) -> Iterator[None]:
    """Refuse a function that draws random numbers: backward, which runs it again, draws others."""
    before = rng_state.snapshot([device])
    yield
    after = rng_state.now(before)
    pairs = [(before[0], after[0])]
    pairs += [(s, t) for (_, s), (_, t) in zip(before[1], after[1], strict=True)]
    if not all(torch.equal(one, other) for one, other in pairs):
        raise RekindleError(
            f"{name_of(function)} drew random numbers. It runs again in backward, where it would "
            "draw others. Draw them before, and pass them as arguments, one row per token."
        )
