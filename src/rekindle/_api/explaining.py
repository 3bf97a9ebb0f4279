"""`explain`."""

import sys
from typing import Any

import torch
from torch import nn

from rekindle._api.planning import profile as profile_step
from rekindle._api.planning_checks import is_meta
from rekindle.explanation.explain_model import Request, explain_model
from rekindle.explanation.types import Explanation
from rekindle.modules.blocks import Named
from rekindle.planner.fake_profile import Like
from rekindle.planner.loss import checked_loss
from rekindle.report import explanation_html, explanation_text  # noqa: F401 (it prints by them)


def explain(
    model: nn.Module,
    batch: Any,
    *,
    loss: Any = None,
    optimizer: Any = None,
    device: str | torch.device | None = None,
    like: Like = None,
    blocks: Named | None = None,
    progress: bool | None = None,
) -> Explanation:
    """Say where the memory of a training step goes, and what would make it less.

    The step is recorded storage by storage: bytes by module, op, line of code and kind, at its peak
    and over its timeline. The model is profiled too, to predict what changes would save and cost.
    It ends as it was.

    With `device="meta"` nothing is allocated and no device is needed. Without it, the step runs on
    the model's own device; if it does not fit, it is recorded on fake tensors. Plans and
    strategies that are applied to the model are off meanwhile: the account is of the step without.

    >>> import torch, rekindle
    >>> with torch.device("meta"):
    ...     layer = torch.nn.TransformerEncoderLayer(8192, 64, 28672, batch_first=True)
    ...     model, batch = torch.nn.TransformerEncoder(layer, 4), torch.empty(1, 4096, 8192)
    >>> loss = lambda out: out.square().mean()
    >>> found = rekindle.explain(model, batch, loss=loss, device="meta", like="H100")
    >>> found.source, found.fits
    ('fake tensors', False)
    >>> print(found)
    TransformerEncoder on H100...

    Args:
        model: as for `profile`.
        batch: as for `profile`.
        loss: as for `profile`.
        optimizer: the optimizer, for the size of its state.
        device: `"meta"`, or nothing for the model's own.
        like: with `device="meta"`, where times come from: as for `profile`.
        blocks: as for `profile`: the modules that changes are predicted for.
        progress: as for `profile`.
    """
    found = profile_step(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        device=device,
        like=like,
        blocks=blocks,
        progress=progress,
    )
    request = Request(
        model,
        batch,
        checked_loss(loss, batch),
        optimizer,
        found,
        is_meta(device),
        like,
        _loss_by_rows(),
    )
    return explain_model(request)


def _loss_by_rows() -> str:
    """The code of a loss that goes by rows: rekindle's own, where this version has it."""
    if hasattr(sys.modules["rekindle"], "linear_cross_entropy"):
        return "loss = rekindle.linear_cross_entropy(hidden, head.weight, labels)"
    return "a loss that goes by rows of the logits"
