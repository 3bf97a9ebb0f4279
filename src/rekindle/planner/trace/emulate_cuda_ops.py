"""Runs ops on fake CPU tensors as torch does on a GPU, where a CPU has other ops.

Dropout is one op on a GPU and holds a mask of one byte an element; attention with dropout is one
op, too, and does not hold every weight. What else differs between devices is left as on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.torch_function import torch_function_disabled


class EmulateCudaOps(TorchFunctionMode):
    """Replaces dropout and attention by the ops that a GPU runs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:  # which runs blocks again; they turn it on as they found it
            with self, torch_function_disabled():
                return func(*args, **kwargs)
        run = _ON_CUDA.get(func)
        out = None if run is None else run(*args, **kwargs)
        return func(*args, **kwargs) if out is None else out


def _dropout(
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,
) -> Tensor | None:
    """Run dropout as on a GPU; None if it is as on a CPU."""
    if inplace or not (training and train and 0 < p < 1 and isinstance(input, FakeTensor)):
        return None
    out: Tensor = torch.native_dropout(input, p, True)[0]
    return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_more: Any,
) -> Tensor | None:
    """Run attention with dropout as on a GPU; None if it is as on a CPU."""
    is_usual = query.dim() == 4 and query.shape[-1] == value.shape[-1]
    if not (dropout_p and is_usual and isinstance(query, FakeTensor)):
        return None
    aten = torch.ops.aten
    if attn_mask is not None:
        return None
    if query.dtype.itemsize == 2:
        flash = aten._scaled_dot_product_flash_attention
        out, *_ = flash(query, key, value, dropout_p, is_causal, scale=scale)
    elif query.shape[1] == key.shape[1]:
        efficient = aten._scaled_dot_product_efficient_attention
        out, *_ = efficient(query, key, value, None, True, dropout_p, is_causal, scale=scale)
    else:
        return None
    return out  # type: ignore[no-any-return]


_BACKWARD = (Tensor.backward, torch.autograd.backward)
_ON_CUDA: dict[Any, Callable[..., Tensor | None]] = {
    dropout: _dropout,
    torch.dropout: _dropout,
    scaled_dot_product_attention: _attention,
}
