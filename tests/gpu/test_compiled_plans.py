"""Plans for compiled layers on a GPU: inductor's graphs, counted by the allocator."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

import rekindle
from tests.graphs import TORCHS_WARNINGS, fresh_compiler

pytestmark = [pytest.mark.gpu, *TORCHS_WARNINGS]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing was compiled before."""
    pytest.importorskip("scipy")
    with fresh_compiler():
        yield


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_flexibly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flex_attention(q, k, v)
    assert isinstance(out, Tensor)
    return out


class Layer(nn.Module):
    """A decoder layer, with dropout at its end."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(512) for _ in range(2))
        self.qkv, self.out = nn.Linear(512, 1536), nn.Linear(512, 512)
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 8, 64)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + nn.functional.dropout(
            self.down(nn.functional.silu(self.up(self.norms[1](x)))), 0.1, self.training
        )


def compiled_layers(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend,
) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(attend) for _ in range(8))).to("cuda", torch.bfloat16)
    for layer in model:
        layer.compile(fullgraph=True)
    x = torch.randn(8, 1024, 512, device="cuda", dtype=torch.bfloat16)
    return model, x.requires_grad_()


def loss(out: Tensor) -> Tensor:
    return out.float().square().mean()


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss(model(x)).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("attention", [attend, attend_flexibly])
@pytest.mark.parametrize("budget", ["50%", "25%"])
def test_a_compiled_model_fits_and_keeps_its_gradients(
    budget: str, attention: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    model, x = compiled_layers(attention)
    expected = train(model, x)
    plan = rekindle.fit(model, x, budget, loss=loss)
    assert len(plan.compiled) == 8
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    compiled = counters["stats"]["unique_graphs"]
    for _ in range(2):
        for one, other in zip(train(model, x), expected, strict=True):
            assert (one - other).float().norm() <= 0.02 * other.float().norm()
    assert counters["stats"]["unique_graphs"] == compiled


def test_what_graphs_save_leaves_for_host_memory_and_comes_back() -> None:
    model, x = compiled_layers()
    profile = rekindle.profile(model, x, loss=loss)
    assert profile.bytes_per_second > 0
    plan = rekindle.fit(
        model, x, rekindle.frontier(profile, 2)[-1].peak, loss=loss, profile=profile
    )
    assert plan.offloads
    for _ in range(4):  # in which offload learns
        train(model, x)
    with rekindle.observe() as seen:
        train(model, x)
    assert 0 < seen.offload.bytes_in <= seen.offload.bytes_out


def test_profiling_compiled_layers_leaves_nothing_on_the_device() -> None:
    model, x = compiled_layers()
    rekindle.profile(model, x, loss=loss)  # loads kernels
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    rekindle.profile(model, x, loss=loss)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
