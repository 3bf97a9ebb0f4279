"""The `Trainer` of transformers with a callback of ours, or with its own switch."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import policies
from rekindle.strategy import Keep

transformers = pytest.importorskip("transformers")

from rekindle.integrations import transformers as ours  # noqa: E402
from tests.integrations.families import (  # noqa: E402
    DECODER,
    FAMILIES,
    STEPS,
    Curve,
    Family,
    every_what,
    same,
)


def trainer(folder: Path, model: nn.Module, callbacks: Any = (), **options: Any) -> Any:
    pytest.importorskip("accelerate")  # the trainer of transformers needs it
    tokens = torch.randint(1, 64, (8, 8), generator=torch.Generator().manual_seed(2))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))


def curve_of(trained: Any) -> Curve:
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return [torch.tensor(losses), *(p.detach() for p in trained.model.parameters())]


PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"bf16": True}}
every_precision = pytest.mark.parametrize("options", PRECISIONS.values(), ids=PRECISIONS)
IN_TRAINER = 3 * STEPS * 2  # layers, steps, micro-batches


@every_precision
@every_what
def test_a_callback_gives_strategies_for_the_time_of_training(
    what: Any, options: Any, tmp_path: Path
) -> None:
    build = FAMILIES["llama"].build
    without = trainer(tmp_path, build(), **options)
    without.train()
    model = build()
    before = set(vars(model.model.layers[0]))
    ran = trainer(tmp_path, model, [ours.Callback(what)], **options)
    with rekindle.observe() as seen:
        ran.train()
    assert same(curve_of(ran), curve_of(without))
    assert (seen.total.forwards, seen.total.replays) == (IN_TRAINER, IN_TRAINER)
    assert set(vars(model.model.layers[0])) == before


@pytest.mark.parametrize(
    "given",
    [None, {"use_reentrant": False, "context_fn": policies.keep_matmuls_and_attention}],
    ids=["default", "policy"],
)
def test_gradient_checkpointing_of_the_trainer_runs_on_rekindle(
    given: Any, patched: Any, tmp_path: Path
) -> None:
    build = FAMILIES["llama"].build
    without = trainer(tmp_path, build())
    without.train()
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": given}
    ran = trainer(tmp_path, build(), **options)
    with rekindle.observe() as seen:
        ran.train()
    assert same(curve_of(ran), curve_of(without))
    assert (seen.total.forwards, seen.total.replays) == (IN_TRAINER, IN_TRAINER)


def test_a_callback_beside_the_trainers_own_switch_is_refused(tmp_path: Path) -> None:
    model = FAMILIES["llama"].build()
    both = trainer(tmp_path, model, [ours.Callback()], gradient_checkpointing=True)
    with pytest.raises(ValueError, match=r"TrainingArguments\(gradient_checkpointing=False\)"):
        both.train()


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_trainer_takes_a_budget(
    use_cache: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("scipy")
    build = FAMILIES["llama"].build
    without = trainer(tmp_path, build(use_cache=False))
    without.train()
    callback = ours.Callback(budget="70%")
    ran = trainer(tmp_path, build(use_cache=use_cache), [callback])
    with caplog.at_level("WARNING", "rekindle"):
        ran.train()
    assert [record for record in caplog.records if record.name == "rekindle"] == []
    assert rekindle.plan_of(ran.model) is None
    assert same(curve_of(ran), curve_of(without))
    assert callback.plan is not None
    assert callback.plan.measured_peak is not None
    assert callback.plan.measured_peak <= callback.plan.budget
    assert any(option.strategy != Keep() for _, _, option in callback.plan.blocks)


def test_a_callback_plans_with_the_loss_that_it_is_given() -> None:
    model = Family("LlamaForCausalLM", "LlamaConfig", DECODER).build()
    tokens = torch.randint(64, (2, 16))

    def loss(out: Any, batch: Any) -> Tensor:
        flat: Tensor = out.logits.flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, batch["input_ids"].flatten())

    callback = ours.Callback(budget="1GiB", loss=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_train_begin(model=model, train_dataloader=[{"input_ids": tokens}])
    assert callback.plan is not None
    callback.on_train_end(model=model)


def test_a_loss_without_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="loss= goes with budget="):
        ours.Callback("recompute", loss=lambda out: out.loss)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"what": "recomput"}, "'recompute', perhaps"),
        ({"what": {"layers.*": "ofload"}}, "'offload', perhaps"),
        ({"what": 3}, "given a strategy"),
        ({"what": "recompute", "budget": "24GiB"}, "takes strategies or a budget"),
        ({"budget": "24G"}, "24GiB"),
        ({"budget": 0.5}, "50%"),
    ],
    ids=str,
)
def test_a_callback_that_cannot_work_is_refused_when_it_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ours.Callback(**arguments)
