"""`rekindle.offload` under everything that autograd can do: each time as the plain run."""

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from torch import Tensor, nn
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import rekindle
from rekindle.offload.owners import forget_shared
from rekindle.offload.tiers.spill_file import SpillFile
from rekindle.torch_private.autograd_graph import saved_by
from tests.offloading import STEPS, leaf, only_offloader, spilling
from tests.programs import MODES, Mode, Program, differences, format_program, programs
from tests.programs import run as run_program
from tests.toys import Block, Mlp, Stack, assert_same_step, gradients, same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


def padded(x: Tensor) -> Tensor:
    """Follows what is tested: what is saved last is not moved, and here that are these."""
    for _ in range(4):
        x = x.sin()
    return x


def assert_plain_gradients(
    run: Callable[[], Any],
    leaves: list[Tensor],
    steps: int = STEPS,
    backward: Callable[[Tensor], None] = Tensor.backward,
    **options: Any,
) -> None:
    """Every step under offload is the plain step, bit for bit, and something was moved."""

    def offloaded() -> Any:
        with spilling(**options):
            return run()

    with rekindle.observe() as seen:
        for seed in range(steps):
            assert_same_step(run, offloaded, leaves, seed=seed, backward=backward)
    assert seen.spill.tensors_out > 0


def plain_and_offloaded(**options: Any) -> Iterator[AbstractContextManager[Any]]:
    """A plain step, and then some under offload."""
    yield nullcontext()
    for _ in range(STEPS):
        yield spilling(**options)


def assert_as_plain(step: Callable[[AbstractContextManager[Any]], list[Tensor]]) -> None:
    """`step(context)` gives the same tensors plain and under offload, in each step."""
    contexts = plain_and_offloaded()
    torch.manual_seed(1)
    expected = step(next(contexts))
    for context in contexts:
        torch.manual_seed(1)
        found = step(context)
        assert [same_bits(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(
            expected
        )


# In-place changes


CHANGED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda h: h.add_(1),
    "a view": lambda h: h[:1].zero_(),
    "detached": lambda h: h.detach().mul_(2),
    "without gradients": lambda h: torch.no_grad()(Tensor.mul_)(h, 2),
    "in inference mode": lambda h: torch.inference_mode()(Tensor.mul_)(h.detach(), 2),
    "out=": lambda h: torch.no_grad()(torch.add)(h, 1, out=h.detach()),
    "copied into": lambda h: h.copy_(torch.ones_like(h)),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
@pytest.mark.parametrize("is_held", [True, False])
def test_a_saved_tensor_that_was_changed_raises_as_it_does_plain(
    change: Callable[[Tensor], Any], is_held: bool
) -> None:
    x = leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x.exp() + 1
            out = padded(h.sin())
            change(h)
            held = h if is_held else None
            del h
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        del held


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
def test_a_result_that_is_saved_and_was_changed_raises_as_it_does_plain(
    change: Callable[[Tensor], Any],
) -> None:
    x = leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x.sin().exp()
            out = padded(h + 1)
            change(h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (out.sum() + h.sum()).backward()


def test_a_small_tensor_that_was_changed_raises_as_it_does_plain() -> None:
    x = leaf(16)
    for context in plain_and_offloaded(min_bytes=4096):
        with context:
            h = x + 1
            out = h.sin()
            h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_parameter_that_was_changed_raises_as_it_does_plain() -> None:
    x, w = leaf(16), nn.Parameter(torch.randn(16))
    for context in plain_and_offloaded():
        with context:
            out = padded((x + 1) * w)
        with torch.no_grad():
            w.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_changed_factor_of_a_product_raises_as_it_does_plain() -> None:
    x, w = leaf(16), leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x + 1
            out = padded(h * (w + 1))
            h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_error_says_what_was_changed_and_what_to_do() -> None:
    x = leaf(16)
    with spilling():
        h = x + 1
        out = h.sin()
        h.add_(1)
    with pytest.raises(
        rekindle.RekindleError,
        match=r"float32 \[16\], made by AddBackward0, is at version 1; expected version 0",
    ):
        out.sum().backward()


def test_a_tensor_changed_before_it_is_saved_is_no_error() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = x.exp() + 1
        h.mul_(2)
        h[:3].add_(1)
        return padded(h.sin().exp())

    assert_plain_gradients(run, [x])


def test_a_change_to_what_backward_does_not_need_is_no_error() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = x + 1
        out = padded((h * 2).exp())
        h.zero_()
        return out + h

    assert_plain_gradients(run, [x])


def test_a_tensor_saved_before_and_after_a_change_is_wanted_as_it_was_after() -> None:
    """Backward never gets to what was saved before the change."""
    x = leaf(16)

    def run() -> Tensor:
        h = x + 1
        h.sin()
        h.mul_(2)
        return padded(h.cos())

    assert_plain_gradients(run, [x])


def test_a_saved_alias_with_versions_of_its_own_raises_when_it_was_changed() -> None:
    """`h.data` is the storage of `h`, with a version counter of its own."""
    x, w = leaf(16), leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x + 1
            first = h.sin()
            alias = h.data
            out = w * alias
            alias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        del first


def test_a_saved_alias_with_versions_of_its_own_is_no_error_when_the_other_was_changed() -> None:
    x, w = leaf(16), leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x + 1
            first = h.sin()
            out = w * h.data
            with torch.no_grad():
                h.mul_(1)
        assert same_bits(torch.autograd.grad(out.sum(), w)[0], x.detach() + 1)
        del first


def test_relu_in_place_has_plain_gradients() -> None:
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3))] * 4
    )
    x = leaf(4, 8)
    assert_plain_gradients(lambda: model(x), [x, *model.parameters()])


def test_views_changed_in_place_have_plain_gradients() -> None:
    x = leaf(8, 8)

    def run() -> Tensor:
        h = x * 2
        h[:, 1::2] = (h[:, ::2] + 1).sin()
        h.t()[0].mul_(2)
        a, b = h.view(4, 16).unbind(0)[:2]
        return padded((a * b).sigmoid_() * h[0, 0])

    assert_plain_gradients(run, [x])


# Ways to run backward


def branching(x: Tensor, w: Tensor) -> Tensor:
    h = functional.silu(x @ w) * (x + 1)
    return padded(h.exp().softmax(-1) @ w.t()) * h.t().sin()


def test_backward_twice_has_plain_gradients_both_times() -> None:
    x, w = leaf(8, 8), leaf(8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            loss = branching(x, w).sum()
        first = torch.autograd.grad(loss, [x, w], retain_graph=True)
        return [*first, *torch.autograd.grad(loss, [x, w])]

    assert_as_plain(step)


def test_backward_twice_fetches_twice() -> None:
    x = leaf(16)
    for _ in range(STEPS):
        with rekindle.observe() as seen:
            with spilling():
                loss = padded(padded(x)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        # Seven activations, of which the last two stay.
        assert (seen.spill.tensors_out, seen.spill.tensors_in) == (5, 10)


def test_backward_after_the_graph_was_freed_raises_as_it_does_plain() -> None:
    x, w = leaf(8, 8), leaf(8, 8)
    for context in plain_and_offloaded():
        with context:
            loss = branching(x, w).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@pytest.mark.parametrize("is_inside", [True, False])
def test_double_backward_has_plain_gradients(is_inside: bool) -> None:
    x, w = leaf(8, 8), leaf(8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            loss = branching(x, w).sum()
            if is_inside:
                first = torch.autograd.grad(loss, [x, w], create_graph=True)
        if not is_inside:
            first = torch.autograd.grad(loss, [x, w], create_graph=True)
        penalty = sum((g * g).sum() for g in first)
        assert isinstance(penalty, Tensor)
        return [*first, *torch.autograd.grad(penalty, [x, w])]

    assert_as_plain(step)


def test_a_third_derivative_is_plain() -> None:
    x = leaf(16)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            h = padded(x.exp() * x.sin()).sum()
            for _ in range(2):
                (g,) = torch.autograd.grad(h, x, create_graph=True)
                h = g.sin().sum()
        return list(torch.autograd.grad(h, x))

    assert_as_plain(step)


def test_backward_to_some_inputs_is_plain() -> None:
    x, w, v = leaf(8, 8), leaf(8, 8), leaf(8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        x.grad = w.grad = v.grad = None
        with context:
            loss = (branching(x, w) * branching(v, w)).sum()
        loss.backward(inputs=[v], retain_graph=True)
        assert x.grad is None
        first = v.grad
        loss.backward(inputs=[x, w])
        return [first, x.grad, w.grad]  # type: ignore[list-item]

    assert_as_plain(step)


def test_gradients_of_activations_are_plain() -> None:
    x, w = leaf(8, 8), leaf(8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            h = (x * 2).sin()
            h.retain_grad()
            k = h @ w
            loss = padded(k.exp()).sum()
        part = torch.autograd.grad(loss, k, retain_graph=True)
        loss.backward()
        return [*part, h.grad]  # type: ignore[list-item]

    assert_as_plain(step)


def test_batched_gradients_are_plain() -> None:
    x, w = leaf(8, 8), leaf(8, 8)
    grads = torch.randn(3, 8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            out = branching(x, w)
        return list(torch.autograd.grad(out, [x, w], grads, is_grads_batched=True))

    assert_as_plain(step)


def test_jacobians_are_plain() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        def function(x: Tensor) -> Tensor:
            with context:
                return branching(x, w)

        whole = torch.autograd.functional.jacobian(function, x, vectorize=True)
        hessian = torch.autograd.functional.hessian(lambda x: function(x).sum(), x)
        return [whole, hessian]

    assert_as_plain(step)


def test_backward_inside_the_with_is_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)
    expected = gradients(lambda: model(x), [x, *model.parameters()])[1]
    for _ in range(STEPS):
        with spilling():
            found = gradients(lambda: model(x), [x, *model.parameters()])[1]
        assert all(map(same_bits, found, expected))


def test_several_steps_in_one_with_are_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)
    expected = gradients(lambda: model(x), [x, *model.parameters()])[1]
    with spilling():
        for _ in range(STEPS + 2):
            found = gradients(lambda: model(x), [x, *model.parameters()])[1]
            assert all(map(same_bits, found, expected))


def test_a_with_around_each_layer_is_plain() -> None:
    model, x = Stack(depth=5), leaf(4, 8)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        with spilling():
            return block(x)

    with rekindle.observe() as seen:
        for _ in range(STEPS):
            assert_same_step(lambda: model(x), lambda: model(x, run=run), [x, *model.parameters()])
    assert seen.spill.tensors_out > 0


def test_gradients_add_up_over_micro_batches_as_plain() -> None:
    model = Stack(depth=3, drop=0.2)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        model.zero_grad()
        for size in (4, 2, 3):
            with context:
                loss = model(torch.randn(size, 8)).sum()
            loss.backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    assert_as_plain(step)


def test_forwards_before_any_of_their_backwards_are_plain() -> None:
    model = Stack(depth=3)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        model.zero_grad()
        losses = []
        for _ in range(3):
            with context:
                losses.append(model(torch.randn(4, 8)).sum())
        for i in (1, 0, 2):
            losses[i].backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    assert_as_plain(step)


def test_backward_of_the_step_before_while_the_next_is_under_way_is_plain() -> None:
    model = Stack(depth=3)
    inputs = torch.randn(6, 4, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        found: list[Tensor] = []
        before = None
        for x in inputs:
            with context:
                h = x
                for i, block in enumerate(model.blocks):
                    h = block(h)
                    if i == 1 and before is not None:
                        found += torch.autograd.grad(before, list(model.parameters()))
                before = h.sum()
        return found

    assert_as_plain(step)


def test_two_models_by_turns_under_the_same_options_are_plain() -> None:
    models = [Stack(depth=3, dim=8), Stack(depth=4, dim=16)]
    inputs = [leaf(4, 8), leaf(4, 16)]
    for _ in range(2 * STEPS):
        for model, x in zip(models, inputs, strict=True):
            assert_plain_gradients(lambda: model(x), [x, *model.parameters()], steps=1)  # noqa: B023


def test_another_shape_in_every_step_is_plain() -> None:
    model = Stack(depth=3)
    for size in (4, 6, 4, 1, 9, 6, 4, 20, 2, 9):
        x = leaf(size, 8)
        assert_plain_gradients(lambda: model(x), [x, *model.parameters()], steps=1)  # noqa: B023


def test_a_step_that_leaves_out_layers_by_chance_is_plain() -> None:
    model, x = Stack(depth=6), leaf(4, 8)

    def run() -> Tensor:
        return model(x, run=lambda block, h: block(h) if torch.rand(()) < 0.6 else h)

    x_and_all = [x, *model.parameters()]
    for seed in range(10):
        plain = gradients(run, x_and_all, seed=seed)[1]
        with spilling():
            torch.manual_seed(seed)
            for t in x_and_all:
                t.grad = None
            out = run()
        out.sum().backward()
        assert all(same_bits(a, t.grad) for a, t in zip(plain, x_and_all, strict=True))


def test_evaluation_inside_and_between_is_plain() -> None:
    model, x = Stack(depth=3), leaf(4, 8)

    def run() -> Tensor:
        with torch.no_grad():
            scale = model(x).abs().mean()
        with torch.inference_mode():
            model(x)
        return model(x) * scale

    assert_plain_gradients(run, [x, *model.parameters()])


def test_a_graph_that_goes_on_after_a_backward_is_plain() -> None:
    """Truncated back-propagation that does not detach: steps share activations."""
    cell, x = nn.GRUCell(8, 8), torch.randn(6, 4, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        h, found = torch.zeros(4, 8), []
        for row in x:
            with context:
                h = cell(row, h * 1.0)
                loss = padded(h).sum()
            found += torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True)
        return found

    assert_as_plain(step)


def test_looking_at_saved_tensors_in_the_middle_of_a_forward_is_plain() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = padded(x)
        assert h.grad_fn is not None
        assert same_bits(h.grad_fn._saved_self.sin(), h)  # type: ignore[attr-defined]
        return padded(padded(h))

    assert_plain_gradients(run, [x])


def test_a_saved_tensor_can_be_looked_at_again_and_again() -> None:
    x = leaf(16)
    with spilling():
        h = x + 1
        expected = h.detach().clone()
        out = h.sin()
        del h
        rest = padded(padded(out))
    assert all(same_bits(out.grad_fn._saved_self, expected) for _ in range(3))  # type: ignore[union-attr]
    rest.sum().backward()


# Graphs that are thrown away, and what goes wrong


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


# Hooks


def test_hooks_on_tensors_and_modules_see_what_they_would_see_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        found: list[Tensor] = []
        handles = [
            block.register_full_backward_hook(
                lambda _, gin, gout: found.extend(g.clone() for g in (*gin, *gout))
            )
            for block in model.blocks
        ]
        with context:
            h = model(x)
            h.register_hook(lambda g: g * 2)
        h.sum().backward()
        for handle in handles:
            handle.remove()
        return found

    assert_as_plain(step)


def test_hooks_inside_take_what_is_saved_inside_them() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = padded(x)
        with saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            h = padded(h)
        return padded(padded(h))

    assert_plain_gradients(run, [x])


def test_hooks_outside_do_not_see_what_is_saved_inside() -> None:
    x, packed = leaf(16), []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t), spilling():
        out = padded(padded(x))
    out.sum().backward()
    assert packed == []


def test_save_on_cpu_inside_and_outside_is_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)

    def run() -> Tensor:
        with save_on_cpu():
            h = model.blocks[0](x)
        return model(h)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with save_on_cpu(), context:
            loss = run().sum()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    assert_as_plain(step)


def test_offload_in_offload_is_plain() -> None:
    model, x = Stack(depth=5), leaf(4, 8)

    def run(block: nn.Module, h: Tensor) -> Tensor:
        if block in (model.blocks[1], model.blocks[3]):
            with spilling(min_bytes=2):
                return block(h)
        return block(h)

    assert_plain_gradients(lambda: model(x, run=run), [x, *model.parameters()])


def test_offload_in_itself_is_plain() -> None:
    model, x, offload = Stack(depth=4), leaf(4, 8), spilling()

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context, context:
            loss = model(x).sum()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    expected = step(nullcontext())
    for _ in range(STEPS):
        assert all(map(same_bits, step(offload), expected))


def test_where_hooks_are_disabled_the_with_says_so_and_leaves_no_trace() -> None:
    x, offload = leaf(16), spilling()
    with (
        disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks here"),
        offload,
    ):
        pass
    with rekindle.observe() as seen:
        with offload:
            loss = padded(padded(x)).sum()
        loss.backward()
    assert seen.spill.tensors_out == 5


# Checkpointed regions


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "ours": rekindle.checkpoint,
    "ours, reentrant": lambda f, *a: rekindle.checkpoint(f, *a, use_reentrant=True),
    "torch's": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
    "torch's, reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=True),
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_checkpointed_regions_inside_are_plain(checkpoint: Callable[..., Any]) -> None:
    model, x = Stack(depth=5, drop=0.2), leaf(4, 8)
    assert_plain_gradients(lambda: model(x, run=checkpoint), [x, *model.parameters()])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_checkpointed_region_around_is_plain(checkpoint: Callable[..., Any]) -> None:
    model, x = Stack(depth=4, drop=0.2), leaf(4, 8)

    def region(h: Tensor) -> Tensor:
        h = model.blocks[0](h)
        with spilling():
            h = model.blocks[2](model.blocks[1](h))
        return model.blocks[3](h)

    for seed in range(STEPS):
        assert_same_step(
            lambda: model(x),
            lambda: checkpoint(region, x),
            [x, *model.parameters()],
            seed=seed,
        )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_checkpoint_around_offload_around_checkpoint_is_plain(
    checkpoint: Callable[..., Any],
) -> None:
    model, x = Stack(depth=4, drop=0.2), leaf(4, 8)

    def region(h: Tensor) -> Tensor:
        with spilling():
            return model(h, run=checkpoint)

    for seed in range(STEPS):
        assert_same_step(
            lambda: model(x),
            lambda: checkpoint(region, x),
            [x, *model.parameters()],
            seed=seed,
        )


# Ops


def test_rrelu_whose_noise_is_filled_after_it_is_saved_is_plain() -> None:
    x = leaf(4000)

    def run() -> Tensor:
        h = x * 1.5
        for _ in range(6):
            h = functional.rrelu(h, training=True).sin()
        return h

    assert_plain_gradients(run, [x])


def test_rrelu_on_one_line_is_plain() -> None:
    x = leaf(4000)
    rrelu = nn.RReLU()
    run = lambda: padded(rrelu(rrelu(rrelu(rrelu(x * 1.5)))))  # noqa: E731
    assert_plain_gradients(run, [x])


def test_rrelu_in_place_is_plain() -> None:
    x = leaf(4000)
    rrelu = nn.RReLU(inplace=True)
    run = lambda: padded(rrelu(rrelu(x * 1.5).sin()).sin())  # noqa: E731
    assert_plain_gradients(run, [x])


class Meanwhile(TorchDispatchMode):
    """Has another thread do something after an op has saved its tensors, before it runs."""

    def __init__(self, op: str, work: Callable[[], None]) -> None:
        super().__init__()
        self.op, self.work = op, work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.op in str(func):
            thread = threading.Thread(target=self.work)
            thread.start()
            thread.join()
        return func(*args, **(kwargs or {}))


def test_rrelu_is_plain_while_another_thread_runs_its_forward() -> None:
    """The other thread, under the same options, must not send noise that is not filled yet."""
    x, y = leaf(64), leaf(64)
    others: list[Tensor] = []

    def other() -> None:
        with spilling():
            others.append(padded(y))

    def run() -> Tensor:
        return padded(padded(functional.rrelu(x * 1.5, training=True)))

    def offloaded(mode: AbstractContextManager[Any]) -> Tensor:
        with spilling(), mode:
            return run()

    for seed in range(STEPS):  # learns that noise is moved
        assert_same_step(run, lambda: offloaded(nullcontext()), [x], seed=seed)
    for seed in range(STEPS):
        mode = Meanwhile("rrelu_with_noise", other)
        assert_same_step(run, lambda: offloaded(mode), [x], seed=seed)  # noqa: B023
        others.clear()


class Swish(torch.autograd.Function):
    """Saves an input, a result, a tensor of its own, and something that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        gate = torch.sigmoid(x)
        out = x * gate * scale
        ctx.save_for_backward(x, gate, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gate, out = ctx.saved_tensors
        return grad * (ctx.scale * gate + out * (1 - gate)) + 0 * x, None


def test_an_autograd_function_is_plain() -> None:
    x = leaf(64)

    def run() -> Tensor:
        h = x
        for _ in range(4):
            h = Swish.apply(h + 1, 0.5)
        return padded(h)

    assert_plain_gradients(run, [x])


class Scribbles(torch.autograd.Function):
    """Computes its gradient in forward, and scales what it saved in place in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return saved.mul_(grad)


def test_a_function_that_writes_on_what_it_saved_is_plain() -> None:
    x = leaf(64)

    def run() -> Tensor:
        h = x
        for _ in range(6):
            h = Scribbles.apply(h)
        return padded(h)

    assert_plain_gradients(run, [x])


class Chunked(torch.autograd.Function):
    """A loss in chunks: each chunk's gradient is taken while the forward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        grads, losses = [], []
        for chunk in x.chunk(3):
            with torch.enable_grad():
                part = chunk.detach().requires_grad_()
                loss = branching(part, w.detach()).sum()
                grads += torch.autograd.grad(loss, part)
            losses.append(loss.detach())
        ctx.save_for_backward(torch.cat(grads))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors[0] * grad, None


def test_a_function_that_takes_gradients_in_its_forward_is_plain() -> None:
    x, w = leaf(24, 8), leaf(8, 8)
    assert_plain_gradients(lambda: Chunked.apply(padded(padded(x)), w), [x])


# Random programs


def offloaded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with spilling():
        return function(*args, **kwargs)


def outcome(program: Program, **options: Any) -> dict[str, Any] | None:
    """What a program leaves behind, or None if autograd refuses it."""
    try:
        return run_program(program, **options)
    except (RuntimeError, NotImplementedError):
        return None


def assert_ends_as_plain(
    program: Program, run: Callable[[], dict[str, Any] | None], modes: Mapping[str, Mode] = MODES
) -> None:
    expected = outcome(program, plain=True, modes=modes)
    for _ in range(3):
        found = run()
        note(f"{format_program(program)}\nplain {expected is None=}, offloaded {found is None=}")
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert differences(expected, found) == []


FEW = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@FEW
@given(programs({"offloaded": Mode(offloaded)}))
def test_random_programs_with_offloaded_regions_end_as_plain(program: Program) -> None:
    forget_shared()
    modes = {"offloaded": Mode(offloaded)}
    assert_ends_as_plain(program, lambda: outcome(program, plain=False, modes=modes), modes)


@FEW
@given(programs())
def test_random_programs_that_are_offloaded_whole_end_as_plain(program: Program) -> None:
    forget_shared()
    assert_ends_as_plain(program, lambda: offloaded(outcome, program, plain=True))


@FEW
@given(programs())
def test_random_programs_of_checkpointed_regions_that_are_offloaded_whole_end_as_plain(
    program: Program,
) -> None:
    """Regions may run what plain autograd refuses, with offload or without."""
    forget_shared()
    if outcome(program, plain=True) is not None:
        assert_ends_as_plain(program, lambda: offloaded(outcome, program, plain=False))


# Threads


def test_threads_that_train_at_once_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = Stack(depth=4, dim=32)
    inputs = [torch.randn(16, 32) for _ in range(4)]
    parameters = list(model.parameters())
    expected = [torch.autograd.grad(model(x).sum(), parameters) for x in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        torch.set_num_threads(1)
        for _ in range(6):
            with spilling():
                loss = model(inputs[number]).sum()
            found = torch.autograd.grad(loss, parameters)
            wrong.extend(
                number for a, b in zip(found, expected[number], strict=True) if not same_bits(a, b)
            )

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, failures) == ([], [])


def test_backward_on_another_thread_is_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)

    def elsewhere(loss: Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert_plain_gradients(lambda: model(x), [x, *model.parameters()], backward=elsewhere)


class Deeper(torch.autograd.Function):
    """Runs a backward inside backward, `depth` deep: autograd changes threads on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.depth = depth
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = x.exp().sin()
            h = Deeper.apply(h, ctx.depth - 1) if ctx.depth else h
            (found,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return grad * found.detach(), None


def test_a_backward_on_a_thread_of_autograd_with_a_graph_of_its_own_is_plain() -> None:
    """Such a thread has no frame of Python below the hooks."""
    x = leaf(16)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            loss = Deeper.apply(x * 2, 80).sum()
            return list(torch.autograd.grad(loss, x))

    assert_as_plain(step)


# Other parts of torch


def test_a_tiny_llama_is_plain() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(50, (2, 12))
    assert_plain_gradients(lambda: model(input_ids=ids, labels=ids).loss, list(model.parameters()))


def test_a_tiny_gpt2_with_dropout_is_plain() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=4, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(50, (2, 12))
    assert_plain_gradients(lambda: model(input_ids=ids, labels=ids).loss, list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_plain(dtype: torch.dtype) -> None:
    model, x = Stack(depth=4), leaf(4, 8)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x)

    assert_plain_gradients(run, [x, *model.parameters()])


def test_func_transforms_around_are_plain() -> None:
    model, x = Mlp(), torch.randn(4, 8)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        with spilling():
            return torch.func.functional_call(model, parameters, (x,)).sum()

    def plain(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    for _ in range(STEPS):
        found = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        expected = torch.vmap(torch.func.grad(plain), (None, 0))(parameters, x)
        assert all(same_bits(found[name], expected[name]) for name in parameters)


def test_vmap_inside_is_plain() -> None:
    x, w = leaf(5, 8), leaf(8, 8)

    def run() -> Tensor:
        one = lambda row: functional.silu(row @ w).exp() * (row + 1)  # noqa: E731
        return padded(torch.vmap(one)(x * 2))

    assert_plain_gradients(run, [x, w])


def test_a_func_gradient_inside_raises_as_under_any_hooks() -> None:
    """torch.func refuses saved-tensor hooks set outside."""
    with spilling(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: x.sin().sum())(torch.randn(4))


@contextmanager
def new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module_inside_is_plain() -> None:
    """The compiled region saves its activations as one node."""
    model, x = Stack(depth=3), leaf(4, 8)
    with new_compiler():
        compiled = [torch.compile(block, backend="aot_eager") for block in model.blocks]

        def run() -> Tensor:
            h = x.sin()
            for block in compiled:
                h = block(h).exp().sin()
            return h

        assert_plain_gradients(run, [x, *model.parameters()])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_is_plain() -> None:
    model, x = Stack(depth=3), leaf(4, 8)
    with torch.autograd.set_detect_anomaly(True):
        assert_plain_gradients(lambda: model(x), [x, *model.parameters()])


def test_a_default_device_context_is_plain() -> None:
    model, x = Block(), leaf(4, 8)
    with torch.device("cpu"):
        assert_plain_gradients(lambda: padded(padded(model(x))), [x, *model.parameters()])


class Ops(TorchDispatchMode):
    """The ops that ran, autograd's own detaches aside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_in_forward_does_not_see_the_engine() -> None:
    x, seen = leaf(16), []
    for context in plain_and_offloaded():
        with context, Ops() as ops:
            padded(functional.silu(x + 1) * 2).sum()
        seen.append(ops.seen)
    assert seen == [seen[0]] * (STEPS + 1)


def test_a_dispatch_mode_in_backward_does_not_see_the_engine() -> None:
    x, seen = leaf(16), []
    for context in plain_and_offloaded():
        with context:
            loss = padded(functional.silu(x + 1) * 2).sum()
        with Ops() as ops:
            torch.autograd.grad(loss, x)
        seen.append(ops.seen)
    assert seen == [seen[0]] * (STEPS + 1)


def test_training_with_an_optimizer_is_plain() -> None:
    def train(context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Stack(depth=4, drop=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(8):
            optimizer.zero_grad()
            with context:
                loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
        return list(model.parameters())

    assert all(map(same_bits, train(spilling()), train(nullcontext())))


def test_an_optimizer_that_steps_in_backward_is_plain() -> None:
    def train(context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Stack(depth=4)
        scale = nn.Parameter(torch.ones(8))

        @torch.no_grad()
        def update(p: Tensor) -> None:
            assert p.grad is not None
            p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in (*model.parameters(), scale):
            p.register_post_accumulate_grad_hook(update)
        for _ in range(6):
            with context:
                h = torch.randn(4, 8)
                for block in model.blocks:
                    h = block(functional.silu(h * scale) * scale)
            h.square().mean().backward()
        return [*model.parameters(), scale]

    assert all(map(same_bits, train(spilling()), train(nullcontext())))


def test_a_backward_that_changes_what_it_saved_is_an_error_for_the_next_that_needs_it() -> None:
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            x.mul_(0)
            return grads[0]

    x = leaf(64)
    for context in (nullcontext(), *[spilling()] * STEPS):
        with context:
            y = x + 1
            loss = y.sin().sum() + Careless.apply(y).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
