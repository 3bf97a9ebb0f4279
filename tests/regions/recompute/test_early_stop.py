"""A replay stops when all that backward needs is there, and not before it is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from tests.toys import Mlp, assert_same_step, gradients


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def four(x: Tensor) -> Tensor:
    """Four ops; the last that autograd saves for is cos, which saves its input."""
    return x.sin().exp().cos() * 2


class Ops(TorchDispatchMode):
    """The names of the ops that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def replayed(function: Callable[..., Tensor], *args: Any, **options: Any) -> int:
    with rekindle.observe() as seen:
        rekindle.checkpoint(function, *args, **options).sum().backward()
    return seen.total.ops_replayed


# The switches


def test_a_replay_stops_before_the_last_op_that_saves() -> None:
    assert replayed(four, leaf(3)) == 2


def test_a_replay_without_early_stop_runs_every_op() -> None:
    assert replayed(four, leaf(3), early_stop=False) == 4


@pytest.mark.parametrize(("enable", "option", "ops"), [(False, True, 4), (True, False, 2)])
def test_the_context_manager_overrules_the_option(enable: bool, option: bool, ops: int) -> None:
    with rekindle.set_checkpoint_early_stop(enable):
        assert replayed(four, leaf(3), early_stop=option) == ops


def test_the_context_manager_counts_where_the_region_is_called_not_where_it_replays() -> None:
    x = leaf(3)
    with rekindle.observe() as seen:
        with rekindle.set_checkpoint_early_stop(False):
            loss = rekindle.checkpoint(four, x).sum()
        loss.backward()
    assert seen.total.ops_replayed == 4


def test_context_managers_nest_and_end_with_an_exception() -> None:
    with rekindle.set_checkpoint_early_stop(False):
        with (
            pytest.raises(ValueError, match="out"),
            rekindle.set_checkpoint_early_stop(True),
        ):
            raise ValueError("out")
        assert replayed(four, leaf(3)) == 4
    assert replayed(four, leaf(3)) == 2


@pytest.mark.parametrize("early_stop", [True, False])
def test_gradients_are_the_plain_ones_with_and_without_early_stop(early_stop: bool) -> None:
    model, x = Mlp(drop=0.3), leaf(2, 8)
    assert_same_step(
        lambda: model(x),
        lambda: rekindle.checkpoint(model, x, early_stop=early_stop),
        [x, *model.parameters()],
    )


def test_code_behind_the_last_save_runs_again_only_without_early_stop() -> None:
    for early_stop, calls in ((True, ["forward"]), (False, ["forward", "replay"])):
        ran: list[str] = []

        def region(x: Tensor, ran: list[str] = ran) -> Tensor:
            out = four(x)
            ran.append("replay" if rekindle.is_recomputing() else "forward")
            return out

        rekindle.checkpoint(region, leaf(3), early_stop=early_stop).sum().backward()
        assert ran == calls


def test_user_code_that_catches_every_exception_lets_an_early_stop_pass() -> None:
    x, caught = leaf(3), []

    def region(x: Tensor) -> Tensor:
        try:
            return four(x)
        except Exception:  # noqa: BLE001
            caught.append("caught")
            return x

    assert_same_step(lambda: four(x), lambda: rekindle.checkpoint(region, x), [x])
    assert caught == []


def test_user_code_that_swallows_even_an_early_stop_still_gets_the_plain_gradients() -> None:
    """Contrived: a bare `except:` around the last op that is needed, and an op that saves after."""
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        out = x.sin().exp()
        try:
            out = out.cos()
        except:  # noqa: E722
            out = x
        out.sin()
        return out

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_cleanup_in_a_region_runs_when_a_replay_stops() -> None:
    x, cleaned = leaf(3), []

    def region(x: Tensor) -> Tensor:
        try:
            return four(x)
        finally:
            cleaned.append(rekindle.is_recomputing())

    rekindle.checkpoint(region, x).sum().backward()
    assert cleaned == [False, True]


@pytest.mark.parametrize("last", [Tensor.exp, Tensor.cos], ids=["as it ends", "before its end"])
def test_a_replay_that_stops_in_a_region_under_a_policy_leaves_the_hooks_around_alone(
    last: Callable[[Tensor], Tensor],
) -> None:
    x = leaf(3)
    packed: list[Tensor] = []

    def plain(x: Tensor) -> Tensor:
        return last(x.sin() * 2)

    def nested(x: Tensor) -> Tensor:
        out: Tensor = rekindle.checkpoint(plain, x, context_fn=rekindle.policies.keep())
        return out

    out = rekindle.checkpoint(nested, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        (grad,) = torch.autograd.grad(out.sum(), x)
        packed.clear()
        x.exp()
    assert len(packed) == 1
    assert torch.equal(grad, torch.autograd.grad(plain(x).sum(), x)[0])


# What is written after it is saved


@pytest.mark.parametrize("inplace", [False, True])
def test_rrelu_as_the_last_op_has_the_plain_gradient(inplace: bool) -> None:
    """Field note 3: its noise is saved before it is drawn."""
    rrelu, x = nn.RReLU(0.1, 0.9, inplace=inplace), leaf(64)
    assert_same_step(
        lambda: rrelu(x.sin()), lambda: rekindle.checkpoint(lambda x: rrelu(x.sin()), x), [x]
    )


def test_rrelu_as_the_only_op_has_the_plain_gradient() -> None:
    """Field note 3."""
    rrelu, x = nn.RReLU(0.1, 0.9), leaf(64)
    assert_same_step(lambda: rrelu(x), lambda: rekindle.checkpoint(rrelu, x), [x])


def test_several_rrelus_called_from_one_line_have_the_plain_gradients() -> None:
    """Field note 3."""
    rrelu, x = nn.RReLU(0.1, 0.9), leaf(64)

    def region(x: Tensor) -> Tensor:
        for _ in range(3):
            x = rrelu(x)
        return x

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_the_first_of_two_rrelus_has_the_plain_gradient_when_the_second_is_not_used() -> None:
    """Field note 3: the last tensor that is needed is then not the last that is saved."""
    rrelu, x = nn.RReLU(0.1, 0.9), leaf(64)

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        return rrelu(x), rrelu(x.sin())

    assert_same_step(lambda: region(x)[0], lambda: rekindle.checkpoint(region, x)[0], [x])


def test_rrelu_in_eval_has_the_plain_gradient() -> None:
    rrelu, x = nn.RReLU(0.1, 0.9).eval(), leaf(64)
    assert_same_step(lambda: rrelu(x), lambda: rekindle.checkpoint(rrelu, x), [x])


@pytest.mark.parametrize(
    "last",
    [
        lambda: nn.Dropout(0.4),
        lambda: nn.Dropout1d(0.4),
        lambda: nn.AlphaDropout(0.4),
        lambda: nn.LayerNorm(4),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.Softmax(-1),
        lambda: nn.Linear(4, 4),
        nn.PReLU,
        nn.Identity,
    ],
    ids=lambda make: type(make()).__name__,
)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_last_op_has_the_plain_gradient(last: Callable[[], nn.Module], frozen: bool) -> None:
    module, x = last().requires_grad_(not frozen), leaf(6, 4)

    def region(x: Tensor) -> Tensor:
        return module(x.sin())

    assert_same_step(
        lambda: region(x), lambda: rekindle.checkpoint(region, x), [x, *module.parameters()]
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_as_the_last_op_has_the_plain_gradients_and_statistics(training: bool) -> None:
    x = leaf(6, 4)
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
    results = []
    for norm, run in zip(norms, (lambda f, x: f(x), rekindle.checkpoint), strict=True):
        with torch.no_grad():
            norm.running_mean.fill_(0.3)
        norm.train(training)
        region = nn.Sequential(nn.Tanh(), norm)
        results.append(
            gradients(lambda run=run, region=region: run(region, x), [x, *norm.parameters()])[1]
        )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(norms[0].buffers(), norms[1].buffers(), strict=True):
        assert torch.equal(a, b)


def test_dropout_alone_has_the_plain_gradient() -> None:
    x = leaf(64)
    assert_same_step(
        lambda: nn.functional.dropout(x, 0.5),
        lambda: rekindle.checkpoint(nn.functional.dropout, x, 0.5),
        [x],
    )


# What need not run


def ops_of_backward(region: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    out = rekindle.checkpoint(region, x)
    seed = torch.ones_like(out)
    with Ops() as ops:
        out.backward(seed)
    return ops.names


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_at_the_end_is_not_multiplied_again(frozen: bool, bias: bool) -> None:
    """Frozen as under LoRA: its weight is all that is saved, and needs no gradient."""
    linear, x = nn.Linear(4, 4, bias=bias).requires_grad_(not frozen), leaf(2, 4)
    with rekindle.observe() as seen:
        rekindle.checkpoint(lambda x: linear(x.sin()), x).sum().backward()
    names = ops_of_backward(lambda x: linear(x.sin()), x)
    backward = 1 if frozen else 2  # of the input, and of the weight
    assert names.count("mm") + names.count("addmm") == backward
    assert names.count("sin") == 1
    assert seen.total.replays == 1


def test_a_lora_block_runs_its_frozen_and_its_small_matmuls_once_in_replay() -> None:
    """The frozen product is not saved at all; of the small ones the second is not run again."""
    base = nn.Linear(4, 4, bias=False).requires_grad_(False)
    down, up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
    x = leaf(2, 4)

    def region(x: Tensor) -> Tensor:
        return base(x) + up(down(x))

    assert_same_step(
        lambda: region(x), lambda: rekindle.checkpoint(region, x), [x, down.weight, up.weight]
    )
    names = ops_of_backward(region, x)
    # Replayed: base and down. Backward: one for base, two each for down and up.
    assert names.count("mm") == 2 + 5


def test_a_replay_for_an_early_output_alone_stops_early() -> None:
    x = leaf(3)

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.sin().exp()
        return first, first.cos().tanh().sin()

    with rekindle.observe() as seen:
        rekindle.checkpoint(region, x)[0].sum().backward()
    assert seen.total.ops_replayed == 2  # exp saves its result


# Forward hooks that are always called


def calls_in_replay(run: Callable[[nn.Module, Tensor], Tensor], nested: bool) -> list[Any]:
    """Which hooks a replay calls, and which of them get an output; it stops inside the last."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()))
    called: list[Any] = []
    for name, module in model.named_modules():

        def note(module: nn.Module, *given: Any, name: str = name) -> None:
            called.append((name, len(given), given[-1] is not None))

        module.register_forward_hook(note, always_call=True)
        module.register_forward_hook(note, always_call=True, with_kwargs=True)
        module.register_forward_hook(lambda *given, name=name: called.append(name))
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: called.append((type(module), out is not None)), always_call=True
    )
    try:
        x = leaf(2, 3)
        out = run(lambda x: run(model, x), x) if nested else run(model, x)  # type: ignore[arg-type]
        called.clear()
        out.sum().backward()
    finally:
        everywhere.remove()
    return called


@pytest.mark.parametrize("nested", [False, True])
def test_a_replay_that_stops_calls_forward_hooks_with_always_call_as_torchs_does(
    nested: bool,
) -> None:
    def torchs(function: Any, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)  # type: ignore[no-any-return]

    ours = calls_in_replay(rekindle.checkpoint, nested)
    assert ours == calls_in_replay(torchs, nested)
    assert ours[-1] == ("", 3, False)  # of the outermost module, stopped before it had an output


def test_a_hook_with_always_call_may_run_ops_that_save_tensors_in_a_stopped_replay() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()), leaf(2, 3)
    weight = leaf(3)

    def hook(module: nn.Module, args: Any, out: Tensor | None) -> Tensor:
        return (args[0] if out is None else out).sin() * weight

    model[1].register_forward_hook(hook, always_call=True)
    leaves = [x, weight, *model.parameters()]
    assert_same_step(lambda: model(x), lambda: rekindle.checkpoint(model, x), leaves)


def test_a_region_that_catches_the_stop_for_a_hook_has_right_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()), leaf(2, 3)
    model.register_forward_hook(lambda *_: None, always_call=True)
    caught: list[str] = []

    def region(x: Tensor) -> Tensor:
        try:
            return model(x)  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001
            caught.append(type(error).__name__)
            return x.exp()

    leaves = [x, *model.parameters()]
    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), leaves)
    assert caught == ["StopForHooks"]


def test_a_module_without_such_a_hook_is_stopped_by_no_exception_that_its_code_would_catch() -> (
    None
):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()), leaf(2, 3)
    other = nn.Linear(3, 3)
    other.register_forward_hook(lambda *_: None, always_call=True)  # which has ended by then
    model.register_forward_hook(lambda *_: None)
    caught: list[Exception] = []

    def region(x: Tensor) -> Tensor:
        try:
            return model(other(x))  # type: ignore[no-any-return]
        except Exception as error:
            caught.append(error)
            raise

    rekindle.checkpoint(region, x).sum().backward()
    assert caught == []
