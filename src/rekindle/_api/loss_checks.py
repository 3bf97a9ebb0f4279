"""Checks of the arguments of `linear_cross_entropy` and its kin."""

from typing import Any, get_args

import torch
from torch import Tensor

from rekindle.losses.cross_entropy import Reduction
from rekindle.losses.head_values import matmul_dtype


def check_head(hidden: Any, weight: Any, bias: Any) -> None:
    """Refuse tensors that are no head: (..., features), (classes, features), (classes,)."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
            raise TypeError(f"{name} should be a tensor, but got {type(tensor).__name__}")
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "hidden should be (..., features) and weight (classes, features), as of nn.Linear, but "
            f"got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias should be ({len(weight)},), but got {list(bias.shape)}")
    if matmul_dtype(weight) == weight.dtype and hidden.dtype != weight.dtype:
        if torch.is_autocast_enabled(weight.device.type):
            return
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: cast one of them, or use autocast"
        )


def check_labels(hidden: Tensor, labels: Any) -> None:
    """Refuse labels that are not one per token."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels should be a tensor, but got {type(labels).__name__}")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels should have one class index per token, so shape {list(hidden.shape[:-1])} for "
            f"hidden of shape {list(hidden.shape)}, but got {list(labels.shape)}"
        )
    if labels.is_floating_point():
        raise ValueError(
            "labels should be class indices, but got numbers of a floating-point type. For class "
            "probabilities, use linear_per_token with a function of your own."
        )


def check_tile(tile: Any) -> None:
    """Refuse what is no number of tokens."""
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < 1):
        raise ValueError(f"tile should be a number of tokens, at least 1, but got {tile!r}")


def check_cross_entropy(
    weight: Tensor,
    class_weight: Any,
    label_smoothing: float,
    softcap: float | None,
    reduction: str,
) -> None:
    """Refuse options that `cross_entropy` refuses."""
    if class_weight is not None and class_weight.shape != weight.shape[:1]:
        raise ValueError(
            f"class_weight should be ({len(weight)},), but got {list(class_weight.shape)}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing should be from 0 to 1, but got {label_smoothing!r}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap should be above 0, but got {softcap!r}")
    if reduction not in get_args(Reduction):
        raise ValueError(f'reduction should be "mean", "sum" or "none", but got {reduction!r}')
