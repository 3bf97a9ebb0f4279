"""Models that `accelerator.prepare` changes, before strategies are given or after."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle import policies
from tests.ranks import one_rank
from tests.toys import Mlp, Stack, same_bits

accelerate = pytest.importorskip("accelerate")

from rekindle.integrations import accelerate as ours  # noqa: E402

STEPS = 3
WHATS: dict[str, Any] = {"recompute": "recompute", "policy": policies.keep_matmuls_and_attention}
every_what = pytest.mark.parametrize("what", WHATS.values(), ids=WHATS)
every_precision = pytest.mark.parametrize("precision", ["no", "bf16"])
every_order = pytest.mark.parametrize("first", ["apply", "prepare"])
Build = Callable[[], nn.Module]
MODELS: dict[str, tuple[Build, int]] = {
    "blocks": (lambda: Stack(3, drop=0.2), 3),
    "one block itself": (lambda: Mlp(drop=0.2), 1),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def new_state() -> Iterator[None]:
    """Accelerate has one precision a process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def new_accelerator(precision: str = "no") -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, mixed_precision=precision)


def train(name: str, precision: str, what: Any = None, first: str = "apply") -> list[Tensor]:
    """The loss of each step, then every gradient of the last one, then every parameter."""
    accelerator = new_accelerator(precision)
    torch.manual_seed(1)
    model = MODELS[name][0]()
    if what is not None and first == "apply":
        ours.apply(model, what)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if what is not None and first == "prepare":
        ours.apply(model, what)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        out = model(torch.randn(4, 8))
        assert out.dtype == torch.float32
        loss = out.square().mean()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *grads, *(p.detach() for p in model.parameters())]


plain = functools.cache(train)


@every_model
@every_order
@every_precision
@every_what
def test_a_prepared_model_with_strategies_trains_as_without_them(
    what: Any, precision: str, first: str, name: str
) -> None:
    expected = plain(name, precision)
    with rekindle.observe() as seen:
        curve = train(name, precision, what, first)
    assert all(same_bits(a, b) for a, b in zip(curve, expected, strict=True))
    regions = MODELS[name][1] * STEPS
    assert (seen.total.forwards, seen.total.replays) == (regions, regions)


@every_model
def test_remove_leaves_a_prepared_model_as_it_was_prepared(name: str) -> None:
    model = new_accelerator("bf16").prepare(MODELS[name][0]())
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    ours.apply(model)
    ours.remove(model)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before


@every_model
def test_strategies_given_before_are_removed_after(name: str) -> None:
    model = MODELS[name][0]()
    ours.apply(model)
    model = new_accelerator("bf16").prepare(model)
    ours.remove(model)
    with rekindle.observe() as seen:
        assert model(torch.randn(4, 8)).dtype == torch.float32
    assert seen.total.forwards == 0


@every_order
def test_an_unwrapped_model_has_its_forward_and_its_strategies(first: str) -> None:
    accelerator = new_accelerator("bf16")
    model = MODELS["blocks"][0]()
    if first == "apply":
        ours.apply(model)
    prepared = accelerator.prepare(model)
    if first == "prepare":
        ours.apply(prepared)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    with rekindle.observe() as seen:
        unwrapped(torch.randn(4, 8)).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (3, 3)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")
def test_a_model_inside_ddp_has_the_paths_it_has_by_itself() -> None:
    with one_rank():
        model = DistributedDataParallel(Stack(2))
        applied = ours.apply(model, {"blocks.*.mlp": "recompute"})
        with rekindle.observe() as seen:
            model(torch.randn(4, 8)).sum().backward()
        ours.remove(model)
    assert [entry.path for entry in applied.entries] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert (seen.total.forwards, seen.total.replays) == (2, 2)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_of_transformers_has_no_cache_while_it_trains() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = new_accelerator("bf16").prepare(transformers.LlamaForCausalLM(config).train())
    tokens = torch.tensor([[1, 2, 3]])
    assert model(tokens).past_key_values is not None
    ours.apply(model)
    with rekindle.observe() as seen:
        out = model(tokens, labels=tokens)
        out.loss.backward()
    assert out.past_key_values is None
    assert (seen.total.forwards, seen.total.replays) == (2, 2)
    ours.remove(model)
    assert model(tokens).past_key_values is not None
