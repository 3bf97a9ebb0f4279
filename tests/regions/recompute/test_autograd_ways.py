"""Every way to ask autograd for gradients gives those of the plain run."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.toys import Block, Mlp, Stack, assert_same_step, same_bits


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def three(x: Tensor) -> Tensor:
    """Three ops; autograd saves the input of each, so two activations beside the argument."""
    return x.sin().exp().cos()


def assert_same_grads(ways: Callable[[Callable[..., Any]], Any]) -> None:
    """`ways(run)` returns the same tensors, bit for bit, plain and checkpointed."""
    torch.manual_seed(0)
    a = ways(plain)
    torch.manual_seed(0)
    b = ways(rekindle.checkpoint)
    assert len(a) == len(b) > 0
    for one, other in zip(a, b, strict=True):
        assert one is not None
        assert same_bits(one, other)


def replays(step: Callable[[], Any]) -> int:
    with rekindle.observe() as seen:
        step()
    return seen.total.replays


# Which gradients


def test_autograd_grad_gives_the_plain_gradients() -> None:
    model, x = Block(), leaf(2, 8)
    assert_same_grads(
        lambda run: torch.autograd.grad(run(model, x).sum(), [x, *model.parameters()])
    )


def test_autograd_grad_of_a_few_inputs_replays_once() -> None:
    model, x = Block(), leaf(2, 8)
    assert replays(lambda: torch.autograd.grad(rekindle.checkpoint(model, x).sum(), [x])) == 1


def test_autograd_grad_to_an_activation_outside_the_region_works() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> Any:
        hidden = x.exp()
        return torch.autograd.grad(run(three, hidden).sum(), [hidden])

    assert_same_grads(ways)


def test_backward_with_inputs_fills_only_those() -> None:
    model, x = Block(), leaf(2, 8)

    def ways(run: Callable[..., Tensor]) -> list[Tensor | None]:
        model.zero_grad()
        x.grad = None
        run(model, x).sum().backward(inputs=[model.norm.weight])
        assert x.grad is None
        assert model.mlp.up.weight.grad is None
        return [model.norm.weight.grad]

    assert_same_grads(ways)


def test_backward_one_parameter_at_a_time_gives_each_its_gradient() -> None:
    model, x = Block(), leaf(2, 8)

    def ways(run: Callable[..., Tensor]) -> list[Tensor]:
        loss = run(model, x).sum()
        return [
            torch.autograd.grad(loss, p, retain_graph=True)[0] for p in [x, *model.parameters()]
        ]

    assert_same_grads(ways)


def test_a_gradient_that_is_given_to_backward_is_used() -> None:
    x, seed = leaf(3), torch.randn(3)
    assert_same_grads(lambda run: torch.autograd.grad(run(three, x), [x], grad_outputs=[seed]))


def test_batched_gradients_give_the_plain_jacobian() -> None:
    x, rows = leaf(3), torch.eye(3)
    assert_same_grads(
        lambda run: torch.autograd.grad(
            run(three, x), [x], grad_outputs=[rows], is_grads_batched=True
        )
    )


# How often


def test_backward_twice_with_retain_graph_adds_up_as_plain() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> list[Tensor | None]:
        x.grad = None
        loss = run(three, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad]

    assert_same_grads(ways)


def test_each_backward_with_retain_graph_replays_once() -> None:
    x = leaf(3)
    with rekindle.observe() as seen:
        loss = rekindle.checkpoint(three, x).sum()
        for count in (1, 2, 3):
            loss.backward(retain_graph=True)
            assert seen.total.replays == count
        loss.backward()
    assert seen.total.replays == 4


def test_a_second_backward_without_retain_graph_is_autograds_own_error() -> None:
    loss = rekindle.checkpoint(three, leaf(3)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (2, 1, 0)])
def test_any_part_of_several_outputs_may_be_used(used: tuple[int, ...]) -> None:
    x, y = leaf(3), leaf(3)

    def region(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = x.sin().exp()
        return shared.cos(), (shared * y).sin(), y.exp().cos()

    def ways(run: Callable[..., Any]) -> Any:
        out = run(region, x, y)
        loss = sum((out[i].sum() for i in used), torch.zeros(()))
        return [g for g in torch.autograd.grad(loss, [x, y], allow_unused=True) if g is not None]

    assert_same_grads(ways)


def test_a_replay_for_one_output_runs_no_op_after_the_last_that_is_needed() -> None:
    """The other output is gone, and with it what was saved for it: only sin and exp run again."""
    x = leaf(3)
    with rekindle.observe() as seen:
        first, _ = rekindle.checkpoint(lambda x: (three(x), x.cos().sin().tanh()), x)
        del _
        first.sum().backward()
    assert seen.total.ops_replayed == 2


def test_outputs_may_go_backward_one_after_the_other() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Any]) -> list[Tensor | None]:
        x.grad = None
        a, b = run(lambda x: (three(x), x.cos().sin()), x)
        a.sum().backward()
        b.sum().backward()
        return [x.grad]

    assert_same_grads(ways)


# Higher derivatives


def test_double_backward_gives_the_plain_gradient_penalty() -> None:
    model, x = Mlp(), leaf(2, 8)

    def ways(run: Callable[..., Tensor]) -> Any:
        out = run(model, x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = out.sum() + (grad.norm() - 1) ** 2
        return [grad, *torch.autograd.grad(penalty, [x, *model.parameters()], allow_unused=True)][
            :-1  # the last bias has no part in the penalty of a sum
        ]

    assert_same_grads(ways)


def test_third_derivatives_are_the_plain_ones() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> list[Tensor]:
        grads, out = [], run(three, x)
        for _ in range(3):
            (out,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            grads.append(out)
        return grads

    assert_same_grads(ways)


def test_backward_with_create_graph_then_backward_of_the_gradient_works() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> list[Tensor]:
        (grad,) = torch.autograd.grad(run(three, x).pow(2).sum(), x, create_graph=True)
        return [grad, *torch.autograd.grad(grad.sin().sum(), x)]

    assert_same_grads(ways)


def test_gradients_taken_inside_a_region_are_the_plain_ones() -> None:
    """Forces as the negative gradient of an energy, and a loss on both."""
    w, x = leaf(3), leaf(3)

    def energy_and_forces(x: Tensor) -> tuple[Tensor, Tensor]:
        energy = (x * w).sin().exp().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -slope

    def ways(run: Callable[..., Any]) -> list[Tensor]:
        energy, forces = run(energy_and_forces, x)
        loss = energy + (forces - 1).pow(2).sum()
        return [energy, forces, *torch.autograd.grad(loss, [x, w])]

    assert_same_grads(ways)


def test_a_gradient_taken_inside_a_region_for_a_tensor_outside_it_is_the_plain_one() -> None:
    """Energies from features, forces for the positions that the features were made from."""
    positions = leaf(3)

    def step(run: Callable[..., Tensor]) -> Tensor:
        features = positions.exp()

        def forces(features: Tensor) -> Tensor:
            energy = features.sin().sum()
            return torch.autograd.grad(energy, positions, create_graph=True)[0].exp()

        return run(forces, features)

    assert_same_step(lambda: step(plain), lambda: step(rekindle.checkpoint), [positions])


def test_a_gradient_taken_inside_for_an_argument_given_twice_is_the_plain_one() -> None:
    x = leaf(3)

    def region(a: Tensor, b: Tensor) -> Tensor:
        return torch.autograd.grad((a * b).sin().sum(), a, create_graph=True)[0].exp()

    assert_same_step(lambda: region(x, x), lambda: rekindle.checkpoint(region, x, x), [x])


def test_a_gradient_taken_inside_for_an_argument_that_is_also_in_the_closure_is_the_plain_one() -> (
    None
):
    x = leaf(3)

    def region(a: Tensor) -> Tensor:
        return torch.autograd.grad((a * x).sin().sum(), a, create_graph=True)[0].exp()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_region_that_takes_gradients_inside_replays_once_in_forward_and_once_in_backward() -> (
    None
):
    x = leaf(3)

    def forces(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)[0]

    with rekindle.observe() as seen:
        out = rekindle.checkpoint(forces, x)
        assert seen.total.replays == 1
        out.sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 2)


def test_gradients_taken_inside_a_region_with_dropout_leave_the_random_state_alone() -> None:
    x = leaf(32)

    def forces(x: Tensor) -> Tensor:
        energy = nn.functional.dropout(x.sin(), 0.5).exp().sum()
        slope = torch.autograd.grad(energy, x, create_graph=True)[0]
        return slope * torch.rand(32)

    assert_same_step(lambda: forces(x), lambda: rekindle.checkpoint(forces, x), [x])


def test_a_backward_inside_a_nested_region_gives_the_plain_gradients() -> None:
    x = leaf(3)

    def forces(x: Tensor) -> Tensor:
        energy = rekindle.checkpoint(three, x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    def plain_forces(x: Tensor) -> Tensor:
        return torch.autograd.grad(three(x).sum(), x, create_graph=True)[0]

    assert_same_step(lambda: plain_forces(x), lambda: rekindle.checkpoint(forces, x), [x])


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


# Parts without gradient


def test_detached_tensors_inside_a_region_pass_no_gradient() -> None:
    x = leaf(3)
    assert_same_step(
        lambda: x.sin() * x.exp().detach().cos(),
        lambda: rekindle.checkpoint(lambda x: x.sin() * x.exp().detach().cos(), x),
        [x],
    )


def test_a_no_grad_part_inside_a_region_stays_without_gradient() -> None:
    model, x = Mlp(), leaf(2, 8)

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model(x)
        return (model(x.sin()) - target) ** 2

    assert_same_step(
        lambda: region(x), lambda: rekindle.checkpoint(region, x), [x, *model.parameters()]
    )


def test_an_enable_grad_part_in_a_region_under_no_grad_is_plain() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.sin().exp()

    def step(run: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return run(region, x)

    assert_same_step(lambda: step(plain), lambda: step(rekindle.checkpoint), [x])


def test_backward_called_under_no_grad_gives_the_plain_gradients() -> None:
    x = leaf(3)

    def under_no_grad(loss: Tensor) -> None:
        with torch.no_grad():
            loss.backward()

    assert_same_step(
        lambda: three(x), lambda: rekindle.checkpoint(three, x), [x], backward=under_no_grad
    )


def test_backward_called_under_inference_mode_gives_the_plain_gradients() -> None:
    x = leaf(3)

    def under_inference_mode(loss: Tensor) -> None:
        with torch.inference_mode():
            loss.backward()

    assert_same_step(
        lambda: three(x), lambda: rekindle.checkpoint(three, x), [x], backward=under_inference_mode
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_region_without_gradients_costs_and_holds_nothing(mode: Callable[[], Any]) -> None:
    x = leaf(3)
    with rekindle.observe() as seen, mode():
        out = rekindle.checkpoint(three, x)
    assert same_bits(out, three(x))
    assert seen.regions == {}


def test_anomaly_detection_does_not_disturb_a_replay() -> None:
    x = leaf(3)

    def step(run: Callable[..., Tensor]) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            out = run(three, x)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return grad

    assert_same_step(lambda: step(plain), lambda: step(rekindle.checkpoint), [x])


# Looking at what is saved


def test_a_saved_tensor_read_outside_a_backward_is_the_plain_one() -> None:
    x = leaf(3)
    out = rekindle.checkpoint(three, x)
    assert same_bits(out.grad_fn._saved_self, x.sin().exp())


def test_a_saved_tensor_read_outside_a_backward_leaves_the_backward_right() -> None:
    x = leaf(3)

    def step() -> Tensor:
        out = rekindle.checkpoint(three, x)
        assert out.grad_fn._saved_self is not None
        return out

    assert_same_step(lambda: three(x), step, [x])


class TwiceRead(torch.autograd.Function):
    """Reads `ctx.saved_tensors` twice, which torch's own checkpoint refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (once,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        assert torch.equal(once, again)
        return grad * again.cos()


class Scale(torch.autograd.Function):
    """Holds a tensor and a number; its double backward goes through autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        out = x.exp()
        ctx.save_for_backward(out)
        ctx.mark_non_differentiable(flag := x > 0)
        return out * factor, flag

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return grad * out * ctx.factor, None


def test_a_custom_function_inside_a_region_gives_the_plain_gradients() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        out, flag = Scale.apply(x.sin(), 3.0)
        return out.cos() * flag

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_custom_function_may_read_its_saved_tensors_twice() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        return TwiceRead.apply(x.exp()).cos()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_reading_saved_tensors_twice_replays_once() -> None:
    x = leaf(3)
    assert (
        replays(lambda: rekindle.checkpoint(lambda x: TwiceRead.apply(x.exp()), x).sum().backward())
        == 1
    )


def test_a_custom_function_may_read_its_saved_tensors_twice_under_retain_graph() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> list[Tensor | None]:
        x.grad = None
        loss = run(lambda x: TwiceRead.apply(x.exp()).cos(), x).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad]

    assert_same_grads(ways)


# Parameters that others swap in


class Inner(nn.Module):
    """A model whose middle is run by `run`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mlp = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.mlp, x).sin()


def test_parameters_given_by_functional_call_are_those_of_the_replay() -> None:
    """They are in the module during forward alone; backward finds the module's own again."""
    x = leaf(2, 3)

    def ways(run: Callable[..., Tensor]) -> Any:
        model = Inner(run)
        given = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
        loss = torch.func.functional_call(model, given, (x,)).sum()
        return torch.autograd.grad(loss, [x, *given.values()])

    assert_same_grads(ways)


def test_a_step_of_model_agnostic_meta_learning_gives_the_plain_gradients() -> None:
    x = leaf(2, 3)

    def ways(run: Callable[..., Tensor]) -> Any:
        model = Inner(run)
        own = dict(model.named_parameters())
        grads = torch.autograd.grad(model(x).sum(), list(own.values()), create_graph=True)
        fast = {n: p - 0.5 * g for (n, p), g in zip(own.items(), grads, strict=True)}
        loss = torch.func.functional_call(model, fast, (x,)).pow(2).sum()
        return torch.autograd.grad(loss, [x, *own.values()])

    assert_same_grads(ways)


# Copies of models


class Checkpointed(nn.Module):
    """A model that checkpoints its blocks in forward, each in one of the two forms."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(2, drop=0.2)
        self.decorate = rekindle.checkpoint(use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.decorate(self.stack.blocks[1])(rekindle.checkpoint(self.stack.blocks[0], x))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copied_model_that_checkpoints_trains_as_the_original(
    duplicate: Callable[[nn.Module], nn.Module], trained: bool
) -> None:
    model, x = Checkpointed(), leaf(2, 8)
    if trained:
        model(x).sum().backward()
    twin = duplicate(model)
    for one in (model, twin):
        one.zero_grad()
        torch.manual_seed(1)
        one(x).sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a is not b
        assert same_bits(a.grad, b.grad)


def test_a_model_can_be_copied_between_forward_and_backward() -> None:
    model, x = Checkpointed(), leaf(2, 8)
    loss = model(x).sum()
    twin = copy.deepcopy(model)
    loss.backward()
    assert all(p.grad is None for p in twin.parameters())
    assert all(p.grad is not None for p in model.parameters())


@rekindle.checkpoint(use_reentrant=False)
def decorated(x: Tensor) -> Tensor:
    return three(x)


def test_a_decorated_function_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
