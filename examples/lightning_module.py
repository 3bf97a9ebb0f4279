"""Fit a `LightningModule` with and without rekindle, and compare.

    python examples/lightning_module.py

The runs differ only in a callback. Needs lightning.
"""

import logging
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import rekindle
from rekindle import policies
from rekindle.integrations.lightning import Callback

LAYERS, DIM, STEPS = 4, 32, 20


class Denoiser(pl.LightningModule):
    """A module that learns to remove noise from a wave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.1, batch_first=True)
            for _ in range(LAYERS)
        )
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        x = batch + torch.randn_like(batch)
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.mse_loss(x, batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def waves() -> Tensor:
    """Make sine waves of many phases, as sequences of vectors."""
    phases = torch.linspace(0, 6, 8 * STEPS)[:, None]
    return torch.sin(phases + torch.arange(16 * DIM) / 8).reshape(-1, 16, DIM)


def fit(callbacks: list[Any]) -> Denoiser:
    torch.manual_seed(0)
    module = Denoiser()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, DataLoader(waves(), batch_size=8))  # type: ignore[arg-type]
    return module


def main() -> int:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    plain = fit([])
    runs = {"recompute": "recompute", "a policy": policies.keep_matmuls_and_attention}
    print(f"{'plain':<12} loss {plain.losses[0]:.4f} -> {plain.losses[-1]:.4f}")
    same = True
    for name, strategy in runs.items():
        with rekindle.observe() as seen:
            module = fit([Callback(strategy)])
        pairs = zip(
            [*plain.losses, *plain.parameters()],
            [*module.losses, *module.parameters()],
            strict=True,
        )
        same &= all(torch.equal(a, b) for a, b in pairs)
        print(
            f"{name:<12} loss {module.losses[0]:.4f} -> {module.losses[-1]:.4f}, "
            f"{seen.total.forwards} regions, {seen.total.replays} replays"
        )
    print(f"same losses and parameters: {'yes' if same else 'no'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
