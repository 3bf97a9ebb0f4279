"""Activations that are made again from others, in place of being kept or sent."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle.torch_private.autograd_graph import saved_by
from tests.offloading import STEPS, assert_plain_gradients, leaf, padded, spilling, traffic_of
from tests.toys import same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


ONE_INPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "hardswish": functional.hardswish,
}


@pytest.mark.parametrize("op", ONE_INPUT.values(), ids=ONE_INPUT.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_result_of_an_elementwise_op_is_made_again(
    op: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = leaf(67, dtype=dtype)

    def run() -> Tensor:
        return padded(op(x + 1).sin())

    assert [each.tensors_derived for each in traffic_of(run)] == [1] * STEPS
    assert_plain_gradients(run, [x])


TWO_INPUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "gated": lambda a, b: functional.silu(a) * b,
    "broadcast": lambda a, b: a * b[:, :1],
    "column and row": lambda a, b: a[:1] * b[:, :1],
    "transposed": lambda a, b: a.t() * b,
    "both transposed": lambda a, b: a.t() / b.t(),
    "strided": lambda a, b: a[::2] * b[1::2],
    "with itself": lambda a, b: (a * b) * (a * b),
    "0-dim": lambda a, b: a * b.sum(),
    "mixed dtypes": lambda a, b: a.bfloat16() * b,
    "double by 0-dim": lambda a, b: a * b.double().mean(),
    "complex": lambda a, b: (a * torch.complex(b, a)).abs(),
    "conjugated": lambda a, b: (torch.complex(a, b).conj() * torch.complex(b, a)).abs(),
    "then a view": lambda a, b: (a * b).t()[1:3],
    "then in place": lambda a, b: (a * b).mul_(2),
    "then in place on a view": lambda a, b: (y := a * b, y[0].add_(1))[0],
    "then in place without gradients": lambda a, b: tripled(a * b),
    "in place": lambda a, b: (a + 1).mul_(b),
    "scalar": lambda a, b: (a * 2.0) / 3 * b,
    "one divided by": lambda a, b: 1 / (a * b),
    "rounded": lambda a, b: torch.div(a * 9, b, rounding_mode="floor") * b,
    "chain": lambda a, b: functional.gelu(functional.silu(a * b) / (b * b)) * a,
    "expanded": lambda a, b: a[:1].expand(8, 8) * b.t(),
    "channels last": lambda a, b: (
        a.view(1, 2, 4, 8).contiguous(memory_format=torch.channels_last) * b.view(1, 2, 4, 8)
    ),
}


@torch.no_grad()
def tripled(x: Tensor) -> Tensor:
    return x.mul_(3)


@pytest.mark.parametrize("op", TWO_INPUTS.values(), ids=TWO_INPUTS.keys())
def test_products_and_quotients_have_plain_gradients(
    op: Callable[[Tensor, Tensor], Tensor],
) -> None:
    x, y = leaf(8, 8), leaf(8, 8)
    assert_plain_gradients(lambda: padded(op(x + 1, y * 2).sin() * 2), [x, y])


def test_a_product_with_a_constant_is_not_made_again() -> None:
    """The op saved the constant only, not its other input."""
    x, constant = leaf(64), torch.randn(64)
    run = lambda: padded((x + 1) * constant)  # noqa: E731
    assert [each.tensors_derived for each in traffic_of(run)] == [0] * STEPS


def test_nothing_is_made_again_with_derive_off() -> None:
    x = leaf(64)
    run = lambda: padded(functional.silu(x + 1))  # noqa: E731
    assert [each.tensors_derived for each in traffic_of(run, derive=False)] == [0] * STEPS


def test_what_is_made_again_is_neither_sent_nor_fetched() -> None:
    """silu's input is one activation; its result and the product are made again."""
    x = leaf(64)

    def run() -> Tensor:
        gate, up = x + 1, x + 2
        return padded(padded(functional.silu(gate) * up))

    found = traffic_of(run)
    assert [each.tensors_derived for each in found] == [2] * STEPS
    assert [each.bytes_derived for each in found] == [2 * 256] * STEPS
    # gate, up and the five that follow the product, of which the last two stay.
    assert [each.tensors_out for each in found] == [5] * STEPS


@pytest.mark.parametrize("device_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_made_again_under_autocast_has_plain_bits(device_dtype: torch.dtype) -> None:
    model, gate, x = nn.Linear(8, 8), nn.Linear(8, 8), leaf(4, 8)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=device_dtype):
            h = x
            for _ in range(3):
                h = model(functional.silu(gate(h)) * h / (h.abs() + 1))
            return h

    assert_plain_gradients(run, [x, *model.parameters(), *gate.parameters()])


def test_a_backward_under_autocast_makes_the_same_bits_again() -> None:
    x, w = leaf(8, 8), leaf(8, 8)

    def run() -> Tensor:
        return padded(functional.gelu(x @ w) * (x + 1))

    def backward(loss: Tensor) -> None:
        with torch.autocast("cpu"):
            loss.backward()

    for _ in range(STEPS):
        with spilling():
            out = run()
        backward(out.sum())
        found, x.grad = x.grad, None
        backward(run().sum())
        assert same_bits(found, x.grad)
        x.grad = w.grad = None


def test_a_product_whose_value_was_set_through_data_keeps_that_value() -> None:
    """`y.data = …` leaves version 0 and the node that made what was there before."""
    x, w = leaf(64), leaf(64)

    def run() -> Tensor:
        y = (x + 1) * (w + 1)
        y.data = y.data.clamp(-0.1, 0.1)
        return padded(y)

    assert_plain_gradients(run, [x, w])


def test_a_product_changed_through_data_keeps_the_change() -> None:
    """As old code clamps its activations: neither version nor node tell of it."""
    x, w = leaf(64), leaf(64)

    def run() -> Tensor:
        y = (x + 1) * (w + 1)
        y.data.clamp_(-0.1, 0.1)
        return padded(y)

    assert_plain_gradients(run, [x, w])


def test_an_activation_changed_through_data_is_plain_without_derive() -> None:
    x, w = leaf(64), leaf(64)

    def run() -> Tensor:
        y = (x + 1) * (w + 1)
        y.data.clamp_(-0.1, 0.1)
        return padded(y)

    assert_plain_gradients(run, [x, w], derive=False)


def test_a_product_is_there_for_another_loss_when_its_factor_has_changed() -> None:
    """Plain autograd saved the product itself; that a factor is new since does not matter."""
    x, w, v = leaf(64), leaf(64), leaf(64)
    expected = (x.detach() + 1) * w.detach()
    for context in (nullcontext(), *[spilling()] * STEPS):
        with context:
            y = (x + 1) * w
            loss = y.sin().sum()
            other = (v * y.detach()).sum()
            del y
        with torch.no_grad():
            w.mul_(1)  # an optimizer's step
        assert same_bits(torch.autograd.grad(other, v)[0], expected)
        del loss


@pytest.mark.parametrize("derive", [True, False])
def test_a_gradient_up_to_a_product_needs_its_factors_only_if_it_is_derived(derive: bool) -> None:
    """The product's own backward, which needs them, does not run. A limit that the guide names."""
    x, w = leaf(64), leaf(64)
    expected = ((x.detach() + 1) * w.detach()).cos()
    for _ in range(STEPS):
        with spilling(derive=derive):
            y = (x + 1) * w
            loss = y.sin().sum()
            edge = torch.autograd.graph.get_gradient_edge(y)
            del y
        with torch.no_grad():
            w.mul_(1)
        if derive:
            with pytest.raises(rekindle.RekindleError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, edge)
        else:
            assert same_bits(torch.autograd.grad(loss, edge)[0], expected)


@pytest.mark.parametrize("length", [300, 3000])
def test_a_long_chain_of_elementwise_ops_has_plain_gradients(length: int) -> None:
    """Each is made from the one before: as deep as the chain is long, if nothing bounds it."""
    x = leaf(8)

    def run() -> Tensor:
        h = x
        for _ in range(length):
            h = functional.silu(h)
        return h

    assert_plain_gradients(run, [x])


def test_a_gated_recurrence_has_plain_gradients() -> None:
    """`h = h * gate`, a few hundred times: what an RNN over a sequence does."""
    x, gates = leaf(8), leaf(400, 8)

    def run() -> Tensor:
        h = x
        for gate in gates:
            h = h * (gate + 1)
        return h

    assert_plain_gradients(run, [x, gates])


def test_what_was_made_again_is_let_go_when_backward_ends() -> None:
    x = leaf(64)
    with spilling():
        out = functional.silu(x.sin()).cos()
    out.sum().backward(retain_graph=True)
    saved = saved_by(out.grad_fn, "self")
    assert saved.activation.derivation is not None
    assert saved.activation.data is None


def test_what_was_fetched_is_let_go_when_backward_ends() -> None:
    x = leaf(64)
    with spilling(derive=False):
        out = (x + 1).cos()
        rest = padded(padded(out))
    rest.sum().backward(retain_graph=True)
    saved = saved_by(out.grad_fn, "self")
    assert saved.activation.copy is not None
    assert saved.activation.data is None


def test_a_chain_that_is_made_again_is_not_all_there_at_once() -> None:
    """To make the last, those before it are made; they need not stay until backward gets there."""
    x = leaf(64)
    activations = []
    with spilling():
        h = x.sin()
        for _ in range(8):
            h = functional.silu(h)
            activations.append(saved_by(h.grad_fn, "self").activation)
        out = h.cos()
        del h
    here = []
    out.grad_fn.register_hook(  # type: ignore[union-attr]
        lambda *_: here.append(
            sum(a.data is not None for a in activations if a.derivation is not None)
        )
    )
    out.sum().backward(retain_graph=True)
    assert here[0] <= 2  # how deep it goes is the offloader's choice, but not to the bottom


def test_a_step_of_nothing_but_derived_activations_is_learnt_as_well() -> None:
    a, b = leaf(64, 1), leaf(1, 64)
    (expected,) = torch.autograd.grad((a * b).sin().sum(), a)
    offload = rekindle.offload(tier="disk", min_bytes=1024)
    for _ in range(6):
        with offload:
            loss = (a * b).sin().sum()
        assert same_bits(torch.autograd.grad(loss, a)[0], expected)


def test_what_is_made_again_has_the_bits_of_its_forward_under_another_number_of_threads() -> None:
    x, w = leaf(70_000), leaf(70_000)
    threads = torch.get_num_threads()
    try:
        for _ in range(STEPS):
            torch.set_num_threads(1)
            expected = torch.autograd.grad((functional.silu(x.sin()) * w).sum(), w)
            with spilling():
                loss = (functional.silu(x.sin()) * w).sum()
            torch.set_num_threads(2)
            assert same_bits(torch.autograd.grad(loss, w)[0], expected[0])
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
