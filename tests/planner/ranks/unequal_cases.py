"""Cases of `test_rank_sync.py`: ranks that run other blocks or ops, and blocks that are split."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.strategy import Selective
from tests.planner.ranks.rank_helpers import (
    DIM,
    TOKENS,
    Found,
    facts_of,
    fitted,
    gradients,
    loss_of,
    own_batch,
    same,
)
from tests.toys import Block, Stack


class Skipping(Stack):
    """Leaves a block out on one rank."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for i, block in enumerate(self.blocks):
            if i != 1 + dist.get_rank():
                x = block(x)
        return x


class Experts(nn.Module):
    """Sends each token to one of some experts; one without tokens is not run."""

    def __init__(self, all_have_gradients: bool, count: int = 3) -> None:
        super().__init__()
        self.all_have_gradients = all_have_gradients
        self.experts = nn.ModuleDict({str(i): Block(DIM) for i in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long() if dist.get_rank() else x[:, 0].sign().long() + 1
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts.values()):
            at = (chosen == i).nonzero().flatten()
            if len(at):
                out = out.index_add(0, at, expert(x[at]))
            elif self.all_have_gradients:
                out = out + 0 * sum(p.sum() for p in expert.parameters())
        return x + out


class Routed(nn.Module):
    """Layers of experts."""

    def __init__(self, all_have_gradients: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(Experts(all_have_gradients), nn.LayerNorm(DIM)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


finding_unused = partial(DistributedDataParallel, find_unused_parameters=True)


def skipped() -> Found:
    torch.manual_seed(0)
    model = finding_unused(Skipping(4, DIM))
    x = own_batch()
    expected = gradients(model, x)
    plan = rekindle.fit(model, x, "70%", loss=loss_of)
    return {"plan": facts_of(plan), "same": same(gradients(model, x), expected)}


def experts(wrap: Callable[[nn.Module], nn.Module], all_have_gradients: bool) -> Found:
    """On one rank, an expert has no tokens."""
    torch.manual_seed(0)
    model = wrap(Routed(all_have_gradients))
    x = own_batch()
    if not dist.get_rank():
        x[0, 0], x[1, 0], x[2, 0] = -1, 0, 1
    expected = gradients(model, x)
    profile = rekindle.profile(model, x, loss=loss_of)
    found: Found = {"same": True, "fits": True, "blocks": []}
    for share in ("85%", "70%"):
        plan = rekindle.fit(model, x, share, loss=loss_of, profile=profile)
        found["same"] &= same(gradients(model, x), expected)
        assert plan.measured_peak is not None
        found["fits"] &= plan.measured_peak <= plan.budget
        found["blocks"].append([type(option.strategy).__name__ for _, _, option in plan.blocks])
    counts = {
        address.count
        for o in profile.blocks[0].candidates
        if isinstance(o.strategy, Selective)
        for address in o.strategy.policy.kept
    }
    return {
        **found,
        "strategies": [type(o.strategy).__name__ for o in profile.blocks[0].candidates],
        "counts": len(counts),
    }


class Split(nn.Module):
    """A block of tensor parallelism that is given, and returns, sharded tensors."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(1)
        up, down = torch.randn(DIM, 2 * DIM) / 8, torch.randn(2 * DIM, DIM) / 8
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(1)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(0)]))
        self.inner = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x @ self.up) @ self.down
        assert isinstance(out, DTensor)
        return x + out.redistribute(placements=[Replicate()])


class SplitStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Split() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Any = DTensor.from_local(x, self.blocks[0].up.device_mesh, [Replicate()])
        for block in self.blocks:
            out = block(out)
        return out.to_local()


def sharded_outputs() -> Found:
    torch.manual_seed(0)
    return fitted(SplitStack(), torch.randn(TOKENS, DIM))


def hooks_that_shard() -> Found:
    """Blocks whose hooks make sharded tensors of what they are given, and return such."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded_input(_block: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
        return (DTensor.from_local(args[0], mesh, [Replicate()]),)

    class Gathering(Stack):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            for block in self.blocks:
                x = block(x).to_local()
            return x

    torch.manual_seed(0)
    model = Gathering(3, DIM)
    for block in model.blocks:
        distribute_module(block, mesh, input_fn=sharded_input)
    return fitted(model, torch.ones(TOKENS, DIM))
