"""Cross entropy over tokens, from values per token: reduced as torch reduces, to the bit.

The loss is a sum over tokens of `nll`, `smooth` and `lse_squared` (`TokenValues`), each times a
coefficient, divided by a total: the number of tokens that count, or the sum of their class weights.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from rekindle.losses.log_prob_rows import LogProbRows
from rekindle.losses.row_function import Values
from rekindle.losses.summed import Sum

Reduction: TypeAlias = Literal["none", "mean", "sum"]


@dataclass(frozen=True)
class CrossEntropy:
    """The cross entropy of labels, without what it is computed from."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    reduction: Reduction = "mean"

    def fields(self) -> tuple[Any, ...]:
        """The fields, as an op of a graph takes them: Dynamo of torch 2.11 knows no `astuple`."""
        weights = self.label_smoothing, self.z_loss
        return self.ignore_index, *weights, self.softcap, self.reduction

    def rows(self, dtype: torch.dtype) -> LogProbRows:
        """The row function of the values that the loss needs."""
        return LogProbRows(
            dtype,
            self.ignore_index,
            self.softcap,
            smooth=self.label_smoothing > 0,
            lse_squared=self.z_loss != 0,
        )

    def as_sum(
        self, labels: Tensor, class_weight: Tensor | None, classes: int, dtype: torch.dtype
    ) -> Sum:
        """The loss as a sum over tokens, in `dtype`."""
        smoothing = self.label_smoothing
        return Sum(
            self.rows(dtype),
            (1 - smoothing, smoothing / classes, self.z_loss, 0.0),
            self.total(labels, class_weight, dtype),
            lambda values: self.reduce(values, labels, class_weight, classes),
        )

    def total(self, labels: Tensor, class_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The number that the sum is divided by."""
        if self.reduction != "mean":
            return torch.ones((), dtype=dtype, device=labels.device)
        ignored = labels == self.ignore_index
        if class_weight is None:
            return (~ignored).sum().to(dtype)
        weights = class_weight.detach()[labels.masked_fill(ignored, 0)]
        return _sum_as_nll_loss(weights, ignored)

    def reduce(
        self, values: Values, labels: Tensor, class_weight: Tensor | None, classes: int
    ) -> Tensor:
        """The loss, from values of all tokens."""
        nll, smooth, lse_squared, _ = values
        assert nll is not None
        loss = self._reduced_nll(nll, labels, class_weight)
        if smooth is not None:
            smooth = self._reduced(smooth, labels, class_weight)
            smoothing = self.label_smoothing
            loss = (1 - smoothing) * loss + smooth * (smoothing / classes)
        if lse_squared is not None:
            loss = loss + self.z_loss * self._reduced(lse_squared, labels, class_weight)
        return loss

    def _reduced(self, values: Tensor, labels: Tensor, class_weight: Tensor | None) -> Tensor:
        """As `cross_entropy` does with what is smoothed."""
        if self.reduction == "none":
            return values
        if self.reduction == "sum":
            return values.sum()
        counts = labels != self.ignore_index
        if class_weight is None:
            return values.sum() / counts.sum()
        return values.sum() / class_weight.gather(0, labels[counts]).sum()

    def _reduced_nll(self, nll: Tensor, labels: Tensor, class_weight: Tensor | None) -> Tensor:
        """As `nll_loss` does: in its order, which is not that of a sum."""
        if self.reduction == "none":
            return nll
        ignored = labels == self.ignore_index
        if class_weight is None:
            return _nll_loss(nll, ignored, self.reduction)
        return _sum_as_nll_loss(nll, ignored) / self.total(labels, class_weight, nll.dtype)


def _nll_loss(nll: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    """`nll_loss` of tokens with one class, which adds up values as it does with many."""
    labels = torch.where(ignored, -100, 0)
    return functional.nll_loss(-nll.unsqueeze(1), labels, reduction=reduction, ignore_index=-100)


def _sum_as_nll_loss(values: Tensor, ignored: Tensor) -> Tensor:
    return _nll_loss(values, ignored, "sum")
