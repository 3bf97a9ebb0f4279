"""Log-probabilities of labels by rows: what cross entropy, z-loss and entropy are made of.

Every op is one of the plain expression or of its backward in torch, in the same order, so that the
bits are the same: `log_softmax(logits.float(), -1)`, `nll_loss`, `logsumexp`, `tanh`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rekindle.losses.row_function import Pullback, Values

_aten = torch.ops.aten


class TokenValues(NamedTuple):
    """Values per token: 0 where the label is ignored; None where not asked for."""

    nll: Tensor
    """The negative log-probability of the label, times the class weight of the label."""
    smooth: Tensor | None
    """Minus the sum of the log-probabilities of all classes, each times its class weight."""
    lse_squared: Tensor | None
    """The square of the log-sum-exp of the logits, times the class weight of the label."""
    entropy: Tensor | None
    """The entropy of the distribution."""


@dataclass(frozen=True)
class LogProbRows:
    """A row function of labels, and of class weights or None; it returns `TokenValues`."""

    dtype: torch.dtype
    """The dtype that logits are cast to."""
    ignore_index: int = -100
    softcap: float | None = None
    temperature: float = 1.0
    smooth: bool = False
    lse_squared: bool = False
    entropy: bool = False

    by_token = True, False

    def fields(self) -> tuple[Any, ...]:
        """The fields, as an op of a graph takes them: Dynamo of torch 2.11 knows no `astuple`."""
        scale = self.dtype, self.ignore_index, self.softcap, self.temperature
        return *scale, self.smooth, self.lse_squared, self.entropy

    def forward(self, logits: Tensor, args: Sequence[Any]) -> TokenValues:
        labels, class_weight = args
        x, _ = self._scale(logits)
        return self._values(x, functional.log_softmax(x, -1), labels, class_weight)[0]

    def plain(self, logits: Tensor, args: Sequence[Any]) -> TokenValues:
        return self.forward(logits, args)

    def vjp(self, logits: Tensor, args: Sequence[Any]) -> tuple[TokenValues, Pullback]:
        labels, class_weight = args
        x, tanh = self._scale(logits)
        log_probs = functional.log_softmax(x, -1)
        values, lse = self._values(x, log_probs, labels, class_weight)
        scaled = x if self.lse_squared else None
        dtype = logits.dtype
        del x, logits

        def pullback(grads: Values) -> tuple[Tensor, Values]:
            grad = self._grad_of_log_probs(grads, log_probs, labels, class_weight)
            grad = _aten._log_softmax_backward_data(grad, log_probs, -1, self.dtype)
            if scaled is not None and lse is not None and grads[2] is not None:
                by_row = self._weighted(grads[2], labels, class_weight) * (2 * lse)
                grad += by_row.unsqueeze(1) * (scaled - lse.unsqueeze(1)).exp_()
            return self._unscale(grad, tanh).to(dtype), (None, None)

        return values, pullback

    def _scale(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits as the loss sees them, and the tanh of the soft cap."""
        x, tanh = logits.to(self.dtype), None
        if self.softcap is not None:
            tanh = torch.tanh(x / self.softcap)
            x = tanh * self.softcap
        return (x if self.temperature == 1 else x / self.temperature), tanh

    def _unscale(self, grad: Tensor, tanh: Tensor | None) -> Tensor:
        """The gradient of the logits from that of what the loss sees."""
        if self.temperature != 1:
            grad = grad / self.temperature
        if tanh is not None and self.softcap is not None:
            grad = _aten.tanh_backward(grad * self.softcap, tanh) / self.softcap
        return grad

    def _values(
        self, x: Tensor, log_probs: Tensor, labels: Tensor, class_weight: Tensor | None
    ) -> tuple[TokenValues, Tensor | None]:
        """The values, and the log-sum-exp where it is needed."""
        nll = functional.nll_loss(
            log_probs, labels, class_weight, ignore_index=self.ignore_index, reduction="none"
        )
        smooth = lse = lse_squared = entropy = None
        if self.smooth:
            weighted = log_probs if class_weight is None else log_probs * class_weight
            smooth = self._counted(-weighted.sum(1), labels)
        if self.lse_squared:
            lse = torch.logsumexp(x, -1)
            lse_squared = self._weighted(lse.square(), labels, class_weight)
        if self.entropy:
            entropy = self._counted(-(log_probs.exp() * log_probs).sum(-1), labels)
        return TokenValues(nll, smooth, lse_squared, entropy), lse

    def _grad_of_log_probs(
        self, grads: Values, log_probs: Tensor, labels: Tensor, class_weight: Tensor | None
    ) -> Tensor:
        nll, smooth, _, entropy = grads
        if nll is None:
            grad = torch.zeros_like(log_probs)
        else:
            no_total = nll.new_zeros(())  # which a mean alone would be divided by
            grad = _aten.nll_loss_backward(
                nll, log_probs, labels, class_weight, 0, self.ignore_index, no_total
            )
        if smooth is not None:
            by_row = -self._counted(smooth, labels).unsqueeze(1)
            grad += by_row if class_weight is None else by_row * class_weight
        if entropy is not None:
            by_row = -self._counted(entropy, labels).unsqueeze(1)
            probs = log_probs.exp()
            grad += (log_probs + 1).mul_(probs).mul_(by_row)
        return grad

    def _counted(self, values: Tensor, labels: Tensor) -> Tensor:
        """Values by row, 0 where the label is ignored."""
        return values.masked_fill(labels == self.ignore_index, 0)

    def _weighted(self, values: Tensor, labels: Tensor, class_weight: Tensor | None) -> Tensor:
        """Values by row times the class weight of the label, 0 where it is ignored."""
        if class_weight is not None:
            ignored = labels == self.ignore_index
            values = values * class_weight[labels.masked_fill(ignored, 0)]
        return self._counted(values, labels)
