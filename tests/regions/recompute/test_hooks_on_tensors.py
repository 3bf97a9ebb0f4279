"""Hooks on tensors and modules run once a backward, with the plain gradients."""

from collections.abc import Callable

from torch import Tensor

import rekindle
from tests.regions.recompute.gradients import assert_same_grads, leaf, plain, three
from tests.toys import Block, Mlp, assert_same_step

# Hooks of backward


def test_a_tensor_hook_inside_a_region_runs_once_and_counts() -> None:
    x, seen = leaf(3), []

    def region(x: Tensor) -> Tensor:
        hidden = x.sin()
        hidden.register_hook(lambda g: (seen.append("ran"), g * 2)[1])
        return hidden.exp().cos()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])
    assert seen == ["ran", "ran"]  # one for each of the two steps


def test_a_tensor_hook_on_an_argument_inside_a_region_acts_once() -> None:
    """The replay registers it again; on the forward's tensor it would double the gradient twice."""

    def step(run: Callable[..., Tensor], x: Tensor) -> Tensor:
        hidden = x * 1.0

        def region(hidden: Tensor) -> Tensor:
            hidden.register_hook(lambda g: g * 2)
            return hidden.sin().sin()

        return run(region, hidden)

    x = leaf(3)
    assert_same_step(lambda: step(plain, x), lambda: step(rekindle.checkpoint, x), [x])


def test_a_tensor_hook_outside_a_region_sees_the_plain_gradient() -> None:
    def ways(run: Callable[..., Tensor]) -> list[Tensor]:
        seen: list[Tensor] = []
        hidden = x.exp()
        hidden.register_hook(seen.append)
        out = run(three, hidden)
        out.register_hook(seen.append)
        out.sum().backward()
        return seen

    x = leaf(3)
    assert_same_grads(ways)


def test_retain_grad_inside_a_region_keeps_the_plain_gradient() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> list[Tensor | None]:
        kept: list[Tensor] = []

        def region(x: Tensor) -> Tensor:
            hidden = x.sin()
            if not rekindle.is_recomputing():
                hidden.retain_grad()
                kept.append(hidden)
            return hidden.exp().cos()

        run(region, x).sum().backward()
        return [kept[0].grad]

    assert_same_grads(ways)


def test_module_backward_hooks_see_the_plain_gradients_once() -> None:
    model, x = Block(), leaf(2, 8)
    seen: list[tuple[Tensor, ...]] = []
    model.mlp.up.register_full_backward_hook(lambda m, i, o: seen.append((*i, *o)))
    model.mlp.up.register_full_backward_pre_hook(lambda m, o: seen.append(o))

    def ways(run: Callable[..., Tensor]) -> list[Tensor]:
        seen.clear()
        run(model, x).sum().backward()
        assert len(seen) == 2
        return [*seen[0], *seen[1]]

    assert_same_grads(ways)


def test_a_module_backward_hook_on_the_region_itself_changes_the_gradient_as_plain() -> None:
    model, x = Block(), leaf(2, 8)
    model.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
    assert_same_step(
        lambda: model(x), lambda: rekindle.checkpoint(model, x), [x, *model.parameters()]
    )


def test_hooks_after_accumulation_run_once_per_backward() -> None:
    model, x, calls = Mlp(), leaf(2, 8), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(id(p)))
    rekindle.checkpoint(model, x).sum().backward()
    assert sorted(calls) == sorted(map(id, model.parameters()))
