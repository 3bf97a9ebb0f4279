"""Fine-tune a model of transformers with its `Trainer`, with and without rekindle, and compare.

    python examples/transformers_trainer.py

The model is a tiny Llama with random weights, so that nothing has to be downloaded. The runs differ
only in a callback. Needs transformers and accelerate.
"""

import sys
import tempfile
from typing import Any

import torch
import transformers
from torch import nn

import rekindle
from rekindle import policies
from rekindle.integrations.transformers import Callback

LAYERS, STEPS = 4, 10


def new_model() -> nn.Module:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def rows() -> list[dict[str, torch.Tensor]]:
    """Make sequences that count up, each from another number."""
    sequences = [(torch.arange(32) + start) % 128 for start in range(64)]
    return [{"input_ids": sequence, "labels": sequence} for sequence in sequences]


def train(callbacks: list[Any]) -> tuple[list[float], nn.Module]:
    """Train a new model; return the loss of every step, and the model."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=0,
        )
        trainer = transformers.Trainer(
            new_model(), arguments, train_dataset=rows(), callbacks=callbacks
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model


def main() -> int:
    plain_losses, plain = train([])
    runs = {"recompute": "recompute", "a policy": policies.keep_matmuls_and_attention}
    print(f"{'plain':<12} loss {plain_losses[0]:.4f} -> {plain_losses[-1]:.4f}")
    same = True
    for name, strategy in runs.items():
        with rekindle.observe() as seen:
            losses, model = train([Callback(strategy)])
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        same &= losses == plain_losses and all(torch.equal(a, b) for a, b in pairs)
        total = seen.total
        print(
            f"{name:<12} loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
            f"{total.forwards} regions, {total.replays} replays, "
            f"{total.bytes_dropped / STEPS / 2**20:.1f} MiB dropped and "
            f"{total.bytes_held / STEPS / 2**20:.1f} MiB held a step"
        )
    print(f"same losses and parameters: {'yes' if same else 'no'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
