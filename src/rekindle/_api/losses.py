"""`linear_cross_entropy` and `linear_log_probs`: head and loss in one."""

from typing import Literal, overload

from torch import Tensor

from rekindle._api.loss_checks import check_cross_entropy, check_head, check_labels, check_tile
from rekindle.losses.cross_entropy import CrossEntropy, Reduction
from rekindle.losses.head_values import (
    cross_entropy_of_tokens,
    loss_dtype,
    values_of_tokens,
)
from rekindle.losses.log_prob_rows import LogProbRows


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    exact: bool = True,
    tile: int | None = None,
) -> Tensor:
    """The cross entropy of `linear(hidden, weight, bias)`, in a fraction of the memory.

    As `cross_entropy(linear(hidden, weight, bias).float().flatten(0, -2), labels.flatten())`. Loss
    and gradients are the same bit for bit: the logits are there once, and their gradient is
    written over them. With `exact=False`, no more than a tile of logits is there at any time;
    gradients then differ from plain ones in the last bits, and are no less accurate.

    >>> import torch, rekindle
    >>> hidden, head = torch.randn(2, 6, 8, requires_grad=True), torch.nn.Linear(8, 100)
    >>> labels = torch.randint(100, (2, 6))
    >>> # each token predicts the next one
    >>> loss = rekindle.linear_cross_entropy(
    ...     hidden[:, :-1], head.weight, labels[:, 1:], bias=head.bias
    ... )
    >>> loss.backward()

    Args:
        hidden: hidden states, (..., features).
        weight: the head's weight, (classes, features).
        labels: class indices, (...).
        bias: the head's bias, (classes,).
        class_weight: `weight` of `cross_entropy`, (classes,). It gets no gradient.
        ignore_index: tokens with this label do not count.
        label_smoothing: as for `cross_entropy`.
        z_loss: adds this times the square of each token's log-sum-exp, averaged as the loss is.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        reduction: `"mean"`, `"sum"`, or `"none"` for a loss per token.
        exact: the matmul whole, and the loss by rows; else both by tiles.
        tile: tokens per tile; else as many as fit in 32 MiB of logits (exact) or 512 MiB.
    """
    check_head(hidden, weight, bias)
    check_labels(hidden, labels)
    check_tile(tile)
    check_cross_entropy(weight, class_weight, label_smoothing, softcap, reduction)
    loss = CrossEntropy(ignore_index, label_smoothing, z_loss, softcap, reduction)
    if class_weight is not None:
        class_weight = class_weight.detach().to(loss_dtype(weight))
    args = labels.reshape(-1), class_weight
    found = cross_entropy_of_tokens(loss, hidden, weight, bias, args, exact=exact, tile=tile)
    return found.reshape(labels.shape) if reduction == "none" else found


@overload
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    ignore_index: int = ...,
    entropy: Literal[False] = ...,
    exact: bool = ...,
    tile: int | None = ...,
) -> Tensor: ...
@overload
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    ignore_index: int = ...,
    entropy: Literal[True],
    exact: bool = ...,
    tile: int | None = ...,
) -> tuple[Tensor, Tensor]: ...
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    exact: bool = True,
    tile: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of each label, as DPO, PPO and GRPO need it; with `entropy`, that too.

    As `log_softmax(linear(hidden, weight, bias).float() / temperature, -1)` at the labels, with
    memory and accuracy as for `linear_cross_entropy`. Of the shape of `labels`, in float32.

    >>> import torch, rekindle
    >>> hidden, weight = torch.randn(2, 6, 8), torch.randn(100, 8, requires_grad=True)
    >>> tokens = torch.randint(100, (2, 6))
    >>> log_probs, entropy = rekindle.linear_log_probs(
    ...     hidden, weight, tokens, temperature=0.7, entropy=True
    ... )
    >>> (log_probs.sum() - 0.01 * entropy.mean()).backward()

    Args:
        hidden: hidden states, (..., features).
        weight: the head's weight, (classes, features).
        labels: class indices, (...).
        bias: the head's bias, (classes,).
        temperature: logits are divided by it.
        softcap: logits become `softcap * tanh(logits / softcap)`, before the temperature.
        ignore_index: tokens with this label get 0 for both.
        entropy: also return the entropy of each token's distribution.
        exact: as for `linear_cross_entropy`. With `False`, backward runs the matmul again.
        tile: as for `linear_cross_entropy`.
    """
    check_head(hidden, weight, bias)
    check_labels(hidden, labels)
    check_tile(tile)
    if not temperature > 0:
        raise ValueError(f"temperature should be above 0, but got {temperature!r}")
    function = LogProbRows(loss_dtype(weight), ignore_index, softcap, temperature, entropy=entropy)
    args = labels.reshape(-1), None
    nll, _, _, found = values_of_tokens(
        function, hidden, weight, bias, args, exact=exact, tile=tile
    )
    log_probs = -nll.reshape(labels.shape)
    return (log_probs, found.reshape(labels.shape)) if entropy else log_probs
