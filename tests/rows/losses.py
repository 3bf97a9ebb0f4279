"""Losses as models and users write them, each a function of logits and labels."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def _flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)


def labels_shifted(logits: Tensor, labels: Tensor) -> Tensor:
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(*_flat(logits.float(), labels))


def logits_shifted(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = logits[..., :-1, :].contiguous().float()
    return F.cross_entropy(*_flat(shifted, labels[..., 1:].contiguous()))


def padding_cut_off(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits[:, 1:-2, :-3].float(), labels[:, 1:-2].clamp(max=90)))


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits, labels), reduction="sum") / 17


def one_per_token(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(*_flat(logits.float(), labels), reduction="none")
    return (losses * torch.linspace(0, 1, len(losses))).sum()


def class_zero_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits.float(), labels.clamp(min=0)), ignore_index=0)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits, labels), label_smoothing=0.1)


def softly_capped(logits: Tensor, labels: Tensor) -> Tensor:
    return labels_shifted(30 * torch.tanh(logits / 30), labels)


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float()
    z = wide.logsumexp(-1).pow(2).mean()
    return F.cross_entropy(*_flat(wide, labels)) + 1e-4 * z


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = (logits / 0.7).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
    return (chosen.squeeze(-1) * torch.linspace(0, 1, labels.numel()).view_as(labels)).sum()


def log_probabilities_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float()
    chosen = torch.gather(wide, -1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(wide, -1) - chosen).mean()


def entropy(logits: Tensor, _labels: Tensor) -> Tensor:
    wide = logits.float()
    return -(wide.softmax(-1) * wide.log_softmax(-1)).sum(-1).mean()


def two_uses(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float()
    return F.cross_entropy(*_flat(wide, labels)) + 0.1 * wide.mean() + logits.amax(-1).mean()


def divided_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    logits.div_(0.7)
    return labels_shifted(logits, labels)


def a_cast_before_it_is_divided(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.double()
    logits.div_(0.7)
    return F.cross_entropy(*_flat(wide, labels)) + labels_shifted(logits, labels)


def class_weights(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1, logits.shape[-1])
    return F.cross_entropy(*_flat(logits.float(), labels), weight=weight)


BY_ROWS: list[Loss] = [
    labels_shifted,
    logits_shifted,
    padding_cut_off,
    summed,
    one_per_token,
    class_zero_ignored,
    smoothed,
    softly_capped,
    with_z_loss,
    log_probabilities,
    log_probabilities_by_hand,
    entropy,
    two_uses,
    divided_in_place,
    a_cast_before_it_is_divided,
    class_weights,
]
"""Losses whose gradient comes to the logits by rows."""


def classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().transpose(1, 2), labels)


def some_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    is_known = labels >= 0
    return F.cross_entropy(logits.float()[is_known], labels[is_known])


def a_view_scaled_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.double()
    wide[:, :-1].mul_(2)
    return F.cross_entropy(*_flat(wide, labels))


def a_sort(logits: Tensor, _labels: Tensor) -> Tensor:
    return logits.sort(-1).values[..., -3:].sum()


def a_norm_of_all(logits: Tensor, labels: Tensor) -> Tensor:
    return labels_shifted(logits, labels) + torch.linalg.vector_norm(logits.float())


ALL_AT_ONCE: list[Loss] = [classes_second, some_tokens, a_view_scaled_in_place, a_sort]
"""Losses that look at logits in a way that does not go row by row."""
EVERY = [*BY_ROWS, *ALL_AT_ONCE, a_norm_of_all]
