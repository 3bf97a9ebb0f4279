"""A token-wise function that runs on some tokens at a time, forward and backward.

```
tokens ─▶ tile ─▶ tile ─▶ tile        forward: what a tile makes inside is freed before the next
gradient ◀─ tile ◀─ tile ◀─ tile      backward: each tile runs again, and its backward follows
```

Nothing but its input is held from forward to backward. Gradients of parameters are added up tile
by tile, in float32: the last bits may differ from those of one large matmul. Each row of the result
and of the input's gradient comes from the same ops as ever, on fewer rows.

Note [Held before it runs]. The input is saved by a node of its own, before the first tile runs. A
replay of a region around it has all that it needs at that point, and stops there: the tiles that
backward runs again are the only ones that run twice.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rekindle.errors import RekindleError
from rekindle.regions.recompute import ambient
from rekindle.regions.recompute.torch_state import entered
from rekindle.rows.chunks import chunks, evaluate_some
from rekindle.rows.expressions import Leaf, Memo
from rekindle.rows.row_tensor import RowTensor
from rekindle.torch_private.dispatch_modes import past_modes
from rekindle.torch_private.fake_mode import FakeTensor

_Function = Callable[[Tensor], Tensor]
_PROBED = 8
"""Tokens of the call that shows whether a module goes token by token."""


class NotTokenWiseError(RekindleError, ValueError):
    """A function was to run on some tokens at a time, and needs all of them at once."""


class Tiles(NamedTuple):
    """A token-wise function with the state that is around its call."""

    function: _Function
    parameters: tuple[Tensor, ...]
    """The tensors that it gives gradients to, other than its input."""
    then: ambient.Ambient

    def run(self, tokens: Tensor) -> Tensor:
        """The function of some tokens, without a graph."""
        with torch.no_grad(), entered(self.then):
            return self.function(tokens)

    def run_for_backward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Some tokens as a leaf, and the function of them, with a graph."""
        leaf = tokens.detach().requires_grad_()
        with torch.enable_grad(), entered(self.then):
            return leaf, self.function(leaf)


class _Gradients:
    """Gradients of parameters, added up in float32, tile by tile."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, found: Sequence[Tensor | None]) -> None:
        """Add the gradients of one tile."""
        for i, gradient in enumerate(found):
            if gradient is None:
                continue
            before = self._sums[i]
            if before is None:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self._sums[i] = gradient.to(wide)
            else:
                before.add_(gradient)

    def read(self) -> list[Tensor | None]:
        """The sums, in the dtypes of the parameters."""
        return [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(self._sums, self._parameters, strict=True)
        ]


def _backward(
    tiles: Tiles, leaf: Tensor, out: Tensor, grad: Tensor, gradients: _Gradients
) -> Tensor | None:
    """The gradient of some tokens; those of parameters are added up."""
    inputs = (leaf, *tiles.parameters)
    of_tokens, *others = torch.autograd.grad(out, inputs, grad, allow_unused=True)
    gradients.add(others)
    return of_tokens


# --- A module whose output is needed -------------------------------------------------------------


def run_in_tiles(
    function: _Function, parameters: Sequence[Tensor], tokens: Tensor, dim: int, count: int
) -> Tensor:
    """A token-wise function of all tokens, run on a share of them at a time.

    Args:
        function: the function, of one tensor.
        parameters: the tensors that it gives gradients to, other than its input.
        tokens: its input.
        dim: the dimension of tokens.
        count: the number of tiles.
    """
    tiles = Tiles(function, tuple(parameters), ambient.snapshot())
    holder = _Holder()
    if tokens.requires_grad and torch.is_grad_enabled():
        tokens = _Hold.apply(tokens, holder)  # type: ignore[no-untyped-call]
    found: Tensor = _RunInTiles.apply(tiles, holder, dim, count, tokens, *parameters)  # type: ignore[no-untyped-call]
    return found


class _Holder:
    """Leads from the node of the tiles to the node that holds their input."""

    node: Any = None


class _Hold(Function):
    """The identity; saves what it is given. Note [Held before it runs]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, holder: _Holder) -> Tensor:
        ctx.save_for_backward(tokens)
        holder.node = ctx
        return tokens.view_as(tokens)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _RunInTiles(Function):
    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, holder: _Holder, dim: int, count: int, tokens: Tensor, *_: Tensor
    ) -> Tensor:
        ctx.tiles, ctx.holder, ctx.dim, ctx.count = tiles, holder, dim, count
        if holder.node is None:
            ctx.save_for_backward(tokens)
        out: Tensor | None = None
        for start, length in _spans(tokens.shape[dim], count):
            made = tiles.run(tokens.narrow(dim, start, length))
            if out is None:
                shape = (*tokens.shape[:-1], made.shape[-1])
                out = torch.empty(shape, dtype=made.dtype, device=made.device)
            out.narrow(dim, start, length).copy_(made)
            del made
        assert out is not None, "there are tokens"
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), tiles, dim = grads, ctx.tiles, ctx.dim
        (tokens,) = (ctx if ctx.holder.node is None else ctx.holder.node).saved_tensors
        gradients = _Gradients(tiles.parameters)
        of_tokens: Tensor | None = None
        for start, length in _spans(tokens.shape[dim], ctx.count):
            leaf, out = tiles.run_for_backward(tokens.narrow(dim, start, length))
            part = _backward(tiles, leaf, out, grad.narrow(dim, start, length), gradients)
            del leaf, out
            if part is not None and ctx.needs_input_grad[4]:
                if of_tokens is None:
                    of_tokens = torch.empty_like(tokens)
                of_tokens.narrow(dim, start, length).copy_(part)
        return None, None, None, None, of_tokens, *gradients.read()


def _spans(size: int, count: int) -> Iterator[tuple[int, int]]:
    """The start and length of each tile, of tokens that are shared out evenly."""
    length = max(-(-size // count), 1)
    for start in range(0, size, length):
        yield start, min(length, size - start)


# --- A head, whose output is taken by rows -------------------------------------------------------


def by_tiles(
    function: _Function, parameters: Sequence[Tensor], hidden: Tensor, on_gradient: Any = None
) -> Tensor:
    """A head's logits as a row tensor: rows of them are computed where somebody asks for them.

    They are computed once for the loss, and again for its gradient.
    """
    tiles = Tiles(function, tuple(parameters), ambient.snapshot())
    flat = hidden.reshape(-1, hidden.shape[-1])
    lead = tuple(hidden.shape[:-1])
    found: Tensor = _ByTiles.apply(tiles, on_gradient, lead, flat, *parameters)  # type: ignore[no-untyped-call]
    return found


class _Head(Leaf):
    """A leaf whose rows are computed from those of a head's input."""

    def __init__(self, tiles: Tiles, hidden: Tensor, meta: Tensor) -> None:
        super().__init__(hidden, meta)
        self.real = None
        self._tiles = tiles

    def rows(self, start: int, stop: int, memo: Memo) -> Tensor:
        for (node, begin, end), found in memo.items():
            if node == id(self) and begin <= start and stop <= end:
                return found[start - begin : stop - begin]
        return super().rows(start, stop, memo)

    def compute(self, start: int, stop: int, _memo: Memo) -> Tensor:
        return self._tiles.run(self.tensor[start:stop])


_SHARE_OF_FEATURES = 2
"""Features for each row of a tile, at most: it then has half as many logits as the head has
weights, and adding up gradients of these takes no longer than computing them."""


class _ByTiles(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles,
        on_gradient: Any,
        lead: tuple[int, ...],
        hidden: Tensor,
        *_: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.tiles, ctx.on_gradient = tiles, on_gradient
        one = tiles.run(hidden[:1])
        meta = past_modes(
            lambda: torch.empty((*lead, one.shape[-1]), dtype=one.dtype, device="meta")
        )
        head = _Head(tiles, hidden.detach(), meta)
        ctx.head = head
        return RowTensor(head)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), tiles, head = grads, ctx.tiles, ctx.head
        (hidden,) = ctx.saved_tensors
        is_lazy = isinstance(grad, RowTensor) and grad.node.real is None
        if ctx.on_gradient is not None:
            ctx.on_gradient(head.most_saved if is_lazy else 0)
        gradients = _Gradients(tiles.parameters)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[3] else None
        for start, stop in chunks(head.count, head.width, hidden.shape[-1] // _SHARE_OF_FEATURES):
            leaf, out = tiles.run_for_backward(hidden[start:stop])
            if is_lazy:
                known = {(id(head), start, stop): out.detach()}
                rows = evaluate_some(grad.node, start, stop, known)
                del known
            else:
                rows = grad.reshape(-1, head.width)[start:stop]
            part = _backward(tiles, leaf, out, rows, gradients)
            if of_hidden is not None and part is not None:
                of_hidden[start:stop].copy_(part)
        return None, None, None, of_hidden, *gradients.read()


# --- Whether a function is token-wise ------------------------------------------------------------


def token_dimension(function: _Function, tokens: Any) -> int | None:
    """The dimension along which a function goes token by token; None if there is none.

    It is run on a few tokens, and on fewer at a time: results have to agree, and no random number
    may be drawn. Of fake tensors, the shapes of results have to agree. Of several dimensions, the
    longest.
    """
    if not isinstance(tokens, Tensor) or tokens.dim() < 2 or not tokens.numel():
        return None
    dims = sorted(range(tokens.dim() - 1), key=lambda dim: -tokens.shape[dim])
    return next((dim for dim in dims if _is_token_wise(function, tokens.detach(), dim)), None)


def _is_token_wise(function: _Function, tokens: Tensor, dim: int) -> bool:
    length = min(_PROBED, tokens.shape[dim])
    if length < 2:
        return False
    few = tokens.narrow(dim, 0, length)
    random = _random_state(tokens.device)
    try:
        with torch.no_grad():
            together = function(few)
            halves = [function(few.narrow(dim, *span)) for span in _spans(length, 2)]
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False
    if not isinstance(together, Tensor) or together.shape[:-1] != few.shape[:-1]:
        return False
    if isinstance(together, FakeTensor):  # which has no values to compare
        return True
    drew = any(
        not torch.equal(before, after)
        for before, after in zip(random, _random_state(tokens.device), strict=True)
    )
    _set_random_state(tokens.device, random)
    apart = torch.cat(halves, dim)
    if drew or apart.shape != together.shape:
        return False
    tolerance = 64 * torch.finfo(together.dtype).eps
    scale = max(float(together.abs().max()), 1e-30)
    return bool((apart - together).abs().max() <= tolerance * scale)


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_state(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def learning(module: nn.Module) -> list[Tensor]:
    """The parameters of a module that get gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
