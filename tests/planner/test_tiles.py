"""Token-wise modules of a block in tiles: found by running it, and planned if need be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle._api import planning
from rekindle.modules.forward import forward_of
from rekindle.sizes import format_bytes, rounded_up
from rekindle.strategy import RecomputeInTiles, Tile
from tests.language_models import gradients_of, same

WIDTH, INNER, TOKENS = 8, 512, 64


class Mixes(nn.Module):
    """A module that looks at all tokens at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(TOKENS, 4 * TOKENS), nn.Linear(4 * TOKENS, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x.transpose(-1, -2)))).transpose(-1, -2)
        return out


class Wide(nn.Module):
    """A gated MLP whose inner activations are most of a block's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.mlp = Mixes(), Wide()
        self.noisy = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        x = x + self.noisy(x)[..., :WIDTH]
        out: Tensor = x + self.mlp(x)
        return out


def model_and_batch() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*[WideBlock() for _ in range(3)]), torch.randn(2, TOKENS, WIDTH)


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def tiled(profile: rekindle.Profile) -> list[RecomputeInTiles]:
    every = [each.strategy for each in profile.blocks[-1].candidates]
    return [strategy for strategy in every if isinstance(strategy, RecomputeInTiles)]


@pytest.fixture(scope="module")
def profiled() -> tuple[nn.Module, Tensor, rekindle.Profile]:
    model, x = model_and_batch()
    return model, x, rekindle.profile(model, x, loss=loss, exact=False)


def test_modules_that_go_token_by_token_are_found_by_running_them(profiled: Any) -> None:
    """Not one that mixes tokens, and not one that draws random numbers."""
    assert tiled(profiled[2]) == [RecomputeInTiles(("mlp",), chunks) for chunks in (4, 16)]


def test_tiles_are_no_candidates_of_a_plan_that_is_exact(profiled: Any) -> None:
    model, x, _ = profiled
    assert tiled(rekindle.profile(model, x, loss=loss)) == []


def test_a_replay_in_tiles_peaks_lower_by_what_the_others_would_make(profiled: Any) -> None:
    peaks = {
        each.describe(): each.backward_peak
        for each in profiled[2].blocks[-1].candidates
        if each.describe().startswith("recompute")
    }
    inner = 2 * TOKENS * INNER * 4
    assert peaks["recompute"] - peaks["recompute, mlp in 4 tiles"] > 2 * inner
    assert peaks["recompute, mlp in 16 tiles"] < peaks["recompute, mlp in 4 tiles"]


@pytest.fixture(scope="module")
def fitted(profiled: Any) -> tuple[nn.Module, Tensor, rekindle.Plan]:
    model, x, profile = profiled
    least = rekindle.frontier(profile, 2)[-1].peak
    return model, x, rekindle.fit(model, x, least, loss=loss, profile=profile)


def test_a_plan_has_tiles_where_nothing_else_fits(fitted: Any, tmp_path: Path) -> None:
    plan = fitted[2]
    assert any(isinstance(each.strategy, RecomputeInTiles) for _, _, each in plan.blocks)
    assert plan.measured_peak <= plan.budget
    assert "mlp in 16 tiles" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert rekindle.Plan.load(tmp_path / "plan.json") == plan


def test_the_gradients_of_such_a_plan_differ_by_rounding_at_most(fitted: Any) -> None:
    model, x, plan = fitted
    rekindle.remove(model)
    torch.manual_seed(1)
    plain = gradients_of(model, x, loss=loss)
    rekindle.apply(model, plan)
    torch.manual_seed(1)
    found = gradients_of(model, x, loss=loss)
    for one, other in zip(found[1], plain[1], strict=True):
        torch.testing.assert_close(one, other)


def test_each_tile_runs_its_forward_twice_and_not_thrice(fitted: Any) -> None:
    model, x, _ = fitted
    rekindle.apply(model, {"0": RecomputeInTiles(("mlp",), 4)})
    rows: list[int] = []
    hook = model[0].mlp.down.register_forward_hook(
        lambda _m, args, _o: rows.append(args[0].numel())
    )
    gradients_of(model, x, loss=loss)  # the first call finds out along which dimension tokens go
    rows.clear()
    gradients_of(model, x, loss=loss)
    hook.remove()
    rekindle.remove(model)
    assert sum(rows) == 2 * 2 * TOKENS * INNER
    assert len(rows) == 8


def test_by_hand_and_removed() -> None:
    model, x = model_and_batch()
    torch.manual_seed(1)
    plain = gradients_of(model, x, loss=loss)
    applied = rekindle.apply(model, {"*": RecomputeInTiles(("mlp",), 4)})
    assert "recompute, mlp in 4 tiles" in str(applied)
    assert forward_of(model[0].mlp).strategy == Tile(4)
    rekindle.remove(model)
    assert "forward" not in vars(model[0].mlp)
    torch.manual_seed(1)
    assert same(gradients_of(model, x, loss=loss), plain)


def test_an_error_names_the_tiles_that_would_fit_and_what_they_take(profiled: Any) -> None:
    model, x, profile = profiled
    rekindle.remove(model)
    least = rekindle.frontier(profile, 2)[-1].peak
    takes = format_bytes(rounded_up(least))
    text = f"exact=False fits: it takes {takes}, by .*recompute, mlp in 16 tiles"
    with pytest.raises(rekindle.BudgetError, match=text):
        rekindle.fit(model, x, least, loss=loss)
    with pytest.raises(rekindle.BudgetError, match="exact=False does not fit either"):
        rekindle.fit(model, x, least - 20 * 1024, loss=loss)


def test_an_error_names_blocks_of_several_depths() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(WideBlock(), WideBlock())
    model, x = nn.Sequential(WideBlock(), inner), torch.randn(2, TOKENS, WIDTH)
    text = r"exact=False fits: it takes .*, by 0, 1\.0, 1\.1: recompute, mlp in 16 tiles\.$"
    with pytest.raises(rekindle.BudgetError, match=text):
        rekindle.fit(model, x, "20%", loss=loss, blocks=["0", "1.*"])


def test_an_error_on_the_way_to_tiles_hides_no_budget_error(
    monkeypatch: pytest.MonkeyPatch, profiled: Any
) -> None:
    def fails(*_: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(planning, "format_least_inexact", fails)
    model, x, _ = profiled
    with pytest.raises(rekindle.BudgetError, match="No plan fits"):
        rekindle.fit(model, x, "1KiB", loss=loss)
