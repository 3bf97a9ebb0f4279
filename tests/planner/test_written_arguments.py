"""Blocks that write to lists and dicts among their arguments, which the model reads afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner.trace.block_calls import collect_calls
from rekindle.planner.trace.stand_in_copies import StandInCopies
from rekindle.planner.training_step import TrainingStep
from tests.toys import Mlp, gradients, same_bits

pytest.importorskip("scipy")


class WithLoss(Mlp):
    """A block that appends a loss of its own to a list."""

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
        out = x + super().forward(x)
        losses.append(out.square().mean())
        return out


class Dense(nn.Module):
    """A block that takes all results so far."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(32 + 16 * number, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, results: list[Tensor]) -> None:
        results.append(self.inside(torch.cat(results, 1)))


class OnState(Mlp):
    """A block that replaces an entry of a dict."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        state["log"]["norms"].append(state["x"].detach().norm())
        state["x"] = state["x"] + super().forward(state["x"])
        return state


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Losses(Model):
    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, losses)
        return x.square().mean() + torch.stack(losses).sum()


class DenseNet(Model):
    def forward(self, x: Tensor) -> Tensor:
        results = [2 * x]
        for layer in self.layers:
            layer(results)
        return torch.cat(results, 1).square().mean()


class States(Model):
    def forward(self, x: Tensor) -> Tensor:
        state = {"x": 2 * x, "log": {"norms": []}}
        for layer in self.layers:
            layer(state)
        norms: list[Tensor] = state["log"]["norms"]  # type: ignore[assignment,index]
        assert len(norms) == len(self.layers)
        out: Tensor = state["x"]  # type: ignore[assignment]
        return out.square().mean() + torch.stack(norms).mean()


MODELS: dict[str, Callable[[], Any]] = {
    "losses": lambda: Losses(*(WithLoss(32, 128) for _ in range(4))),
    "results": lambda: DenseNet(*map(Dense, range(5))),
    "a state": lambda: States(*(OnState(32, 128) for _ in range(4))),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("budget", ["85%", "least"])
def test_a_model_whose_blocks_write_to_their_arguments_fits(
    make: Callable[[], nn.Module], budget: Any
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(128, 32)
    plain = gradients(lambda: model(x), model.parameters())[1]
    profile = rekindle.profile(model, x)
    plan = rekindle.fit(model, x, profile.recompute_peak if budget == "least" else budget)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert plan.verified is not None or budget == "least"
    planned = gradients(lambda: model(x), model.parameters())[1]
    assert all(map(same_bits, planned, plain))


def test_noted_arguments_are_those_from_before_the_block_ran() -> None:
    model, x = MODELS["losses"](), torch.randn(8, 32)
    blocks = dict(model.layers.named_children())
    collected = collect_calls(TrainingStep(model, x), blocks)
    lengths = [len(call.arguments[0][1]) for call in collected.calls.values()]
    assert lengths == list(range(len(lengths)))


def test_each_run_alone_has_lists_of_its_own() -> None:
    model, x = MODELS["losses"](), torch.randn(8, 32)
    blocks = {"0": model.layers[0]}
    (call,) = collect_calls(TrainingStep(model, x), blocks).calls.values()
    for _ in range(2):
        args, kwargs = call.fresh_arguments()
        call.block(*args, **kwargs)
        assert len(args[1]) == 1


def test_what_blocks_pass_on_in_a_dict_is_told_from_what_the_dict_holds() -> None:
    model, x = MODELS["a state"](), torch.randn(128, 32)
    assert rekindle.profile(model, x).passed == (0, x.nbytes, x.nbytes, x.nbytes)
    model = MODELS["results"]()
    assert rekindle.profile(model, x).passed == (0,) * 5


def test_originals_are_put_back_in_lists_and_dicts_but_not_for_what_was_written_to() -> None:
    kept, written, moved, foreign = (torch.zeros(2) + i for i in range(4))
    inside = {"moved": moved, "foreign": foreign}
    outside: list[Any] = [kept, (written, inside)]
    copies = StandInCopies(lambda tensor: tensor is not foreign)
    (given, again), kwargs = copies.put_into((outside, kept), {"key": inside})
    assert given is outside
    assert kwargs["key"] is inside
    assert inside["foreign"] is foreign
    assert again is given[0] is not kept
    given.append(inside.pop("moved"))
    inside["copy"] = given[1][0].add_(1)
    copies.put_back()
    assert outside[0] is kept
    assert outside[2] is moved
    assert inside["copy"] is not written
    assert torch.equal(inside["copy"], written + 1)


def test_tuples_are_made_anew_only_if_something_in_them_is_copied() -> None:
    x = torch.zeros(2)
    pair = (x, [x])
    assert StandInCopies(lambda _: False).put_into((pair,), {})[0][0] is pair
    assert StandInCopies(lambda _: True).put_into((pair,), {})[0][0] is not pair
