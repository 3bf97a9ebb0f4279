"""Plans and compiled code: `fit` first and compile after; the other way round is refused."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.graphs import TORCHS_WARNINGS, Graphs
from tests.toys import Stack

pytestmark = TORCHS_WARNINGS


def stack() -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    return Stack(3, dim=32), torch.randn(128, 32)


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def compile_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def compile_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="aot_eager")
    return model


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compile_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def replace_blocks(model: nn.Module) -> nn.Module:
    for i, block in enumerate(model.blocks):  # type: ignore[arg-type]
        model.blocks[i] = compile_whole(block)  # type: ignore[index, operator]
    return model


COMPILED = {
    "torch.compile(model)": (compile_whole, "OptimizedModule"),
    "model.compile()": (compile_in_place, "Stack"),
    "block.compile()": (compile_blocks, r"blocks\.0"),
    "torch.compile(block)": (replace_blocks, r"blocks\.0"),
    "model.forward": (compile_forward, "Stack"),
    "part of a model": (lambda model: nn.Sequential(compile_whole(model)), "0"),
}


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("call", [rekindle.profile, rekindle.fit], ids=["profile", "fit"])
def test_a_compiled_model_is_refused_with_what_to_do(how: str, call: Callable[..., Any]) -> None:
    model, x = stack()
    compiling, name = COMPILED[how]
    compiled = compiling(model)
    options = {"budget": "60%"} if call is rekindle.fit else {}
    with pytest.raises(ValueError, match=f"^{name} is compiled: .*fit on the model before torch"):
        call(compiled, x, loss=loss, **options)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_compiled_model_is_refused_with_a_profile_too() -> None:
    model, x = stack()
    profile = rekindle.profile(model, x, loss=loss)
    compile_blocks(model)
    with pytest.raises(ValueError, match=r"^blocks\.0 is compiled"):
        rekindle.fit(model, x, "60%", loss=loss, profile=profile)


def test_a_compiled_step_is_refused_with_what_to_do() -> None:
    model, x = stack()
    step = torch.compile(lambda: loss(model(x)), backend="aot_eager")
    with pytest.raises(ValueError, match=r"called in compiled code: .*before torch\.compile"):
        rekindle.profile(model, step)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "compiling", [compile_whole, compile_blocks, compile_in_place], ids=lambda f: f.__name__
)
def test_a_model_that_is_fitted_first_and_compiled_after_has_the_same_gradients(
    compiling: Callable[[nn.Module], nn.Module],
) -> None:
    model, x = stack()
    plain, _ = stack()
    plain = compiling(plain)  # type: ignore[assignment]
    loss(plain(x)).backward()
    rekindle.fit(model, x, "60%", loss=loss)
    compiled = compiling(model)
    for _ in range(2):
        model.zero_grad()
        loss(compiled(x)).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_plan_that_recomputes_does_so_in_the_graphs_that_are_compiled_after() -> None:
    model, x = stack()
    rekindle.apply(model, rekindle.fit(model, x, budget=least(model, x), loss=loss))
    graphs = Graphs()
    loss(torch.compile(model, backend=graphs.backend(), fullgraph=True)(x)).backward()
    assert (graphs.count, graphs.times("gelu")[0]) == (1, 3)
    assert graphs.times("gelu")[1] >= 2  # the last block may keep what the others do not


def least(model: nn.Module, x: Tensor) -> int:
    return rekindle.frontier(rekindle.profile(model, x, loss=loss), 2)[-1].peak


def test_a_larger_batch_does_not_plan_compiled_blocks_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = stack()
    plan = rekindle.fit(model, x, "60%", loss=loss)
    compile_blocks(model)
    with caplog.at_level(logging.WARNING, "rekindle"):
        loss(model(torch.cat([x, x]))).backward()
    assert rekindle.plan_of(model) is plan
    assert "not planned again: its blocks are compiled" in caplog.text
