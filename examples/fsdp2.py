"""Train a model that FSDP2 shards over processes, with and without rekindle, and compare.

    torchrun --nproc-per-node 2 examples/fsdp2.py

The calls are `rekindle.apply`, then `fully_shard` for every block and for the model. On a machine
with accelerators, put "cuda" in the place of "cpu".
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rekindle
from rekindle import policies

LAYERS, DIM, STEPS = 4, 32, 10
Strategy = str | policies.Policy


class Model(nn.Module):
    """A model that learns to return its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.1, batch_first=True)
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def train(strategy: Strategy | None) -> tuple[list[Tensor], list[Tensor]]:
    """Train a new model; return the loss of every step, and this process's parameter shards."""
    torch.manual_seed(0)
    model = Model()
    if strategy is not None:
        rekindle.apply(model, strategy)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())  # each process has its own batches
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 16, DIM)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs: dict[str, Strategy] = {
        "recompute": "recompute",
        "a policy": policies.keep_matmuls_and_attention,
    }
    plain = train(None)
    lines = [f"{'plain':<12} loss {plain[0][0]:.4f} -> {plain[0][-1]:.4f}"]
    same = True
    for name, strategy in runs.items():
        with rekindle.observe() as seen:
            losses, shards = train(strategy)
        pairs = zip([*plain[0], *plain[1]], [*losses, *shards], strict=True)
        same &= all(torch.equal(a, b) for a, b in pairs)
        lines.append(
            f"{name:<12} loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
            f"{seen.total.forwards} regions, {seen.total.replays} replays"
        )
    everywhere = torch.tensor(int(same))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        lines.append(f"same losses and parameters: {'yes' if everywhere else 'no'}")
        print("\n".join(lines))
    dist.barrier()  # torch 2.13: a process that ends while another still talks to it may abort
    dist.destroy_process_group()
    return 0 if everywhere else 1


if __name__ == "__main__":
    sys.exit(main())
