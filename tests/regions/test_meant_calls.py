"""`checkpoint` as a bare decorator, and calls of it that mean something else than they say."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import compat, policies
from tests.toys import Mlp, assert_same_step, leaf, wave

# A function alone: Note [A function alone]


def test_a_bare_decorator_runs_the_function_as_a_region_at_every_call() -> None:
    @rekindle.checkpoint
    def region(x: Tensor, scale: float) -> Tensor:
        return wave(x * scale)

    x = leaf()
    with rekindle.observe() as seen:
        assert_same_step(lambda: wave(x * 2.0), lambda: region(x, scale=2.0), [x])
    assert (region.__name__, seen.total.forwards, seen.total.replays) == ("region", 1, 1)


def test_a_bare_decorator_works_on_methods() -> None:
    class Model(nn.Module):
        @rekindle.checkpoint
        def forward(self, x: Tensor) -> Tensor:
            return wave(x)

    x = leaf()
    assert_same_step(lambda: wave(x), lambda: Model()(x), [x])


def test_a_bare_decorator_works_around_another_decorator() -> None:
    @rekindle.checkpoint
    @torch.autocast("cpu", torch.bfloat16)
    def region(x: Tensor) -> Tensor:
        return x @ x.T

    assert region(leaf()).dtype == torch.bfloat16


def test_a_decorated_function_that_is_called_without_its_arguments_fails_as_the_function() -> None:
    region = rekindle.checkpoint(wave)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        region()  # type: ignore[call-arg]


X = leaf()
THUNKS: dict[str, Callable[..., Tensor]] = {
    "no parameters": lambda: wave(X),
    "defaults": lambda x=X: wave(x),
    "any arguments": lambda *args, **kwargs: wave(X, *args, **kwargs),
    "a partial": functools.partial(wave, X),
    "wraps what needs arguments": functools.wraps(wave)(lambda: wave(X)),
}


@pytest.mark.parametrize("thunk", THUNKS.values(), ids=THUNKS)
def test_a_function_that_needs_no_arguments_is_run_as_in_torch(thunk: Any) -> None:
    with rekindle.observe() as seen:
        rekindle.checkpoint(thunk).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)


def test_with_use_reentrant_given_a_function_alone_is_run_as_in_torch() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        rekindle.checkpoint(wave, use_reentrant=False)


def test_torchs_name_for_it_is_no_decorator() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        compat.checkpoint.checkpoint(wave, use_reentrant=False)


def test_an_applied_module_that_is_called_without_its_arguments_fails_as_the_module() -> None:
    block = Mlp()
    rekindle.apply(block, {"": "recompute"})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        block()


@pytest.mark.parametrize(
    ("what", "says"),
    [(Mlp(), r'rekindle.apply\(module, {"": "recompute"}\)'), (Mlp, "decorate its forward")],
    ids=["a module", "a class"],
)
def test_a_module_alone_is_refused_with_what_to_write(what: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        rekindle.checkpoint(what)


def test_what_a_function_returned_is_refused_with_the_call_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"called as checkpoint\(function, x\)"):
        rekindle.checkpoint(wave(leaf()))  # type: ignore[call-overload]


# Options by another name


@pytest.mark.parametrize("swallows", [wave, lambda x, **_: wave(x)], ids=["no", "yes"])
def test_a_policy_by_the_name_of_policy_is_refused_for_context_fn(swallows: Any) -> None:
    with pytest.raises(TypeError, match=r"context_fn=rekindle\.policies\.keep_matmuls"):
        rekindle.checkpoint(swallows, leaf(), policy=policies.keep_matmuls)


def test_a_function_may_have_a_parameter_called_policy() -> None:
    def region(x: Tensor, policy: Any) -> Tensor:
        return rekindle.checkpoint(wave, x, context_fn=policy)

    x = leaf()
    assert_same_step(
        lambda: wave(x), lambda: rekindle.checkpoint(region, x, policy=policies.keep_matmuls), [x]
    )


@pytest.mark.parametrize(
    ("given", "meant"), [("policy", "context_fn"), ("use_rentrant", "use_reentrant")]
)
def test_an_unknown_option_has_a_note_with_the_one_that_was_meant(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"{given}= is no option .* Did you mean {meant}=\?"):
        rekindle.checkpoint(wave, leaf(), **{given: False})


def test_an_unknown_keyword_that_is_like_no_option_has_no_note() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'") as refused:
        rekindle.checkpoint(wave, leaf(), mask=None)
    assert not hasattr(refused.value, "__notes__")


def test_a_function_that_decides_about_ops_is_refused_as_a_context_fn() -> None:
    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> rekindle.CheckpointPolicy:
        return rekindle.CheckpointPolicy.MUST_SAVE

    with pytest.raises(TypeError, match=r"context_fn=rekindle.policies.of\(function\)"):
        rekindle.checkpoint(wave, leaf(), context_fn=decide)  # type: ignore[arg-type]
    rekindle.checkpoint(wave, leaf(), context_fn=policies.of(decide))


def test_a_function_that_makes_a_policy_is_refused_as_a_context_fn() -> None:
    with pytest.raises(TypeError, match=r"returned OpsPolicy; a policy is given itself"):
        rekindle.checkpoint(wave, leaf(), context_fn=policies.keep)  # type: ignore[call-overload]
