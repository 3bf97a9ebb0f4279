"""Plans and compiled code: `fit` of compiled models; and `fit` first, compile after."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import rekindle
from rekindle.planner import candidates
from rekindle.strategy import Compiled, Keep, Recompute
from tests.graphs import TORCHS_WARNINGS, Graphs
from tests.toys import Stack, same_bits

pytestmark = TORCHS_WARNINGS


Compiling = Callable[[nn.Module], nn.Module]


def stack(drop: float = 0.0) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    return Stack(3, dim=32, drop=drop), torch.randn(128, 32).requires_grad_()


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def compile_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def compile_forwards(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = torch.compile(block.forward, backend="aot_eager")
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


WAYS = [compile_blocks, replace_blocks, compile_forwards, compile_in_place, compile_whole]
"""The ways in which people compile a model; the first three compile its blocks one by one."""
EVERY_WAY = pytest.mark.parametrize("compiling", WAYS, ids=lambda way: way.__name__)
PATHS = tuple(f"blocks.{i}" for i in range(3))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of a step, from one random state."""
    torch.manual_seed(1)
    model.zero_grad()
    loss(model(x)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]


def graphs_compiled() -> int:
    """How many graphs Dynamo has handed to a backend so far."""
    return int(counters["stats"]["unique_graphs"])


@dataclass
class Fitted:
    """A compiled model that was fitted, trained, fitted again and removed."""

    plan: rekindle.Plan
    expected: list[Tensor]
    """The gradients before."""
    trained: list[list[Tensor]]
    """The gradients of two steps with the plan."""
    after_fit: int
    """Graphs that were compiled by then; so are the next."""
    after_training: int = 0
    after_other_budgets: int = 0
    after_remove: int = 0
    is_as_it_was: bool = False


@cache
def fitted(compiling: Compiling) -> Fitted:
    model, x = stack(drop=0.1)
    model = compiling(model)
    expected = gradients(model, x)
    before = [dict(vars(module)) for module in model.modules()]
    plan = rekindle.fit(model, x, "60%", loss=loss)
    count = graphs_compiled()
    found = Fitted(plan, expected, [gradients(model, x) for _ in range(2)], count)
    found.after_training = graphs_compiled()
    for budget in ("70%", "60%"):
        rekindle.fit(model, x, budget, loss=loss, profile=plan.profile)
        gradients(model, x)
    found.after_other_budgets = graphs_compiled()
    rekindle.remove(model)
    found.is_as_it_was = [dict(vars(module)) for module in model.modules()] == before
    gradients(model, x)
    found.after_remove = graphs_compiled()
    return found


@EVERY_WAY
def test_a_compiled_model_is_fitted(compiling: Compiling) -> None:
    plan = fitted(compiling).plan
    assert plan.compiled == PATHS
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak
    assert plan.measured_peak == plan.predicted_peak
    assert plan.verified is not None
    assert plan.verified.startswith("gradients bit for bit, with")


@EVERY_WAY
def test_gradients_are_those_of_the_compiled_model(compiling: Compiling) -> None:
    found = fitted(compiling)
    for step in found.trained:
        assert all(map(same_bits, step, found.expected))


@EVERY_WAY
def test_nothing_is_compiled_once_a_plan_is_there(compiling: Compiling) -> None:
    """Neither in its first step, nor by another budget, whose candidates were all measured."""
    found = fitted(compiling)
    assert found.after_fit == found.after_training == found.after_other_budgets


@EVERY_WAY
def test_remove_leaves_the_model_compiled_as_it_was(compiling: Compiling) -> None:
    found = fitted(compiling)
    assert found.is_as_it_was
    assert found.after_remove == found.after_fit


def test_layers_of_one_kind_share_what_is_compiled() -> None:
    """Each budget has two graphs: the input of the first layer requires no gradient."""
    counts = []
    for depth in (3, 6):
        torch.compiler.reset()
        before = graphs_compiled()
        torch.manual_seed(0)
        model, x = compile_blocks(Stack(depth, dim=32)), torch.randn(128, 32)
        rekindle.profile(model, x, loss=loss)
        counts.append(graphs_compiled() - before)
    assert counts[0] == counts[1]


def test_profiling_leaves_the_model_compiled_as_it_was() -> None:
    model, x = stack()
    model = compile_whole(model)
    before = [dict(vars(module)) for module in model.modules()]
    assert rekindle.profile(model, x, loss=loss).compiled == PATHS
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_compiled_block_is_profiled_with_graphs_at_several_budgets() -> None:
    model, x = stack()
    profile = rekindle.profile(compile_blocks(model), x, loss=loss)
    for block in profile.blocks:
        assert block.is_compiled
        held = [each.bytes_held for each in block.candidates]
        strategies = [each.strategy for each in block.candidates]
        assert strategies[:2] == [Keep(), Recompute()]
        assert len(strategies) > 2
        assert all(isinstance(strategy, Compiled) for strategy in strategies[2:])
        assert max(held) == held[0]


def test_a_compiled_model_that_fits_stays_as_it_is() -> None:
    model, x = stack()
    compile_in_place(model)
    call = vars(model)["_compiled_call_impl"]
    plan = rekindle.fit(model, x, "1GiB", loss=loss)
    assert plan.keeps_all
    assert vars(model)["_compiled_call_impl"] is call
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_part_of_a_model_is_compiled_and_the_rest_is_not() -> None:
    model, x = stack()
    model.blocks[1].compile(backend="aot_eager")
    plan = rekindle.fit(model, x, "60%", loss=loss)
    assert plan.compiled == ("blocks.1",)


def test_a_compiled_part_that_holds_the_blocks_is_planned_by_them() -> None:
    inner, x = stack()
    expected = gradients(nn.Sequential(compile_whole(inner)), x)
    model = nn.Sequential(compile_whole(inner))
    plan = rekindle.fit(model, x, "60%", loss=loss)
    assert plan.compiled == tuple(f"0.{path}" for path in PATHS)
    assert all(map(same_bits, gradients(model, x), expected))


def test_a_plan_for_compiled_blocks_is_saved_and_applied_again(tmp_path: Path) -> None:
    model, x = stack()
    compile_blocks(model)
    plan = rekindle.fit(model, x, "60%", loss=loss)
    expected = gradients(model, x)
    plan.save(tmp_path / "plan.json")
    loaded = rekindle.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    other = compile_blocks(stack()[0])
    rekindle.apply(other, loaded)
    assert all(map(same_bits, gradients(other, x), expected))


def test_a_plan_for_compiled_blocks_is_refused_where_they_are_not_compiled() -> None:
    model, x = stack()
    compile_blocks(model)
    plan = rekindle.fit(model, x, "60%", loss=loss)
    other = stack()[0]
    with pytest.raises(ValueError, match=r"Block at 'blocks\.0' as compiled code, but the model"):
        rekindle.apply(other, plan)
    assert not any("forward" in vars(module) for module in other.modules())


def test_a_plan_for_other_code_is_refused_and_leaves_the_one_before() -> None:
    model, x = stack()
    plan = rekindle.fit(model, x, "60%", loss=loss)
    other = compile_blocks(stack()[0])
    before = rekindle.fit(other, x, "60%", loss=loss)
    compiled = graphs_compiled()
    with pytest.raises(ValueError, match=r"as code that is not compiled, but the model"):
        rekindle.apply(other, plan)
    assert rekindle.plan_of(other) is before
    gradients(other, x)
    assert graphs_compiled() == compiled


def test_strategies_by_hand_replace_a_plan_for_compiled_blocks() -> None:
    """They are part of the graphs of blocks that are compiled, as without a plan before."""
    model, x = stack()
    compile_blocks(model)
    expected = gradients(model, x)
    rekindle.fit(model, x, "60%", loss=loss)
    rekindle.apply(model, "recompute")
    assert all(vars(block).get("_compiled_call_impl") is not None for block in model.blocks)
    assert all(map(same_bits, gradients(model, x), expected))


def test_a_profile_of_blocks_as_they_are_is_refused_once_they_are_compiled() -> None:
    model, x = stack()
    profile = rekindle.profile(model, x, loss=loss)
    compile_blocks(model)
    with pytest.raises(ValueError, match="of blocks that were not compiled, and now"):
        rekindle.fit(model, x, "60%", loss=loss, profile=profile)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused_with_what_to_do(mode: str) -> None:
    model, x = stack()
    model.compile(mode=mode)
    with pytest.raises(ValueError, match=r"^blocks\.0 is compiled with CUDA graphs.*no-cudagraphs"):
        rekindle.fit(model, x, "60%", loss=loss)


def test_compiled_backwards_are_refused_while_planning_and_right_with_a_plan() -> None:
    model, x = stack()
    compile_blocks(model)
    expected = gradients(model, x)
    compiled_backward = partial(compiled_autograd._enable, torch.compile(backend="aot_eager"))
    with compiled_backward(), pytest.raises(ValueError, match="outside of that context"):
        rekindle.fit(model, x, "60%", loss=loss)
    rekindle.fit(model, x, "60%", loss=loss)
    with compiled_backward():
        assert all(map(same_bits, gradients(model, x), expected))


@pytest.mark.parametrize("how", ["dynamic", "autocast"])
def test_gradients_are_those_of_the_compiled_model_with(how: str) -> None:
    model, x = stack(drop=0.1)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True, dynamic=how == "dynamic")

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return loss(model(x))

    def train() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        step().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = train()
    plan = rekindle.fit(model, step, "60%")
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak
    compiled = graphs_compiled()
    assert all(map(same_bits, train(), expected))
    assert graphs_compiled() == compiled


def test_compiled_blocks_move_what_their_graphs_save_and_their_inputs() -> None:
    """A step fits that does not with every block recomputed, as those hold their inputs."""
    torch.manual_seed(0)
    model, x = Stack(8, dim=16), torch.randn(1024, 16).requires_grad_()
    compile_blocks(model)
    expected = gradients(model, x)
    profile = rekindle.profile(model, x, loss=loss, spill=True)
    assert profile.recompute_peak is not None
    budget = rekindle.frontier(profile, 2)[-1].peak
    assert budget < profile.recompute_peak
    plan = rekindle.fit(model, x, budget, loss=loss, profile=profile)
    assert plan.offloads
    assert plan.measured_peak is not None
    assert plan.measured_peak <= budget
    compiled = graphs_compiled()
    with rekindle.observe() as seen:
        assert all(map(same_bits, gradients(model, x), expected))
    assert 0 < seen.spill.bytes_in <= seen.spill.bytes_out
    assert graphs_compiled() == compiled


def test_a_model_that_inductor_compiles_is_fitted_with_a_warning_of_what_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates, "BUDGETS", (0.0,))  # each is some seconds of a C++ compiler
    model, x = stack()
    for block in model.blocks:
        block.compile(fullgraph=True)
    expected = gradients(model, x)
    with pytest.warns(UserWarning, match="memory that inductor's code allocates is not counted"):
        plan = rekindle.fit(model, x, "80%", loss=loss)
    assert any(isinstance(candidate.strategy, Compiled) for _, _, candidate in plan.blocks)
    assert plan.verified is not None
    compiled = graphs_compiled()
    for one, other in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert graphs_compiled() == compiled


def test_a_plan_says_which_graphs_round_otherwise() -> None:
    model, x = stack()
    compile_blocks(model)
    profile = rekindle.profile(model, x, loss=loss)
    (block,) = profile.blocks
    others = (
        replace(each, is_exact=False)
        for each in block.candidates
        if isinstance(each.strategy, Compiled)
    )
    profile = replace(
        profile, blocks=(replace(block, candidates=(*block.candidates[:2], *others)),)
    )
    plan = rekindle.fit(model, x, "60%", loss=loss, profile=profile)
    count = sum(isinstance(candidate.strategy, Compiled) for _, _, candidate in plan.blocks)
    assert count
    assert f"; the graphs of {count} round otherwise than those without a plan" in str(plan)
    assert "compiled        3 of 3 blocks, each by itself" in str(plan)


def test_compiled_once_more_a_model_still_runs_by_its_plan() -> None:
    """The graph breaks around blocks that have graphs of their own."""
    model, x = stack()
    compile_blocks(model)
    rekindle.fit(model, x, "60%", loss=loss)
    expected, compiled = gradients(model, x), graphs_compiled()
    again = torch.compile(model, backend="aot_eager")
    assert all(map(same_bits, gradients(again, x), expected))  # type: ignore[arg-type]
    assert saved_bytes(again, x) == saved_bytes(model, x)  # type: ignore[arg-type]
    assert graphs_compiled() <= compiled + 1  # of a block that the plan keeps


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd holds after a forward."""
    sizes: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        sizes[saved.untyped_storage().data_ptr()] = saved.nbytes
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = model(x)
    del out
    return sum(sizes.values())


def test_a_compiled_model_needs_a_device() -> None:
    model, x = stack()
    with pytest.raises(ValueError, match=r'is compiled: .*device="meta"'):
        rekindle.profile(compile_blocks(model), x, loss=loss, device="meta")


def test_a_compiled_step_is_refused_with_what_to_do() -> None:
    model, x = stack()
    step = torch.compile(lambda: loss(model(x)), backend="aot_eager")
    with pytest.raises(ValueError, match=r"called in compiled code: .*give the model itself"):
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
    assert "not planned again: its blocks are compiled; call rekindle.fit before" in caplog.text


def test_a_larger_batch_does_not_plan_again_what_was_compiled_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = stack()
    compile_blocks(model)
    plan = rekindle.fit(model, x, "60%", loss=loss)
    with caplog.at_level(logging.WARNING, "rekindle"):
        loss(model(torch.cat([x, x]))).backward()
    assert rekindle.plan_of(model) is plan
    assert "its blocks are compiled; call rekindle.fit with the larger batch" in caplog.text


def test_a_forward_that_is_never_to_be_compiled_stays() -> None:
    model, x = stack()
    disabled = torch.compiler.disable(model.blocks[0].forward)
    model.blocks[0].forward = disabled
    profile = rekindle.profile(model, x, loss=loss)
    assert profile.compiled == ()
    assert vars(model.blocks[0])["forward"] is disabled
