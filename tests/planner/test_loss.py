"""The loss outside the model: `loss=` of `profile` and `fit`, and the warning without it."""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rekindle
from rekindle.planner.instruments.memory_meter import LiveBytes, bytes_of
from rekindle.planner.loss import batch_in_form, checked_loss
from tests.toys import Block, Stack, same_bits, total

pytest.importorskip("scipy")

WORDS = 256


class Language(nn.Module):
    """An embedding, blocks and a head; its loss is somewhere else."""

    def __init__(self, dim: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, dim)
        self.stack = Stack(depth, dim)
        self.head = nn.Linear(dim, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.stack(self.words(words)))
        return out


def next_word(out: Tensor, batch: Tensor) -> Tensor:
    return cross_entropy(out[:-1], batch[1:])


def words(count: int = 128) -> Tensor:
    return torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(count))


def train(model: nn.Module, batch: Tensor) -> None:
    """A step of the usual loop."""
    out = model(batch)
    loss = next_word(out, batch)
    loss.backward()


def peak_of_a_step(model: nn.Module, batch: Tensor) -> int:
    """All bytes at the highest moment of a step as users write it."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [
        batch,
        *model.parameters(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    with LiveBytes(known) as live:
        train(model, batch)
    return bytes_of(known) + live.peak()


@pytest.mark.parametrize("budget", ["100%", "90%"])
def test_with_the_loss_the_measured_peak_is_that_of_the_real_step_to_the_byte(budget: str) -> None:
    model, batch = Language(), words()
    plan = rekindle.fit(model, batch, budget, loss=next_word)
    assert plan.measured_peak == peak_of_a_step(model, batch) <= plan.budget


def test_without_the_loss_the_real_step_takes_more_than_planned_and_a_warning_says_so() -> None:
    model, batch = Language(), words()
    with pytest.warns(UserWarning, match=r"The loss is not in the plan.*loss=lambda"):
        plan = rekindle.fit(model, batch, "100%")
    assert plan.measured_peak is not None
    assert peak_of_a_step(model, batch) > plan.measured_peak


def test_a_peak_in_the_loss_is_predicted_to_the_byte() -> None:
    model, batch = Language(), words()
    plan = rekindle.fit(model, batch, "100%", loss=next_word)
    assert plan.peak_at == "the head and the loss"
    assert plan.predicted_peak == plan.measured_peak


def test_an_output_that_lives_through_the_backward_is_predicted() -> None:
    model, batch = Language(), words()
    profile = rekindle.profile(model, batch, loss=next_word)
    assert profile.output_held == len(batch) * WORDS * 4
    unheld = rekindle.profile(model, lambda: next_word(model(batch), batch))
    assert unheld.output_held == 0
    held, without = (  # with the batch, wherever it counts
        p.static_bytes + p.before_bytes + p.rest_peak for p in (profile, unheld)
    )
    assert held == without + profile.output_held


def test_an_output_that_is_the_batch_itself_is_not_counted_twice() -> None:
    class Echo(Stack):
        def forward(self, x: Tensor, run: Any = None) -> Any:
            return super().forward(x), x, self.blocks[0].norm.weight

    profile = rekindle.profile(Echo(2), torch.randn(4, 8), loss=lambda out: out[0].mean())
    assert profile.output_held == 4 * 8 * 4


class Wrapped(nn.Module):
    """A stack that returns something else."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.stack = Stack(3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.stack(x))


class Output:
    def __init__(self, loss: Tensor | None) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: out.mean(),
        lambda out: {"loss": out.mean(), "logits": out},
        lambda out: Output(out.mean()),
        lambda out: Output(out.mean().reshape(1)),
    ],
    ids=["scalar", "mapping", "attribute", "one element"],
)
def test_a_loss_that_the_model_returns_is_no_reason_to_warn(wrap: Callable[[Tensor], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = rekindle.profile(Wrapped(wrap), torch.randn(4, 8))
    assert profile.loss == "model"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: out,
        lambda out: out[:1, :1],
        lambda out: (out.mean(), out),
        lambda out: {"logits": out},
        lambda out: {"loss": out, "logits": out},
    ],
    ids=["tensor", "one element", "tuple", "mapping", "a loss for each"],
)
def test_an_output_that_is_no_scalar_loss_warns_once_at_the_line_of_the_user(
    wrap: Callable[[Tensor], Any],
) -> None:
    model, x = Wrapped(wrap), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="The loss is not in the plan") as by_profile:
        profile = rekindle.profile(model, x)
    assert profile.loss == "none"
    with pytest.warns(UserWarning, match="The loss is not in the plan") as by_fit:
        rekindle.fit(model, x, "1GiB")
    with pytest.warns(UserWarning, match="The loss is not in the plan") as again:
        rekindle.fit(model, x, "1GiB", profile=profile)
    for caught in (by_profile, by_fit, again):
        assert [warning.filename for warning in caught] == [__file__]


def test_a_function_that_returns_no_loss_is_told_to_return_it() -> None:
    model, x = Stack(3), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="Return the loss from the function"):
        rekindle.profile(model, lambda: model(x))


def test_planning_again_does_not_warn() -> None:
    model = Stack(3)
    rekindle.fit(model, torch.randn(4, 8), "60%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(8, 8)).mean().backward()
    plan = rekindle.plan_of(model)
    assert plan is not None
    assert plan.inputs == ((8, 8),)


def test_a_loss_goes_with_a_profile_without_a_device() -> None:
    model, batch = Language(), words()
    real = rekindle.profile(model, batch, loss=next_word)
    fake = rekindle.profile(model, batch, loss=next_word, device="meta", like="H200")
    assert fake.loss == real.loss == "given"
    assert fake.rest_peak == real.rest_peak
    assert fake.output_held == real.output_held
    measured = rekindle.profile(model, batch, loss=next_word, device="meta", like=real)
    assert measured.rest_peak == real.rest_peak


def test_a_saved_profile_knows_where_its_loss_comes_from(tmp_path: Path) -> None:
    profile = rekindle.profile(Language(), words(), loss=next_word)
    profile.save(tmp_path / "profile.json")
    assert rekindle.Profile.load(tmp_path / "profile.json") == profile


class Criterion(nn.Module):
    def forward(self, out: Tensor, batch: Tensor) -> Tensor:
        return next_word(out, batch)


class Method:
    def loss(self, out: Tensor) -> Tensor:
        return out.mean()

    def __call__(self, out: Tensor, batch: Tensor) -> Tensor:
        return next_word(out, batch)


@pytest.mark.parametrize(
    ("loss", "takes_batch"),
    [
        (lambda out: out.mean(), False),
        (lambda out, batch: next_word(out, batch) * 2, True),
        (lambda out, scale=2: out.mean() * scale, False),
        (lambda *outs: outs[0].mean(), False),
        (torch.mean, False),
        (Tensor.mean, False),
        (next_word, True),
        (functools.partial(next_word, batch=words()), False),
        (functools.partial(next_word), True),
        (Criterion(), True),
        (nn.MSELoss(), True),
        (Method(), True),
        (Method().loss, False),
    ],
)
def test_a_loss_that_requires_two_arguments_gets_the_batch(loss: Any, takes_batch: bool) -> None:
    found = checked_loss(loss, words())
    assert found is not None
    assert found.takes_batch is takes_batch
    if loss.__class__ is not nn.MSELoss:
        assert rekindle.profile(Language(depth=2), words(), loss=loss).loss == "given"


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (3, "but got int"),
        ("mse", "but got str"),
        (torch.zeros(()), "but got Tensor"),
        (nn.MSELoss, "but got MSELoss"),
        (lambda: 1, r"takes \(\)"),
        (lambda out, batch, more: 1, r"takes \(out, batch, more\)"),
        (lambda out, *, scale: 1, r"takes \(out, \*, scale\)"),
    ],
)
def test_what_is_no_loss_is_refused_before_anything_runs(loss: Any, match: str) -> None:
    for call in (rekindle.profile, functools.partial(rekindle.fit, budget="60%")):
        with pytest.raises(TypeError, match=match):
            call(Stack(2), torch.randn(4, 5), loss=loss)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda out: out, r"a tensor of shape \[4, 8\]"),
        (lambda out: out.mean().item(), "float"),
        (lambda out: out.detach().mean(), "that requires none"),
        (lambda out: {"loss": out.mean()}, "dict"),
    ],
)
def test_a_loss_that_returns_no_scalar_is_refused(loss: Any, found: str) -> None:
    with pytest.raises(ValueError, match=f"loss should return a scalar tensor.*{found}"):
        rekindle.profile(Stack(2), torch.randn(4, 8), loss=loss)


def test_a_function_that_is_the_step_and_a_loss_are_refused() -> None:
    model = Stack(2)
    with pytest.raises(ValueError, match="the batch is a function"):
        rekindle.fit(model, lambda: model(torch.randn(4, 8)).sum(), "60%", loss=total)


def test_a_profile_and_a_fit_have_the_same_loss() -> None:
    model, batch = Language(), words()
    with_loss = rekindle.profile(model, batch, loss=next_word)
    without = rekindle.profile(model, batch)
    rekindle.fit(model, batch, "100%", profile=with_loss, loss=next_word)
    with pytest.raises(ValueError, match="measured with loss=, and fit"):
        rekindle.fit(model, batch, "100%", profile=with_loss)
    with pytest.raises(ValueError, match="measured without loss=, and fit"):
        rekindle.fit(model, batch, "100%", profile=without, loss=next_word)


@pytest.mark.parametrize("batch", ["tensor", "tuple", "mapping"])
def test_a_loss_gets_the_batch_as_it_was_given_when_it_is_planned_again(batch: str) -> None:
    def given(count: int) -> Any:
        x = torch.randn(count, 8)
        return {"tensor": x, "tuple": (x,), "mapping": {"x": x}}[batch]

    seen: list[Any] = []

    def loss(out: Tensor, batch: Any) -> Tensor:
        seen.append(batch)
        return out.mean()

    model = Stack(3)
    rekindle.fit(model, given(4), "70%", loss=loss)
    first, count = seen[0], len(seen)
    model(torch.randn(8, 8)).mean().backward()
    assert len(seen) > count
    assert type(seen[-1]) is type(first)
    assert type(first) is not dict or list(seen[-1]) == ["x"]
    leaf = torch.utils._pytree.tree_leaves(seen[-1])[0]
    assert leaf.shape == (8, 8)


def test_a_call_by_keyword_is_a_batch_of_any_form() -> None:
    model = Stack(1)
    assert batch_in_form("mapping", model, (1,), {"run": 2}) == {"x": 1, "run": 2}
    assert batch_in_form("sequence", model, (1,), {"run": 2}) == (1, 2)
    assert batch_in_form("tensor", model, (), {"x": 1}) == 1


def test_planning_again_counts_the_loss_of_the_larger_batch() -> None:
    model = Language()
    rekindle.fit(model, words(64), "100%", loss=next_word)
    train(model, words(256))
    plan = rekindle.plan_of(model)
    assert plan is not None
    assert plan.measured_peak == peak_of_a_step(model, words(256))


def test_a_loss_that_knows_the_labels_of_the_first_batch_alone_is_taken_to_grow() -> None:
    model, small, large = Language(), words(64), words(256)
    rekindle.fit(model, small, "100%", loss=lambda out: cross_entropy(out, small))
    train(model, large)
    plan = rekindle.plan_of(model)
    assert plan is not None
    assert plan.inputs == ((256,),)
    assert peak_of_a_step(model, large) <= plan.budget


def test_an_error_of_the_model_is_not_taken_for_one_of_the_loss() -> None:
    model = Language()
    rekindle.fit(model, words(8), "100%", loss=next_word)
    with pytest.raises(IndexError):
        model(torch.full((16,), WORDS + 1))


def test_a_fitted_model_with_any_loss_can_be_copied_and_pickled() -> None:
    model, batch = Stack(3), torch.randn(8, 8)
    rekindle.fit(model, batch, "60%", loss=lambda out: out.mean())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        grads = []
        for each in (model, twin):
            each.zero_grad()
            each(batch).mean().backward()
            grads.append([p.grad for p in each.parameters()])
        assert all(map(same_bits, *grads))


def test_the_parameters_of_a_loss_end_without_gradients() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 1)

        def forward(self, out: Tensor) -> Tensor:
            scalar: Tensor = self.head(out).mean()
            return scalar

    loss = Learned()
    rekindle.fit(nn.Sequential(Block(), Block()), torch.randn(4, 8), "80%", loss=loss)
    assert all(p.grad is None for p in loss.parameters())
