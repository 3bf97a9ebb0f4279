"""Ops on fake tensors: as on a GPU, real where a model reads integers, refused elsewhere."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.planner.trace.fake_tensors import with_fake_tensors
from rekindle.strategy import Keep
from tests.planner.cases import step, unchanged
from tests.planner.fake_cases import gpt2, padded_gpt2
from tests.toys import Stack

pytest.importorskip("scipy")


ON_A_GPU = {
    torch.float32: "aten::_scaled_dot_product_efficient_attention",
    torch.bfloat16: "aten::_scaled_dot_product_flash_attention",
}


class Dropping(nn.Module):
    """Attention with dropout, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return dropout(scaled_dot_product_attention(x, x, x, dropout_p=0.1), 0.2)


class Names(TorchDispatchMode):
    """The names of ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ON_A_GPU, ids=str)
def test_dropout_and_attention_with_dropout_are_as_on_a_gpu(dtype: torch.dtype) -> None:
    model, x = Dropping().to(dtype), torch.randn(2, 4, 16, 8, dtype=dtype)
    found = {}
    for name in ("cpu", "H100"):
        with with_fake_tensors(model, x, as_on=name) as given, Names() as names:
            model(given)
        found[name] = names.found
    with Names() as names:
        model(x)
    assert found["cpu"] == names.found
    assert found["H100"][-3:] == [ON_A_GPU[dtype], "aten::detach", "aten::native_dropout"]


def test_blocks_with_dropout_are_replayed_as_on_a_gpu() -> None:
    model = nn.Sequential(*(Dropping() for _ in range(2)))
    profile = rekindle.profile(model, torch.randn(2, 4, 16, 8), device="meta", like="H100")
    keep = profile.blocks[0].candidates[0]
    assert keep.strategy == Keep()
    # Results of the product, attention, and dropout; attention's statistics and seed; the mask.
    size, statistics, seed, mask = 4 * 1024, 4 * 2 * 4 * 32, 2 * 8, 1024
    assert keep.bytes_held == 3 * size + statistics + seed + mask


class Deciding(nn.Module):
    """Looks at a value to decide what to run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out if out.sum() > 0 else -out


def test_a_step_that_looks_at_values_is_refused_and_leaves_nothing_changed() -> None:
    model, batch = Deciding(), torch.randn(4, 16)
    step(model, batch)
    with unchanged(model), pytest.raises(rekindle.RekindleError, match="looks at the values"):
        rekindle.profile(model, batch, device="meta", like="H200")
    assert all(isinstance(p, nn.Parameter) and type(p) is nn.Parameter for p in model.parameters())


class Counting(nn.Module):
    """Looks at positions, which depend on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0])
        assert bool((positions.diff() == 1).all()), "not packed"
        assert int(positions.max().item()) == x.shape[0] - 1
        out: Tensor = self.blocks(x * positions[:, None])
        return out


def test_whole_numbers_that_no_input_decides_may_be_looked_at() -> None:
    model = Counting().to("meta")
    profile = rekindle.profile(model, torch.empty(4, 16, device="meta"), device="meta", like="T4")
    assert len(profile.order) == 2


@pytest.mark.usefixtures("few_sets")
def test_a_mask_of_the_batch_may_be_looked_at() -> None:
    """A model of transformers leaves out a mask that hides nothing: so does its profile."""
    model, batch = gpt2()
    mask = torch.ones_like(batch["input_ids"])
    whole = rekindle.profile(model, {**batch, "attention_mask": mask}, device="meta", like="cpu")
    model, batch = padded_gpt2()
    hidden = rekindle.profile(model, batch, device="meta", like="cpu")
    assert "bool[2, 1, 16, 16]" in hidden.blocks[0].signature
    assert "bool[2, 1, 16, 16]" not in whole.blocks[0].signature


class Dropped(nn.Module):
    """Draws a number for each layer, to drop it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.blocks:
            if torch.rand([]) >= 0.0:
                x = block(x)
        return x


def test_a_number_that_is_drawn_may_be_looked_at_and_the_generator_ends_as_it_was() -> None:
    model, batch = Dropped(), torch.randn(4, 16)
    before = torch.get_rng_state()
    found = rekindle.profile(model, batch, device="meta", like="T4")
    assert len(found.order) == 2
    assert torch.equal(torch.get_rng_state(), before)
