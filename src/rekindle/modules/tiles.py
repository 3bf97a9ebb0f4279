"""Modules that run by a `strategy.Tile`: on a share of their tokens at a time."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from rekindle.regions.tile import NotTokenWiseError, learning, run_in_tiles, token_dimension
from rekindle.strategy import Tile
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.pytrees import tree_leaves


class TileEngine:
    """Runs a module by a `strategy.Tile`."""

    def __init__(self, module: nn.Module, strategy: Tile) -> None:
        self._module = ref(module)
        self._strategy = strategy
        self._dims: dict[int, int] = {}
        """The dimension of tokens, by the number of dimensions of the input."""

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward in tiles; where nothing is saved for a backward, as it is.

        Raises a `NotTokenWiseError` if the module needs all tokens at once.
        """
        module = self._module()
        assert module is not None, "it is being called"
        if not torch.is_grad_enabled() or func_transform() is not None:
            return forward(*args, **kwargs)
        if not args or not isinstance(args[0], Tensor):
            raise self._error(module, "its first argument is no tensor")
        tokens, *others = args
        if any(isinstance(each, Tensor) for each in tree_leaves((others, kwargs))):
            raise self._error(module, "it is given other tensors than its tokens")

        def function(tile: Tensor) -> Any:
            return forward(tile, *others, **kwargs)

        dim = self._dims.get(tokens.dim())
        if dim is None:
            dim = token_dimension(function, tokens)
            if dim is None:
                raise self._error(
                    module,
                    "on some tokens alone it has other results, or it draws random numbers",
                )
            self._dims[tokens.dim()] = dim
        return run_in_tiles(function, learning(module), tokens, dim, self._strategy.chunks)

    def _error(self, module: nn.Module, why: str) -> NotTokenWiseError:
        return NotTokenWiseError(
            f"{type(module).__name__} cannot run by {self._strategy!r}: {why}. A tile is for "
            "modules that treat each token by itself, such as an MLP or a norm."
        )
