"""A plan as a value: saved and read again, printed, applied to a model, refused by another."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.modules import apply_strategies
from rekindle.planner.candidates import with_names
from rekindle.planner.types import BlockTrace, Candidate, Nearby, TracedOp, TracedValue
from rekindle.strategy import Keep, NumberedOps, Recompute, Selective
from tests.toys import Block, Stack, gradients, same_bits

KEEP = Candidate(Keep(), 100, 0, 0.001, 0.002, 110, 30)
DROP = Candidate(Recompute(), 10, 0, 0.001, 0.003, 90, 120)
SOME = Candidate(
    Selective(NumberedOps((1, 3), (5,))),
    *(40, 20, 0.001, 0.0025, 60, 70),
    kept_names=("mm", "attention"),
    offloaded_names=("layer_norm",),
)


def plan_of(*options: Candidate, **more: Any) -> rekindle.Plan:
    values: dict[str, Any] = {
        "model": "Stack",
        "batch": "float32[4, 8]",
        "device": "cpu",
        "budget": 3 * 2**20,
        "predicted_peak": 2 * 2**20,
        "predicted_time": 0.015,
        "plain_peak": 4 * 2**20,
        "plain_time": 0.0125,
        "gap": 0.0001,
        "peak_at": "the backward of blocks.2",
        "blocks": tuple((f"blocks.{i}", "Block", option) for i, option in enumerate(options)),
    }
    return rekindle.Plan(**{**values, **more})


PLAN = plan_of(KEEP, DROP, SOME)


def saved(plan: rekindle.Plan, folder: Path, **changes: Any) -> Path:
    """A file with a plan in it, after some changes to its JSON; None takes a field away."""
    path = folder / "plan.json"
    plan.save(path)
    values = json.loads(path.read_text())
    values = {k: v for k, v in {**values, **changes}.items() if v is not None}
    path.write_text(json.dumps(values))
    return path


NEAR = replace(PLAN, less=Nearby(2 * 2**20, 0.0181), more=Nearby(5 * 2**20, None))
every_plan = pytest.mark.parametrize(
    "plan", [PLAN, PLAN.measured(123, 0.5), NEAR], ids=["predicted", "measured", "with more"]
)


@every_plan
def test_a_plan_that_is_read_again_is_the_same(plan: rekindle.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = rekindle.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert hash(again) == hash(plan)
    assert json.dumps(again.as_json()) == json.dumps(plan.as_json())


def test_a_path_may_be_text(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    PLAN.save(path)
    assert rekindle.Plan.load(path) == PLAN


def test_a_plan_that_was_solved_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    plan = rekindle.solve(rekindle.profile(Stack(3, 16), torch.randn(64, 16)), "70%")
    plan.save(tmp_path / "plan.json")
    assert rekindle.Plan.load(tmp_path / "plan.json") == plan


def test_a_saved_plan_is_json_of_numbers_and_text(tmp_path: Path) -> None:
    def kinds(value: Any) -> set[type]:
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            return set().union(*(kinds(item) for item in inner))
        return {type(value)}

    PLAN.save(tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert kinds(values) <= {str, int, float, bool, type(None)}
    assert (values["schema"], values["version"]) == ("rekindle plan", 11)


def test_a_saved_plan_has_every_field_of_the_plan_but_its_profile(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values.keys() - {"schema", "version"} == vars(PLAN).keys() - {"profile"}


@pytest.mark.parametrize("schema", ["another's plan", None])
def test_a_file_of_another_schema_is_refused(schema: str | None, tmp_path: Path) -> None:
    path = saved(PLAN, tmp_path, schema=schema)
    with pytest.raises(ValueError, match=r"plan\.json is not (a plan of rekindle's|JSON)"):
        rekindle.Plan.load(path)


@pytest.mark.parametrize("text", ["[]", "3", '"rekindle plan"', "not json", ""])
def test_a_file_that_is_no_plan_at_all_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json is not (a plan of rekindle's|JSON)"):
        rekindle.Plan.load(path)


def test_another_version_is_refused_with_both(tmp_path: Path) -> None:
    path = saved(PLAN, tmp_path, version=1)
    with pytest.raises(ValueError, match="has version 1, but this rekindle reads 4 to 11"):
        rekindle.Plan.load(path)


def test_a_plan_without_one_of_its_fields_is_refused_with_its_name(tmp_path: Path) -> None:
    path = saved(PLAN, tmp_path, blocks=None)
    with pytest.raises(ValueError, match="blocks"):
        rekindle.Plan.load(path)


def test_a_plan_with_a_field_too_many_is_refused_with_its_name(tmp_path: Path) -> None:
    path = saved(PLAN, tmp_path, colour="red")
    with pytest.raises(ValueError, match="colour"):
        rekindle.Plan.load(path)


@pytest.mark.parametrize(
    ("strategy", "match"),
    [
        (
            {"strategy": "burn"},
            r"\[2\]\.strategy\.strategy should be one of keep, .*, but is 'burn'",
        ),
        (
            {"strategy": "saved_indices", "tier": "tape"},
            r"strategy\.tier should be one of host, disk, but is 'tape'",
        ),
        (
            {"strategy": "selective", "policy": {"policy": "numbered_ops", "kept": ["a"]}},
            r"kept\[0\] should be a whole number from 0 on, but is 'a'",
        ),
    ],
)
def test_a_plan_with_a_strategy_that_there_is_not_is_refused(
    strategy: dict[str, Any], match: str, tmp_path: Path
) -> None:
    path = saved(plan_of(KEEP, KEEP, KEEP), tmp_path)
    values = json.loads(path.read_text())
    values["blocks"][0][2]["strategy"] = strategy
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=match):
        rekindle.Plan.load(path)


def test_a_plan_for_another_class_is_refused_with_both() -> None:
    with pytest.raises(ValueError, match="plan is for a Stack, but the model is a Sequential"):
        rekindle.apply(nn.Sequential(Stack(3)), PLAN)


def test_a_plan_with_more_blocks_is_refused_with_the_one_that_is_missing() -> None:
    with pytest.raises(ValueError, match=r"plan has a Block at 'blocks\.2', but the model has not"):
        rekindle.apply(Stack(2), PLAN)


def test_a_plan_with_fewer_blocks_is_refused_with_the_one_too_many() -> None:
    with pytest.raises(ValueError, match=r"blocks\.3"):
        rekindle.apply(Stack(4), PLAN)


def test_a_plan_for_blocks_of_another_class_is_refused_with_both() -> None:
    model = Stack(3)
    model.blocks[1] = nn.Identity()
    with pytest.raises(ValueError, match=r"a Block at 'blocks\.1', but the model has Identity"):
        rekindle.apply(model, PLAN)


def test_a_plan_that_is_refused_leaves_the_model_as_it_is() -> None:
    model = Stack(2)
    rekindle.apply(model, "recompute")
    before = [vars(block)["forward"] for block in model.blocks]
    with pytest.raises(ValueError, match="plan"):
        rekindle.apply(model, PLAN)
    assert [vars(block)["forward"] for block in model.blocks] == before


def assert_unchanged_by(model: nn.Module, error: type[BaseException], apply: Any) -> None:
    """What raises leaves strategies, the plan that stands on a model and all hooks in place."""

    def state() -> list[Any]:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
        return [
            rekindle.plan_of(model),
            *(vars(m).get("forward") for m in model.modules()),
            *(vars(m).get("_rekindle_attached") for m in model.modules()),
            *(dict(vars(m)[name]) for m in model.modules() for name in hooks),
            *(f.is_on for m in model.modules() if (f := vars(m).get("forward")) is not None),
        ]

    before = state()
    x = torch.randn(4, 8, requires_grad=True)
    with rekindle.observe() as seen:
        _, grads, _ = gradients(lambda: model(x), [x, *model.parameters()])
    with pytest.raises(error):
        apply()
    assert state() == before
    with rekindle.observe() as again:
        _, now, _ = gradients(lambda: model(x), [x, *model.parameters()])
    assert again.total == seen.total
    assert all(map(same_bits, grads, now))


applied_before = pytest.mark.parametrize(
    "before", [None, "recompute", plan_of(DROP, DROP, KEEP, inputs=((4, 8),))]
)


@applied_before
def test_a_plan_that_fails_while_it_is_applied_changes_nothing(before: Any) -> None:
    model = Stack(3)
    if before is not None:
        rekindle.apply(model, before)
    broken = replace(PLAN, inputs=("abc",))  # type: ignore[arg-type]
    assert_unchanged_by(model, TypeError, lambda: rekindle.apply(model, broken))


@applied_before
@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook"])
def test_an_interrupt_while_a_plan_is_applied_changes_nothing(
    before: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack(3)
    if before is not None:
        rekindle.apply(model, before)
    plan = replace(PLAN, inputs=((4, 8),))
    register = getattr(nn.Module, name)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        register(*args, **kwargs)
        raise KeyboardInterrupt

    def apply() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, name, interrupted)
            rekindle.apply(model, plan)

    assert_unchanged_by(model, KeyboardInterrupt, apply)


def test_a_module_whose_forward_cannot_be_replaced_leaves_the_others_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Stack(3)
    rekindle.apply(model, "recompute")
    install_forward = apply_strategies.install_forward

    def until_the_last(module: nn.Module, *given: Any) -> None:
        if module is model.blocks[2]:
            raise RuntimeError("no")
        install_forward(module, *given)

    def apply() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(apply_strategies, "install_forward", until_the_last)
            rekindle.apply(model, rekindle.policies.keep_matmuls)

    assert_unchanged_by(model, RuntimeError, apply)


def test_each_block_is_given_what_its_option_says() -> None:
    applied = rekindle.apply(Stack(3), PLAN)
    assert [(entry.path, entry.strategy) for entry in applied.entries] == [
        ("blocks.0", Keep()),
        ("blocks.1", Recompute()),
        ("blocks.2", Selective(NumberedOps((1, 3), (5,)))),
    ]


def test_what_is_applied_prints() -> None:
    assert str(rekindle.apply(Stack(3), PLAN)) == "\n".join(
        [
            "Stack",
            "  blocks.0: Block: keep",
            "  blocks.1: Block: recompute",
            f"  blocks.2: Block: {PLAN.blocks[2][2].describe()}",
        ]
    )


def test_removing_a_plan_leaves_the_model_as_it_was() -> None:
    model = Stack(3)
    before = [dict(vars(module)) for module in model.modules()]
    rekindle.apply(model, PLAN)
    rekindle.remove(model)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_plan_that_was_saved_does_what_it_did_before(tmp_path: Path) -> None:
    plan = plan_of(DROP, replace(SOME, strategy=Selective(NumberedOps((1, 3)))), DROP)
    plan.save(tmp_path / "plan.json")
    model, x = Stack(3, drop=0.3), torch.randn(4, 8)
    leaves = list(model.parameters())
    plain = gradients(lambda: model(x), leaves)[1]
    rekindle.apply(model, rekindle.Plan.load(tmp_path / "plan.json"))
    with rekindle.observe() as seen:
        planned = gradients(lambda: model(x), leaves)[1]
    assert (seen.total.forwards, seen.total.replays) == (3, 3)
    assert all(map(same_bits, plain, planned))


def test_a_plan_replaces_what_was_applied_before() -> None:
    model = Stack(3)
    rekindle.apply(model, "recompute")
    rekindle.apply(model, plan_of(KEEP, KEEP, DROP))
    with rekindle.observe() as seen:
        model(torch.randn(4, 8)).sum().backward()
    assert seen.total.replays == 1


def test_a_plan_says_whether_it_offloads() -> None:
    assert PLAN.offloads
    assert not plan_of(KEEP, DROP).offloads


def test_a_plan_prints_what_happens_to_which_blocks_and_what_it_costs() -> None:
    assert str(plan_of(DROP, DROP, KEEP)) == "\n".join(
        [
            "Plan for Stack within 3 MiB",
            "  predicted peak  2 MiB in the backward of blocks.2 (without a plan 4 MiB)",
            "  predicted time  15.0 ms a step (1.20x without a plan)",
            "  blocks.0-1: 2 x Block: recompute: 10 B held, 4.00 ms",
            "  blocks.2: 1 x Block: keep: 100 B held, 3.00 ms",
        ]
    )


def test_a_plan_prints_what_was_measured_and_what_moves() -> None:
    lines = str(PLAN.measured(2**20, 0.0142)).splitlines()
    assert lines[3] == "  measured        1 MiB, 14.2 ms a step"
    assert lines[4] == "  moved away      20 B to host memory"
    assert lines[-1] == (
        "  blocks.2: 1 x Block: keep 2 results (mm, attention), offload 1 result (layer_norm), "
        "recompute the rest: 40 B held, 20 B moved, 3.50 ms"
    )


def test_a_plan_prints_what_less_memory_costs_and_more_saves() -> None:
    less, more = Nearby(1_887_437, 0.0181), Nearby(5 * 2**20, 0.013)
    lines = str(replace(PLAN, less=less, more=more)).splitlines()
    assert lines[4:6] == [
        "  with less       1.8 MiB: +3.10 ms a step",
        "  with more       5 MiB: -2.00 ms a step",
    ]


def test_a_plan_prints_where_no_plan_fits_and_where_more_is_no_faster() -> None:
    less, more = Nearby(2**20, None), Nearby(5 * 2**20, PLAN.predicted_time)
    lines = str(replace(PLAN, less=less, more=more)).splitlines()
    assert lines[4:6] == [
        "  with less       1 MiB: no plan fits",
        "  with more       5 MiB: no change in time",
    ]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (Candidate(Keep()), "keep"),
        (Candidate(Recompute()), "recompute"),
        (Candidate(Selective(NumberedOps())), "recompute"),
        (Candidate(Selective(NumberedOps((1, 2, 3)))), "keep 3 results, recompute the rest"),
        (Candidate(Selective(NumberedOps(offloaded=(4,)))), "offload 1 result, recompute the rest"),
        (
            Candidate(Selective(NumberedOps(tuple(range(9)))), kept_names=tuple("abcdefghb")),
            "keep 9 results (a, b x2, c, d, 4 more), recompute the rest",
        ),
    ],
)
def test_an_option_says_what_becomes_of_what(option: Candidate, words: str) -> None:
    assert option.describe() == words


def test_ops_are_named_from_the_largest_result_to_the_smallest() -> None:
    sizes = (10, 40, 20, 30)
    names = ("aten::rsqrt", "aten::mm", "aten::_softmax", "aten::mm")
    ops = tuple(TracedOp(2 * i, name, 0.0, (), (i,)) for i, name in enumerate(names))
    graph = BlockTrace(
        ops, tuple(TracedValue(size, i) for i, size in enumerate(sizes)), frozenset()
    )
    option = with_names(Candidate(Selective(NumberedOps((0, 2, 4), (6,)))), graph)
    assert option.kept_names == ("mm", "softmax", "rsqrt")
    assert option.offloaded_names == ("mm",)


def test_a_profile_names_the_ops_whose_results_its_options_keep() -> None:
    pytest.importorskip("scipy")
    x = torch.randn(64, 16, requires_grad=True)
    (block,) = rekindle.profile(Stack(3, 16), x).blocks
    some = [option for option in block.candidates if isinstance(option.strategy, Selective)]
    assert some
    for option in some:
        assert len(option.kept_names) == len(option.strategy.policy.kept)
        assert set(option.kept_names) <= {"addmm", "gelu", "layer_norm", "add"}


def test_a_plan_for_a_model_that_is_one_block_prints_its_class() -> None:
    lines = str(plan_of(model="Block", blocks=(("", "Block", DROP),))).splitlines()
    assert lines[-1] == "  Block: 1 x Block: recompute: 10 B held, 4.00 ms"


def test_a_plan_for_a_model_that_is_one_block_applies_to_it() -> None:
    model = Block()
    rekindle.apply(model, plan_of(model="Block", blocks=(("", "Block", DROP),)))
    with rekindle.observe() as seen:
        model(torch.randn(4, 8)).sum().backward()
    assert seen.total.replays == 1


def test_a_profile_prints_its_blocks_with_their_options() -> None:
    pytest.importorskip("scipy")
    x = torch.randn(64, 16, requires_grad=True)
    lines = str(rekindle.profile(Stack(3, 16), x)).splitlines()
    assert lines[0] == "Stack on cpu: 3 blocks, 1 distinct"
    assert [line.split(":")[0].strip() for line in lines[2:5]] == [
        "Block",
        "keep",
        "recompute",
    ]
