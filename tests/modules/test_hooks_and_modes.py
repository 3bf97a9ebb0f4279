"""Hooks, transforms and modes around modules with strategies."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.modules.applying import applied, assert_as_plain, every_kind_and_nested
from tests.toys import Stack, assert_same_step, gradients, leaf, same_bits


def hooked(model: nn.Module) -> list[Any]:
    """Every kind of hook on the first block; each call is noted."""
    block, calls = model.get_submodule("blocks.0"), []

    def note(kind: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            shapes = [type(arg).__name__ for arg in args]
            calls.append((kind, *shapes))

        return hook

    block.register_forward_pre_hook(note("before"))
    block.register_forward_pre_hook(note("before, with keywords"), with_kwargs=True)
    block.register_forward_hook(note("after"))
    block.register_forward_hook(note("after, with keywords"), with_kwargs=True)
    block.register_forward_hook(note("after, always"), always_call=True)
    block.register_full_backward_pre_hook(note("before backward"))
    block.register_full_backward_hook(note("after backward"))
    return calls


@every_kind_and_nested
def test_hooks_of_a_module_run_once_and_in_the_same_order(what: Any) -> None:
    found = []
    for model in (applied(what), Stack(2)):
        calls = hooked(model)
        model(leaf()).sum().backward()
        found.append(calls)
    assert found[0] == found[1]
    assert len(found[0]) == 7


@every_kind_and_nested
def test_hooks_that_were_there_before_run_as_before(what: Any) -> None:
    model = Stack(2)
    calls = hooked(model)
    rekindle.apply(model, what)
    model(leaf()).sum().backward()
    assert len(calls) == 7


@every_kind_and_nested
def test_hooks_that_change_inputs_outputs_and_gradients_do_so_as_before(what: Any) -> None:
    model, x = Stack(2), leaf()
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    block.register_forward_hook(lambda _, args, out: out * args[0])
    tripled: Any = lambda _, given, __: (given[0] * 3,)  # noqa: E731
    block.register_full_backward_hook(tripled)

    def run() -> tuple[Tensor, list[Tensor | None], Tensor]:
        return gradients(lambda: model(x), [x, *model.parameters()])

    _, plain, _ = run()
    rekindle.apply(model, what)
    _, found, _ = run()
    assert all(map(same_bits, plain, found))


@every_kind_and_nested
def test_global_hooks_run_once_for_a_module_with_a_strategy(what: Any) -> None:
    model, calls = applied(what), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    with handle:
        model(leaf()).sum().backward()
    assert calls.count(model.blocks[0]) == 1


# Modes


@every_kind_and_nested
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_the_plain_forward(what: Any, mode: Any) -> None:
    model, x = applied(what), leaf()
    with mode(), rekindle.observe() as seen:
        out = model(x)
    rekindle.remove(model)
    assert torch.equal(out, model(x))
    assert not out.requires_grad
    assert (seen.total.forwards, seen.spill.tensors_out) == (0, 0)


@every_kind_and_nested
def test_eval_has_the_plain_outputs_and_gradients(what: Any) -> None:
    model = applied(what, drop=0.5)
    assert_as_plain(model.eval(), leaf())


@every_kind_and_nested
def test_a_switch_between_forward_and_backward_does_not_reach_the_replay(what: Any) -> None:
    model, x = applied(what, drop=0.5), leaf()

    def switched() -> Tensor:
        out: Tensor = model(x)
        model.eval()
        return out

    plain = copy.deepcopy(model)
    rekindle.remove(plain)
    assert_same_step(lambda: plain(x), switched, [x])


@every_kind_and_nested
def test_training_after_eval_is_as_before(what: Any) -> None:
    model = applied(what, drop=0.5)
    model.eval()(leaf())
    assert_as_plain(model.train(), leaf())


@every_kind_and_nested
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_moved_to_another_dtype_has_the_plain_gradients(what: Any, dtype: Any) -> None:
    model = applied(what).to(dtype)
    assert_as_plain(model, torch.randn(2, 8, dtype=dtype))


@every_kind_and_nested
def test_autocast_gives_the_plain_gradients(what: Any) -> None:
    model, x = applied(what), leaf()
    plain = copy.deepcopy(model)
    rekindle.remove(plain)

    def run(this: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return this(x)

    assert_same_step(lambda: run(plain), lambda: run(model), [x])


def test_frozen_blocks_pass_gradients_on() -> None:
    model, x = applied(), leaf()
    model.requires_grad_(False)
    plain = copy.deepcopy(model)
    rekindle.remove(plain)
    assert_same_step(lambda: plain(x), lambda: model(x), [x])


def test_batch_statistics_are_counted_once() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)])
    plain = copy.deepcopy(model)
    rekindle.apply(model, "recompute")
    x = leaf()
    for this in (model, plain):
        this(x).sum().backward()
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
