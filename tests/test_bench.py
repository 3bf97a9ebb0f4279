"""The benchmarks run on a CPU, in seconds, and what they show is what was measured."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import plot
from benchmarks.decoder import SHAPES, Block, RunBlock, Shape
from benchmarks.figures import budget as budget_table
from benchmarks.figures import planning as planning_table
from benchmarks.figures import zoo as zoo_table
from benchmarks.figures import zoo_place
from benchmarks.strategies import (
    TORCH_EVERY_SECOND,
    TORCH_SELECTIVE,
    torch_every_second,
    torch_full,
    torch_selective,
)
from tests.graphs import TORCHS_WARNINGS, fresh_compiler
from tests.toys import gradients, same_bits


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_the_benchmark_of_budgets_runs_and_all_gradients_are_the_same(name: str) -> None:
    pytest.importorskip("scipy")
    shape: Shape = SHAPES["tiny"]
    from benchmarks import budget  # noqa: PLC0415

    if name == "llama":
        pytest.importorskip("transformers")
        shape = budget.TINY_LLAMA
    found, _, _ = budget.measure(shape, "cpu", 0.0)
    theirs = ["plain", "torch", TORCH_SELECTIVE, TORCH_EVERY_SECOND]
    assert [r.strategy for r in found][:4] == theirs
    assert found[-1].strategy == budget.LEAST
    assert all(r.gradients_identical for r in found)
    assert all((r.predicted_time_ratio is None) == (r.strategy in theirs) for r in found)


def test_the_layers_of_a_llama_are_run_by_the_strategy_and_are_let_go_after() -> None:
    pytest.importorskip("transformers")
    from benchmarks.llama import TINY_LLAMA, LlamaWorkload  # noqa: PLC0415

    work = LlamaWorkload(TINY_LLAMA, "cpu")
    calls = []

    def run(block: Any, x: Tensor) -> Tensor:
        calls.append(x.shape)
        out: Tensor = torch_full(block, x)
        return out

    work.step(lambda llama, tokens: llama(tokens, run))
    assert calls == [(TINY_LLAMA.batch, TINY_LLAMA.tokens, TINY_LLAMA.dim)] * TINY_LLAMA.layers
    assert not any(layer.gradient_checkpointing for layer in work.decoder.model.model.layers)


def test_planning_is_measured_by_the_number_of_layers() -> None:
    pytest.importorskip("scipy")
    from benchmarks.planning import measure  # noqa: PLC0415

    found = measure(SHAPES["tiny"], "cpu", 8)
    assert (found.shape, found.layers, found.distinct) == ("tiny", 8, 1)
    assert min(found.step_seconds, found.profile_seconds, found.solve_seconds) > 0


def test_the_command_is_measured_as_a_process() -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("transformers")
    from benchmarks.llama import TINY_LLAMA  # noqa: PLC0415
    from benchmarks.no_gpu import measure  # noqa: PLC0415

    found = measure(TINY_LLAMA, "plan")
    assert (found.shape, found.command) == ("tiny llama", "plan")
    assert min(found.seconds, found.cpu_seconds, found.host_gib) > 0


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def matmuls_in_backward(run: RunBlock) -> int:
    shape = SHAPES["tiny"]
    block = Block(shape, dtype=torch.float32)
    out = run(block, shape.hidden_states(dtype=torch.float32).requires_grad_())
    with _Count() as count:
        out.sum().backward()
    return count.ops["mm"]


def test_of_every_second_matmul_three_of_seven_are_run_again() -> None:
    assert matmuls_in_backward(torch_every_second) - matmuls_in_backward(torch_selective) == 3


def test_every_second_matmul_leaves_gradients_as_they_are() -> None:
    shape = SHAPES["tiny"]
    block = Block(shape, dtype=torch.float32)
    x = shape.hidden_states(dtype=torch.float32).requires_grad_()
    leaves = [x, *block.parameters()]
    plain = gradients(lambda: block(x), leaves)[1]
    again = gradients(lambda: torch_every_second(block, x), leaves)[1]
    assert all(map(same_bits, plain, again))


def test_every_way_to_keep_the_same_ops_runs_the_same_ops_again() -> None:
    from benchmarks.ops import FLOOR, measure  # noqa: PLC0415

    _, costs = measure(0.0)
    again = {name: cost.ops_again for name, cost in costs.items() if name.startswith("keep")}
    assert len(again) == 4
    assert len(set(again.values())) == 1
    assert costs[FLOOR].ops_again < again["keep by number"] < costs["recompute"].ops_again


def row(strategy: str, time: float, peak: float, predicted: float | None) -> dict[str, Any]:
    return {
        "shape": "8b",
        "strategy": strategy,
        "time_ratio": time,
        "peak_ratio": peak,
        "predicted_time_ratio": predicted,
        "predicted_peak_ratio": predicted,
    }


def test_a_table_of_budgets_has_what_was_predicted_beside_what_was_measured() -> None:
    rows = [row("torch", 1.25, 0.2, None), row("rekindle, 0.5", 1.04, 0.5, 1.016)]
    assert budget_table({"results": rows}).splitlines() == [
        "| budget (times plain) | 8b time (predicted) | 8b peak (predicted) |",
        "| --- | --- | --- |",
        "| torch | 1.25 | 0.20 |",
        "| rekindle, 0.5 | 1.04 (1.02) | 0.50 (1.02) |",
    ]


def test_a_table_of_planning_has_a_row_for_each_number_of_layers() -> None:
    rows = [
        {
            "shape": "tiny",
            "layers": count,
            "step_seconds": count / 8,
            "profile_seconds": count / 2,
            "solve_seconds": 0.05,
        }
        for count in (8, 32)
    ]
    assert planning_table({"results": rows}).splitlines()[2:] == [
        "| 8 | 1.00 | 4.0 | 0.05 |",
        "| 32 | 4.00 | 16.0 | 0.05 |",
    ]


def test_the_zoo_measures_a_model_by_its_own_checkpointing_and_by_plans() -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("transformers")
    from benchmarks.zoo_measure import measure  # noqa: PLC0415
    from benchmarks.zoo_models import FAMILIES  # noqa: PLC0415

    reported: list[Any] = []
    rows = measure("vit", FAMILIES["vit"], ["0.6", "gc"], 0.0, "cpu", reported.append)
    assert [r.strategy for r in rows] == ["plain", "gc", "recompute all", "fit 0.6", "fit gc"]
    assert [len(part) for part in reported] == [3, 4, 5, 5, 5]
    assert all(r.gradients == "identical" for r in rows)
    assert all(r.peak_ratio is not None and r.time_ratio is not None for r in rows)
    assert all((r.budget_ratio is not None) == r.strategy.startswith("fit") for r in rows)
    assert all(r.peak_ratio <= r.budget_ratio for r in rows if r.peak_ratio and r.budget_ratio)
    assert all(sum(r.plan.values()) == 5 for r in rows if r.plan)  # embeddings, too


def test_long_sequences_are_measured_by_checkpointing_and_by_a_plan() -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("transformers")
    from benchmarks import longctx  # noqa: PLC0415

    rows = [longctx.measure("qwen2", way, steps=1) for way in ("plain", "gc", "fit 35%")]
    assert len({row.gradients for row in rows}) == 1
    plain, _, fitted = rows
    assert fitted.peak_gib is not None
    assert plain.peak_gib is not None
    assert fitted.peak_gib < plain.peak_gib
    assert fitted.plan.endswith("lm_head: 1 x Linear: rows")
    table = longctx.format_rows(rows).splitlines()
    assert table[1].startswith("qwen2: plain")
    assert table[1].split()[3] == "1.00"  # a case, a way, seconds, and times the first one's


def test_long_sequences_are_predicted_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("transformers")
    from benchmarks import longctx  # noqa: PLC0415

    rows = longctx.predict("32k", "H200", is_large=False)
    assert [row.way for row in rows] == ["gc", "gc, head by rows", "fit 46GiB"]
    assert "head and loss, rows" in capsys.readouterr().out


def test_the_line_goes_from_plain_to_checkpointing_and_not_below_its_peak() -> None:
    from benchmarks.zoo_measure import line_between  # noqa: PLC0415

    assert [line_between(0.2, 1.4, at) for at in (1.0, 0.6, 0.2, 0.1)] == [1.0, 1.2, 1.4, 1.4]
    assert line_between(1.0, 1.4, 0.5) is None


def zoo_row(model: str, strategy: str, **figures: Any) -> dict[str, Any]:
    none = ("time_ratio", "peak_ratio", "line_ratio", "planning_seconds", "planning_steps", "error")
    named = {"model": model, "title": model.upper(), "strategy": strategy}
    return {**dict.fromkeys(none), **named, **figures}


def zoo_result() -> dict[str, Any]:
    planning = {"planning_seconds": 4.0, "planning_steps": 11.0}
    at_60 = {"time_ratio": 1.1, "peak_ratio": 0.59, "line_ratio": 1.2}
    at_60 |= {"predicted_time_ratio": 1.08, "predicted_peak_ratio": 0.6}
    as_gc = {"time_ratio": 1.25, "peak_ratio": 0.29, "line_ratio": 1.3}
    as_gc |= {"predicted_time_ratio": 1.24, "predicted_peak_ratio": 0.3}
    rows = [
        zoo_row("bert", "plain", time_ratio=1.0, peak_ratio=1.0, line_ratio=1.0),
        zoo_row("bert", "gc", time_ratio=1.3, peak_ratio=0.3, line_ratio=1.3),
        zoo_row("bert", "fit gc", **as_gc, **planning),
        zoo_row("bert", "fit 0.6", **at_60, **planning),
        zoo_row("unet", "plain", time_ratio=1.0, peak_ratio=1.0),
        zoo_row("unet", "fit 0.6", error="BudgetError: No plan fits.", **planning),
        zoo_row("swin", "process", error="not done in 9 s"),
    ]
    return {"results": rows}


def test_a_table_of_the_zoo_has_a_row_for_each_model_also_where_nothing_was_measured() -> None:
    head, _, *rows = zoo_table(zoo_result()).splitlines()
    fits = "fit 60% (predicted; line) | fit, as gc (predicted; line)"
    assert head.endswith(f"| gc | {fits} | planning, s (steps) |")
    at_60, as_gc = "1.10 at 0.59 (1.08 at 0.60; 1.20)", "1.25 at 0.29 (1.24 at 0.30; 1.30)"
    assert rows == [
        f"| BERT | 1.30 at 0.30 | {at_60} | {as_gc} | 4.0 (11) |",
        "| UNET | none | refused | none | 4.0 (11) |",
        "| SWIN | not done in 9 s | not done in 9 s | not done in 9 s |  |",
    ]


def test_the_place_of_the_zoo_has_its_table_once_there_are_results(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    assert zoo_place(path) == "Not measured yet: `scripts/bench zoo` does."
    result = {**zoo_result(), "device": "a GPU", "torch": "2.0"}
    path.write_text(json.dumps(result))
    source = "`scripts/bench zoo`, one run on a GPU, torch 2.0:"
    assert zoo_place(path) == f"{source}\n\n{zoo_table(result)}"


def test_the_zoo_is_drawn_without_models_that_have_no_figures() -> None:
    pytest.importorskip("matplotlib")
    drawn = plot.ZOO.drawn(zoo_result())
    assert drawn == plot.ZOO.drawn(zoo_result())
    assert ">BERT<" in drawn
    assert ">SWIN<" not in drawn


every_picture = pytest.mark.parametrize("picture", plot.PICTURES, ids=lambda p: p.path.stem)


@every_picture
def test_a_picture_is_made_from_the_results(picture: plot.Picture) -> None:
    """`python -m benchmarks.plot` writes it."""
    assert picture.is_current()


def test_a_picture_of_other_results_is_out_of_date(tmp_path: Path) -> None:
    result = json.loads(plot.BUDGET.result.read_text())
    result["results"][0]["time_ratio"] += 0.01
    other = tmp_path / "budget.json"
    other.write_text(json.dumps(result))
    assert not replace(plot.BUDGET, result=other).is_current()


@every_picture
def test_the_same_results_give_the_picture_that_is_there(picture: plot.Picture) -> None:
    mpl = pytest.importorskip("matplotlib")
    result, there = json.loads(picture.result.read_text()), picture.path.read_text()
    drawn = picture.drawn(result)
    assert drawn == picture.drawn(result)
    if f"Matplotlib v{mpl.__version__}," in there:  # another draws the same a little otherwise
        assert drawn == there


@TORCHS_WARNINGS[0]
@TORCHS_WARNINGS[1]
def test_plans_for_compiled_layers_are_benchmarked_beside_torchs_budgets() -> None:
    pytest.importorskip("scipy")
    from benchmarks import compiled  # noqa: PLC0415
    from benchmarks.workload import Workload  # noqa: PLC0415

    with fresh_compiler():
        work = Workload(SHAPES["tiny"], "cpu")
        expected = [grad.clone() for grad in work.gradients(lambda decoder, x: decoder(x))]
        planned = compiled.fitted(work, "aot_eager", shares=(90,))
        ways = compiled.torch_budgets(work, "aot_eager")
        assert list(planned.plans) == list(planned.forwards) == ["rekindle.fit, 90 %"]
        assert len(ways) == len(compiled.TORCH_BUDGETS)
        name, forward = ways.popitem()
        for run in (forward, *planned.forwards.values()):
            assert all(map(same_bits, work.gradients(run), expected)), name


def test_stages_of_planning_are_counted_where_they_are_reported() -> None:
    from benchmarks import planning_stages  # noqa: PLC0415

    count = planning_stages._Count()
    meter = planning_stages._StageMeter(count)
    for stage, ops in (("trace", 3), ("solve", 0), ("verify", 4), ("compare gradients", 1)):
        meter.report(stage)
        count.ops += ops
    for _ in meter.counted(["keep", "recompute"], "candidate"):
        count.ops += 5
    meter.end()
    counted = {stage: ops for stage, ops in meter.ops.items() if ops}
    assert counted == {"trace": 3, "a plan": 4, "gradients": 1, "blocks": 10}
    assert meter.plans == 1


def test_what_a_plan_takes_is_shown_of_one_plan() -> None:
    from benchmarks.planning_stages import COLUMNS, PLANS, Stages, format_stages  # noqa: PLC0415

    ops = dict.fromkeys(COLUMNS, 1.0) | {PLANS: 12.0}
    seconds = dict.fromkeys(COLUMNS, 0.02) | {PLANS: 0.16}
    table = format_stages([Stages("bert", "60%", 24, 1, 10.0, seconds, ops, 4, 2)]).splitlines()
    assert table[1].split() == ["bert", "60%", *["1.0"] * 4, "6.0", "1.0", "2", "17"]
    assert table[2].split() == ["CPU", "time", *["2.0"] * 4, "4.0", "2.0", "4", "26"]
