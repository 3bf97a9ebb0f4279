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
def test_a_module_with_fates_is_fitted_as_without_them(what: Any, precision: str) -> None:
    module = Module()
    with rekindle.observe() as seen:
        fit(module, ours.Callback(what), precision=precision)
    expected = plain(precision)
    assert len(module.losses) == STEPS
    assert all(same_bits(a, b) for a, b in zip(curve_of(module), expected, strict=True))
    assert (seen.total.forwards, seen.total.replays) == (3 * STEPS, 3 * STEPS)


def has_fates(module: nn.Module) -> bool:
    return any("forward" in vars(each) for each in module.modules())


def test_a_module_has_fates_while_it_is_fitted_and_none_after() -> None:
    module = Module()
    during: list[bool] = []

    class Look(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            during.append(has_fates(module))

    fit(module, ours.Callback(), Look())
    assert during == [True] * STEPS
    assert not has_fates(module)


def test_a_module_that_fails_has_no_fates_after() -> None:
    module = Module(fails=True)
    with pytest.raises(KeyError):
        fit(module, ours.Callback())
    assert not has_fates(module)


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
    assert not has_fates(module)


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
