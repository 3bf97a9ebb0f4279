"""Graphs that are thrown away and steps that fail leave nothing behind under offload."""

import gc
import threading
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle.offload.tiers.spill_file import SpillFile
from rekindle.torch_private.autograd_graph import saved_by
from tests.offload.as_plain import assert_as_plain, assert_plain_gradients, branching, padded
from tests.offloading import STEPS, leaf, only_offloader, spilling
from tests.toys import Stack

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


def test_a_graph_thrown_away_leaves_the_next_steps_plain() -> None:
    model, x = Stack(depth=3), leaf(4, 8)
    for _ in range(STEPS):
        with spilling():
            model(x)
        assert_plain_gradients(lambda: model(x), [x, *model.parameters()], steps=1)


def test_a_graph_thrown_away_is_no_part_of_the_step_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while its copies are still being written."""
    monkeypatch.undo()
    may_go, write = threading.Event(), SpillFile._write

    def slow(self: SpillFile, *args: Any) -> None:
        assert may_go.wait(120)
        write(self, *args)

    monkeypatch.setattr(SpillFile, "_write", slow)
    x = leaf(16)
    with spilling():
        padded(x.sin())
    offloader = only_offloader()
    leaving: list[Any] = [each.copy for each in offloader._copy_outs.queue._queue]
    may_go.set()
    for copy in leaving:
        copy._writing.wait()
    with spilling():
        loss = padded(x).sum()
    assert offloader._step is not None
    assert offloader._step.sizes == [64] * 3
    loss.backward()


def test_activations_die_with_their_output_without_the_collector() -> None:
    x = leaf(64)
    gc.collect()
    gc.disable()
    try:
        for _ in range(STEPS):
            with spilling():
                out = padded(padded(functional.silu(x + 1) * (x + 2)).exp())
            node, activations = out.grad_fn, []
            while node is not None:
                for name in ("self", "other", "result"):
                    if hasattr(node, f"_raw_saved_{name}"):
                        saved = saved_by(node, name)
                        if hasattr(saved, "activation"):
                            activations.append(ref(saved.activation))
                node = node.next_functions[0][0] if node.next_functions else None
                saved = None
            assert len(activations) >= 10
            del out
            assert [weak() for weak in activations] == [None] * len(activations)
    finally:
        gc.enable()


def test_saved_results_make_no_cycles() -> None:
    """exp saves its own result: to hold it as it is would hold the node that holds it."""

    class Mark:
        pass

    for options in ({}, {"min_bytes": 4096}, {"derive": False}):
        gc.collect()
        gc.disable()
        try:
            mark = Mark()
            with spilling(**options):
                out = padded(leaf(64).exp().sigmoid().softmax(0))
            out.grad_fn.metadata["mark"] = mark  # type: ignore[union-attr]
            weak = ref(mark)
            del mark, out
            assert weak() is None
        finally:
            gc.enable()


def test_backward_frees_each_activation_as_it_goes() -> None:
    x = leaf(64)
    living = []
    for _ in range(STEPS):
        with spilling():
            h = x.sin()
            out = h.cos()
            saved = saved_by(out.grad_fn, "self")
            weak = ref(saved.activation)
            del saved
            h.register_hook(lambda _, weak=weak: living.append(weak()))
            del h
            out = padded(padded(out))
        out.sum().backward()
    assert living == [None] * STEPS


class Breaks(torch.autograd.Function):
    """Fails in forward, or in backward the first time."""

    has_failed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not Breaks.has_failed:
            Breaks.has_failed = True
            raise ValueError("backward breaks")
        return grad


def test_an_exception_in_forward_leaves_the_next_steps_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)

    def broken(block: nn.Module, h: Tensor) -> Tensor:
        if block is model.blocks[2]:
            raise ValueError("forward breaks")
        return block(h)

    for _ in range(STEPS):
        with pytest.raises(ValueError, match="forward breaks"), spilling():
            model(x, run=broken)
        assert_plain_gradients(lambda: model(x), [x, *model.parameters()], steps=1)


def test_an_exception_in_backward_leaves_the_next_steps_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)
    for _ in range(STEPS):
        Breaks.has_failed = False
        with spilling():
            out = model.blocks[3](model.blocks[2](Breaks.apply(model.blocks[1](x.exp()))))
        with pytest.raises(ValueError, match="backward breaks"):
            out.sum().backward()
        del out
        assert_plain_gradients(lambda: model(x), [x, *model.parameters()], steps=1)


def test_a_backward_that_failed_can_be_run_again() -> None:
    x, w = leaf(8, 8), leaf(8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        Breaks.has_failed = False
        with context:
            loss = branching(Breaks.apply(branching(x, w)), w).sum()
        with pytest.raises(ValueError, match="backward breaks"):
            torch.autograd.grad(loss, [x, w], retain_graph=True)
        return list(torch.autograd.grad(loss, [x, w]))

    assert_as_plain(step)


def test_what_was_fetched_is_let_go_when_backward_fails() -> None:
    x = leaf(64)
    Breaks.has_failed = False
    with spilling():
        first = (x + 1).sin()
        out = Breaks.apply(first)
        fetched = out.cos()
        loss = padded(padded(fetched)).sum()
    with pytest.raises(ValueError, match="backward breaks"):
        loss.backward(retain_graph=True)
    activation = saved_by(fetched.grad_fn, "self").activation
    assert activation.copy is not None
    assert activation.data is None


def test_hooks_are_put_back_after_an_exception() -> None:
    x = leaf(16)
    with pytest.raises(ValueError, match="stop"), spilling():
        raise ValueError("stop")
    with rekindle.observe() as seen:
        padded(padded(x)).sum().backward()
    assert seen.spill.tensors_out == 0
