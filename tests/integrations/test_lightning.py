"""Modules that Lightning fits, with its callback and without."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import rekindle
from rekindle import policies
from rekindle.strategy import Keep
from tests.toys import Mlp, Stack, same_bits

pytest.importorskip("lightning")
lightning = pytest.importorskip("lightning.pytorch")

from rekindle.integrations import lightning as ours  # noqa: E402

STEPS = 4
WHATS: dict[str, Any] = {"recompute": "recompute", "policy": policies.keep_matmuls_and_attention}
every_what = pytest.mark.parametrize("what", WHATS.values(), ids=WHATS)
every_precision = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, model: nn.Module | None = None, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Stack(3, drop=0.2) if model is None else model
        self.fails = fails
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        if self.fails and number:
            raise KeyError("a mistake")
        loss: Tensor = self.model(batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(module: Module, *callbacks: Any, precision: Any = "32-true") -> Any:
    torch.manual_seed(2)
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, DataLoader(torch.randn(4 * STEPS, 8), batch_size=4))  # type: ignore[arg-type]
    return trainer


@functools.cache
def plain(precision: str) -> list[Tensor]:
    module = Module()
    fit(module, precision=precision)
    return curve_of(module)


def curve_of(module: Module) -> list[Tensor]:
    return [*module.losses, *(p.detach() for p in module.parameters())]


@every_precision
@every_what
def test_a_module_with_strategies_is_fitted_as_without_them(what: Any, precision: str) -> None:
    module = Module()
    with rekindle.observe() as seen:
        fit(module, ours.Callback(what), precision=precision)
    expected = plain(precision)
    assert len(module.losses) == STEPS
    assert all(same_bits(a, b) for a, b in zip(curve_of(module), expected, strict=True))
    assert (seen.total.forwards, seen.total.replays) == (3 * STEPS, 3 * STEPS)


def is_managed(module: nn.Module) -> bool:
    return any("forward" in vars(each) for each in module.modules())


def test_a_module_has_strategies_while_it_is_fitted_and_none_after() -> None:
    module = Module()
    during: list[bool] = []

    class Look(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            during.append(is_managed(module))

    fit(module, ours.Callback(), Look())
    assert during == [True] * STEPS
    assert not is_managed(module)


def test_a_module_that_fails_has_no_strategies_after() -> None:
    module = Module(fails=True)
    with pytest.raises(KeyError):
        fit(module, ours.Callback())
    assert not is_managed(module)


def test_modules_are_named_by_their_paths() -> None:
    with rekindle.observe() as seen:
        fit(Module(), ours.Callback({"model.blocks.*.mlp": "recompute"}))
    assert {name: counts.forwards for name, counts in seen.regions.items()} == {
        "Mlp.forward": 3 * STEPS
    }


def test_a_module_without_blocks_is_refused_rather_than_left_as_it_is() -> None:
    """Its `training_step` calls what it likes, and not its `forward`."""
    module = Module(Mlp())
    with pytest.raises(ValueError, match="No block of Module repeats"):
        fit(module, ours.Callback())
    assert not is_managed(module)


def test_what_is_saved_is_that_of_the_plain_module(tmp_path: Path) -> None:
    module = Module()
    trainer = fit(module, ours.Callback())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert list(saved) == list(Module().state_dict())


def test_a_model_of_transformers_inside_has_its_layers_recomputed_and_no_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    outs: list[Any] = []

    class Language(Module):
        def training_step(self, batch: Tensor, number: int) -> Tensor:
            tokens = torch.tensor([[1, 2, 3]])
            outs.append(self.model(tokens, labels=tokens))
            loss: Tensor = outs[-1].loss
            return loss

    with rekindle.observe() as seen:
        fit(Language(transformers.LlamaForCausalLM(config).train()), ours.Callback())
    assert [out.past_key_values for out in outs] == [None] * STEPS
    assert (seen.total.forwards, seen.total.replays) == (2 * STEPS, 2 * STEPS)


class Wide(Module):
    """A module whose step takes enough to be planned for; its batches may differ in size."""

    def __init__(self, calls_itself: bool = False) -> None:
        torch.manual_seed(1)
        super().__init__(Stack(4, 16, drop=0.2))
        self.calls_itself = calls_itself
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        self.steps += 1
        loss: Tensor = (self(batch) if self.calls_itself else self.model(batch)).square().mean()
        self.log("loss", loss.detach(), on_step=False, on_epoch=True)
        self.losses.append(loss.detach())
        return loss


class Batches(torch.utils.data.IterableDataset[Tensor]):
    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        for number, rows in enumerate(self.rows):
            yield torch.randn(rows, 16, generator=torch.Generator().manual_seed(number))


def fit_wide(module: nn.Module, *callbacks: Any, rows: Any = (256, 256), **options: Any) -> Any:
    torch.manual_seed(2)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, DataLoader(Batches(*rows), batch_size=None))  # type: ignore[arg-type]
    return trainer


OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bf16-mixed"},
    "accumulated": {"accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("calls_itself", [False, True], ids=["its model", "itself"])
def test_a_budget_is_planned_for_on_the_first_batch(options: Any, calls_itself: bool) -> None:
    pytest.importorskip("scipy")
    without, within = Wide(calls_itself), Wide(calls_itself)
    expected = fit_wide(without, **options)
    callback = ours.Callback(budget="80%")
    found = fit_wide(within, callback, **options)
    curves = zip(curve_of(within), curve_of(without), strict=True)
    assert all(same_bits(a, b) for a, b in curves)
    assert within.steps == without.steps == 2
    assert torch.equal(found.callback_metrics["loss"], expected.callback_metrics["loss"])
    plan = callback.plan
    assert plan is not None
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert any(option.strategy != Keep() for _, _, option in plan.blocks)
    assert not is_managed(within)
    assert rekindle.plan_of(within) is None


def test_the_plan_is_there_before_the_first_step() -> None:
    pytest.importorskip("scipy")
    module = Wide()
    strategies: list[bool] = []

    class Look(lightning.Callback):  # type: ignore[misc]
        def on_before_zero_grad(self, *args: Any) -> None:
            strategies.append(rekindle.plan_of(module) is not None)

    fit_wide(module, ours.Callback(budget="80%"), Look())
    assert strategies == [True, True]


@pytest.mark.parametrize("calls_itself", [False, True], ids=["its model", "itself"])
def test_a_larger_batch_is_planned_for_again(
    calls_itself: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("scipy")
    rows = 64, 256, 128
    without, within = Wide(calls_itself), Wide(calls_itself)
    fit_wide(without, rows=rows)
    plans: list[Any] = []
    callback = ours.Callback(budget="80%")

    class Look(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            plans.append(callback.plan)

    with caplog.at_level("WARNING", "rekindle"):
        fit_wide(within, callback, Look(), rows=rows)
    curves = zip(curve_of(within), curve_of(without), strict=True)
    assert all(same_bits(a, b) for a, b in curves)
    assert plans[0].budget < plans[1].budget
    assert plans[1] is plans[2]
    (line,) = [r.getMessage() for r in caplog.records if r.name == "rekindle"]
    assert "Wide is given [256, 16], larger than [64, 16] that was planned for: planned" in line


def test_an_error_of_memory_in_backward_names_what_was_foreseen() -> None:
    pytest.importorskip("scipy")

    class Full(Wide):
        def on_after_backward(self) -> None:
            raise torch.OutOfMemoryError("There is no room.")

    module = Full()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_wide(module, ours.Callback(budget="80%"))
    assert caught.value.__notes__[0].startswith("rekindle: the plan foresaw a peak of ")
    assert not is_managed(module)


def test_a_budget_that_nothing_fits_ends_the_fit_and_leaves_no_strategies() -> None:
    pytest.importorskip("scipy")
    module = Wide()
    with pytest.raises(rekindle.BudgetError, match="No plan fits into 100 B"):
        fit_wide(module, ours.Callback(budget="100B"))
    assert not is_managed(module)
    assert "log" not in vars(module)


def test_a_module_that_optimizes_by_itself_has_no_budget() -> None:
    module = Wide()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="optimizes by itself"):
        fit_wide(module, ours.Callback(budget="80%"))


def test_metrics_are_as_if_the_step_had_not_been_measured() -> None:
    pytest.importorskip("scipy")
    metrics = pytest.importorskip("torchmetrics")

    class Measured(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.mean = metrics.MeanMetric()

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss = super().training_step(batch, number)
            self.mean(loss.detach())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return loss

    without, within = Measured(), Measured()
    expected = fit_wide(without).callback_metrics["mean"]
    callback = ours.Callback(budget="80%")
    assert torch.equal(fit_wide(within, callback).callback_metrics["mean"], expected)
    assert callback.plan is not None


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
