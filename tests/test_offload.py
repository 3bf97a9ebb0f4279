"""What `rekindle.offload` moves and what stays, through the disk tier: bits, counts, options."""

import copy
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import rekindle
from rekindle.internals import saved_by
from rekindle.offload.context import _engines, engine_of
from rekindle.offload.spill_file import SpillFile
from tests.toys import Stack, assert_same_step, same_bits

STEPS = 4
"""The engine learns in the first two steps; the others show what it learnt."""


@pytest.fixture(autouse=True)
def new_engines() -> None:
    _engines.clear()


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is away by the next line, so that backward needs it back and counts are exact.

    `monkeypatch.undo()` has it written in the background again.
    """
    write = SpillFile.write

    def write_now(self: SpillFile, *args: Any) -> Any:
        writing = write(self, *args)
        wait([writing])
        return writing

    monkeypatch.setattr(SpillFile, "write", write_now)


def spilling(**options: Any) -> rekindle.Offload:
    """Everything that may go goes, if options do not say otherwise."""
    return rekindle.offload(tier="disk", **({"quota": 1.0, "min_bytes": 1} | options))


def leaf(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, requires_grad=True, **options)


def traffic_of(
    run: Callable[[], Tensor], steps: int = STEPS, **options: Any
) -> list[rekindle.Traffic]:
    """What each step moved."""
    found = []
    for _ in range(steps):
        with rekindle.observe() as seen:
            with spilling(**options):
                loss = run().sum()
            loss.backward()
        found.append(seen.spill)
    return found


def moved(run: Callable[[], Tensor], **options: Any) -> list[tuple[int, int]]:
    """Tensors and bytes that each step sent, and got back."""
    found = traffic_of(run, **options)
    for each in found:
        assert (each.tensors_in, each.bytes_in) == (each.tensors_out, each.bytes_out)
    return [(each.tensors_out, each.bytes_out) for each in found]


def assert_plain_gradients(
    run: Callable[[], Any], leaves: Iterable[Tensor], steps: int = STEPS, **options: Any
) -> None:
    """Every step under offload gives the outputs and gradients of the plain run, bit for bit."""

    def offloaded() -> Any:
        with spilling(**options):
            return run()

    for seed in range(steps):
        assert_same_step(run, offloaded, list(leaves), seed=seed)


def padded(x: Tensor) -> Tensor:
    """Follows what is tested: what is saved last is not moved, and here that are these three."""
    return x.sin().sin().sin()


# Counts


def test_of_a_chain_all_but_the_last_two_are_moved_in_every_step() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = x
        for _ in range(10):
            h = h.sin()
        return h

    # The first sin saves the leaf, the others nine activations of 64 bytes.
    assert moved(run) == [(7, 7 * 64)] * STEPS


def test_a_settled_step_finds_every_activation_on_its_way() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = x
        for _ in range(10):
            h = h.sin()
        return h

    last = traffic_of(run)[-1]
    assert (last.prefetch_hits, last.prefetch_misses) == (7, 0)


def test_a_stack_of_blocks_has_plain_gradients() -> None:
    model, x = Stack(depth=4), leaf(4, 8)
    assert_plain_gradients(lambda: model(x), [x, *model.parameters()])


@pytest.mark.parametrize("quota", [0.0, 0.3, 1.0, 0, 200, "1KiB", "auto"])
@pytest.mark.parametrize("derive", [False, True])
def test_gradients_do_not_depend_on_quota(quota: Any, derive: bool) -> None:
    model, x = Stack(depth=4, drop=0.3), leaf(4, 8)
    assert_plain_gradients(lambda: model(x), [x, *model.parameters()], quota=quota, derive=derive)


def test_gradients_are_plain_when_copies_run_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    model, x = Stack(depth=6, dim=64, drop=0.3), leaf(64, 64)
    assert_plain_gradients(lambda: model(x), [x, *model.parameters()], steps=8)


def chain(x: Tensor, length: int = 11) -> Tensor:
    for _ in range(length):
        x = x.sin()
    return x


@pytest.mark.parametrize(
    ("quota", "tensors"),
    [
        (0.0, 0),
        (0.5, 5),
        (1.0, 8),
        (0, 0),
        (63, 0),
        (64, 1),
        (200, 3),
        ("200B", 3),
        ("50%", 5),
        (10**6, 8),
    ],
)
def test_a_known_step_moves_what_the_quota_allows(quota: Any, tensors: int) -> None:
    """Ten activations of 64 bytes; the last two are never moved."""
    x = leaf(16)
    assert moved(lambda: chain(x), quota=quota)[1:] == [(tensors, tensors * 64)] * (STEPS - 1)


def test_the_first_step_moves_no_more_than_the_quota_in_bytes() -> None:
    x = leaf(16)
    assert moved(lambda: chain(x), quota=200)[0] == (3, 3 * 64)


def test_one_byte_and_everything_are_two_quotas() -> None:
    """1 == 1.0 in Python, also as a key: their engines must not be one."""
    one, everything = spilling(quota=1), spilling(quota=1.0)
    assert engine_of(one.options) is not engine_of(everything.options)


def test_a_quota_of_everything_moves_everything_after_a_quota_of_one_byte() -> None:
    x = leaf(16)
    assert moved(lambda: chain(x), quota=1) == [(0, 0)] * STEPS
    assert moved(lambda: chain(x), quota=1.0) == [(8, 8 * 64)] * STEPS


# What stays


def test_small_activations_stay() -> None:
    x, y = leaf(16), leaf(17)
    run = lambda: chain(x).sum() + chain(y).sum()  # noqa: E731
    assert moved(run, min_bytes=68) == [(8, 8 * 68)] * STEPS
    assert moved(run, min_bytes=69) == [(0, 0)] * STEPS


def test_a_leaf_that_requires_a_gradient_stays() -> None:
    x = leaf(16)
    assert moved(lambda: padded(x) + x.sin()) == [(0, 0)] * STEPS


def test_a_view_of_a_leaf_that_requires_a_gradient_stays() -> None:
    x = leaf(4, 1000)
    assert moved(lambda: padded(x.t()[0]) + x.view(-1)[:4].cos()) == [(0, 0)] * STEPS


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w.t(),
        lambda w: w.view(-1)[:4096].view(64, 64),
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: w.detach().t(),
    ],
    ids=["itself", "t", "view", "detach", "data", "detached view"],
)
def test_a_parameter_in_any_form_stays(view: Callable[[Tensor], Tensor], is_trained: bool) -> None:
    x, w = leaf(1, 64), nn.Parameter(torch.randn(64, 64), requires_grad=is_trained)
    sent = moved(lambda: padded(padded(x @ view(w))))
    assert all(nbytes < w.nbytes for _, nbytes in sent), sent


def test_a_view_of_a_parameter_made_without_gradients_stays() -> None:
    x, w = leaf(1, 64), nn.Parameter(torch.randn(64, 64))
    with torch.no_grad():
        view = w.t()
    assert all(nbytes < w.nbytes for _, nbytes in moved(lambda: padded(padded(x @ view))))


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[:4], lambda t: t.detach()[1:5]])
def test_a_buffer_and_its_views_stay(view: Callable[[Tensor], Tensor]) -> None:
    x, table = leaf(64), torch.randn(8, 64)

    def run() -> Tensor:
        h = x * view(table)[:4]
        for _ in range(12):
            h = h.sin()
        return h

    # Of twelve activations the last two stay.
    assert moved(run)[1:] == [(10, 10 * 1024)] * (STEPS - 1)


def test_a_batch_that_the_caller_holds_stays() -> None:
    """Without it there are six activations, and the last two stay."""
    x, w = torch.randn(64), leaf(64)
    assert moved(lambda: padded(padded(x * w)), derive=False) == [(4, 4 * 256)] * STEPS


def test_a_batch_that_nobody_holds_is_moved() -> None:
    w = leaf(64)
    assert moved(lambda: padded(padded(torch.ones(64) * w)))[-1] == (5, 5 * 256)


def test_a_constant_shared_by_layers_is_moved_once() -> None:
    """As rotary embeddings: made in the forward, used by each layer, dead after it."""
    x = leaf(64)

    def run() -> Tensor:
        cos = torch.arange(64.0).cos()
        h = x
        for _ in range(6):
            h = h * cos
        return padded(h)

    # The constant, and three that padded saves, of which the last two stay.
    assert moved(run) == [(2, 2 * 256)] * STEPS


def test_a_constant_kept_between_steps_stays() -> None:
    x, cos = leaf(64), torch.arange(64.0).cos()

    def run() -> Tensor:
        h = x
        for _ in range(6):
            h = h * cos
        return padded(padded(h))

    assert moved(run) == [(4, 4 * 256)] * STEPS


def test_a_dropout_mask_is_moved() -> None:
    x = leaf(64)

    def run() -> Tensor:
        return padded(functional.dropout(x, 0.5))

    assert moved(run)[-1][0] == 2
    assert_plain_gradients(run, [x])


def test_an_activation_that_the_caller_holds_is_moved_in_the_first_step_only() -> None:
    """Backward finds that it never died. Of seven activations the last two stay anyway."""
    x = leaf(64)
    held: list[Tensor] = []

    def run() -> Tensor:
        held[:] = [x.sin()]
        return padded(padded(held[0].sin()))

    assert [each.tensors_out for each in traffic_of(run)] == [5, 4, 4, 4]


# One storage, its views


def test_a_storage_is_moved_once_however_many_views_of_it_are_saved() -> None:
    x = leaf(8, 8)

    def run() -> Tensor:
        h = x.exp() + 1
        parts = h.sin() + h.t().cos() + h[2:3].exp().sum() + h.view(-1)[::2].sin().sum()
        return padded(parts)

    # exp saves its result, +1's result has four saved views, h[2:3].exp() saves its own of 32
    # bytes, and padded saves three, of which the last two stay.
    assert moved(run, derive=False) == [(4, 3 * 256 + 32)] * STEPS


class Looks(torch.autograd.Function):
    """Saves tensors, and shows what backward gets for them to `seen`."""

    @staticmethod
    def forward(ctx: Any, seen: list[tuple[Tensor, ...]], *tensors: Tensor) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(*tensors)
        return tensors[0].sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.seen.append(ctx.saved_tensors)
        return (None, *(torch.zeros_like(t) for t in ctx.saved_tensors))


def looked_at(make: Callable[[], tuple[Tensor, ...]], **options: Any) -> list[tuple[Tensor, ...]]:
    """What backward gets in each step for the saved tensors that `make` makes."""
    seen: list[tuple[Tensor, ...]] = []
    for _ in range(STEPS):
        with rekindle.observe() as counted, spilling(**options):
            out = Looks.apply(seen, *make())
            loss = out + padded(padded(leaf(4000) * 2.0)).sum()
        assert counted.spill.tensors_out
        loss.backward()
    return seen


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda h: h,
    "transposed": lambda h: h.t(),
    "row": lambda h: h[3],
    "strided": lambda h: h[1::2, 2:5],
    "expanded": lambda h: h[:, :1].expand(-1, 7),
    "unfolded": lambda h: h.view(-1).unfold(0, 4, 2),
    "empty": lambda h: h[2:2],
    "scalar": lambda h: h[1, 2],
    "as_strided": lambda h: h.as_strided((3, 3), (1, 1), 5),
    "other dtype": lambda h: h.detach().view(torch.int16),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_saved_view_comes_back_with_its_strides_offset_and_bits(
    view: Callable[[Tensor], Tensor],
) -> None:
    x = leaf(8, 8)
    expected = view(x.detach() + 1)
    for (found,) in looked_at(lambda: (view(x + 1),)):
        assert same_bits(found, expected)
        assert (found.stride(), found.storage_offset()) == (
            expected.stride(),
            expected.storage_offset(),
        )


@pytest.mark.parametrize("derive", [False, True])
def test_two_saved_views_of_a_storage_share_it_again(derive: bool) -> None:
    x, w = leaf(8, 8), leaf(8, 8)

    def make() -> tuple[Tensor, ...]:
        h = (x + 1) * (w + 1)
        return h, h.t(), h[2]

    for found in looked_at(make, derive=derive):
        assert len({t.untyped_storage().data_ptr() for t in found}) == 1


def test_an_activation_that_has_come_back_is_not_let_go_when_a_slower_copy_is_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two copies leave; the second is done, used and wanted again while the first is written."""
    monkeypatch.undo()
    may_go, write = threading.Event(), SpillFile._write

    def slow_first(self: SpillFile, data: Tensor, *args: Any) -> None:
        if data.numel() == 4096:
            may_go.wait(10)
        write(self, data, *args)

    monkeypatch.setattr(SpillFile, "_write", slow_first)
    x, y = leaf(1024), leaf(16)
    with rekindle.observe() as seen:
        with spilling(quota=4096 + 64):
            first = (x + 1).sin()
            second = y + 1
            outs = second.sin(), second.cos()
            del second
            rest = padded(padded(leaf(1024) + 1))
        lane = _lane()
        slow, quick = [departure.copy._writing for departure in lane._leaving._queue]
        wait([quick])
        one = saved_by(outs[1].grad_fn, "self").get()
        may_go.set()
        wait([slow])
        other = saved_by(outs[1].grad_fn, "self").get()
    assert one.data_ptr() == other.data_ptr()
    assert seen.spill.bytes_in == 64
    del first, rest


def _lane() -> Any:
    (engine,) = _engines.values()
    (lane,) = engine._lanes.values()
    return lane


# Kinds of tensors


def spread(x: Tensor) -> Tensor:
    """Some ops in the dtype of x; the result is real."""
    h = ((x * 2).sin() * (x * 3).cos()).exp() / (x + 2)
    h = h * h.t() + h[:1]
    return h.abs()


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64],
    ids=str,
)
def test_floating_dtypes_have_plain_gradients(dtype: torch.dtype) -> None:
    x = leaf(8, 8, dtype=dtype)
    assert_plain_gradients(lambda: spread(spread(x)), [x])


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool, torch.int16],
    ids=str,
)
def test_a_saved_tensor_of_a_narrow_dtype_comes_back(dtype: torch.dtype) -> None:
    expected = (torch.arange(64.0) * 3).to(dtype)

    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward((torch.arange(64.0) * 3).to(dtype))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (found,) = ctx.saved_tensors
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
            return grad * 2

    x = leaf(64)
    assert moved(lambda: padded(padded(Narrow.apply(x))))[-1][0] == 5


def test_conjugated_and_negated_views_have_plain_gradients() -> None:
    x = leaf(8, dtype=torch.complex64)

    def run() -> Tensor:
        h = x * (1 + 2j)
        h = h.conj() * h + (h * 2).conj().sin()
        h = h * torch.view_as_complex(torch.view_as_real(h).flip(-1)).conj()
        return (h.conj().imag * h.imag).sin() + h.conj().abs()

    assert_plain_gradients(run, [x])


def test_sparse_tensors_have_plain_gradients() -> None:
    x, w = torch.randn(6, 6).relu().to_sparse(), leaf(6, 6)

    def run() -> Tensor:
        return padded(torch.sparse.mm(x * 2.0, (w * 2).sin()))

    assert_plain_gradients(run, [w])


def test_compressed_sparse_tensors_have_plain_gradients() -> None:
    x, w = torch.randn(6, 6).relu().to_sparse_coo().coalesce(), leaf(6, 6)

    def run() -> Tensor:
        return padded(torch.sparse.mm(x, w.exp()).sin())

    assert_plain_gradients(run, [w])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_plain_gradients() -> None:
    x = leaf(6, 4)

    def run() -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:2] * 2, x[2:] * 3])
        return torch.nested.to_padded_tensor(nested.sin().sin(), 0.0)

    assert_plain_gradients(run, [x])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors_have_plain_gradients() -> None:
    x = leaf(6, 4)
    offsets = torch.tensor([0, 2, 6])

    def run() -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x * 2, offsets).sin().cos().values()

    assert_plain_gradients(run, [x])


def test_a_tensor_subclass_comes_back_as_itself() -> None:
    x = leaf(64)
    made = looked_at(lambda: (TwoTensor(x + 1, x + 2),))
    assert [type(found) for (found,) in made] == [TwoTensor] * STEPS


def test_a_tensor_subclass_is_not_moved() -> None:
    x = leaf(64)
    with rekindle.observe() as seen:
        for _ in range(STEPS):
            with spilling():
                loss = chain(TwoTensor(x + 1, x + 2)).sum()
            loss.backward()
    assert seen.spill.tensors_out == 0


def test_a_zero_size_tensor_stays() -> None:
    x = leaf(0, 4)
    assert moved(lambda: chain(x)) == [(0, 0)] * STEPS


def test_an_inference_tensor_raises_as_it_does_plain() -> None:
    with torch.inference_mode():
        x = torch.randn(64)
    w = leaf(64)
    for context in (nullcontext(), spilling()):
        with context, pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            w * x


def test_embeddings_and_integer_indices_have_plain_gradients() -> None:
    table, index = leaf(10, 8), torch.randint(10, (6, 7))

    def run() -> Tensor:
        h = functional.embedding(index + 0, table).sin()
        return padded(h.gather(1, (index % 7).unsqueeze(-1).expand(-1, -1, 8) * 1))

    assert_plain_gradients(run, [table])


def test_ops_with_several_saved_results_have_plain_gradients() -> None:
    x = leaf(4, 3, 8, 8)
    conv, norm, lstm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(9, 5, num_layers=2)

    def run() -> Tensor:
        h = functional.max_pool2d(norm(conv(x)).relu(), 2)
        h, _ = lstm(h.flatten(2))
        return functional.scaled_dot_product_attention(h, h.sin(), h.cos()).softmax(-1).sort()[0]

    leaves = [x, *conv.parameters(), *norm.parameters(), *lstm.parameters()]
    assert_plain_gradients(run, leaves)


def test_a_tensor_without_a_device_of_ours_stays() -> None:
    x = torch.randn(64, device="meta", requires_grad=True)
    assert moved(lambda: chain(x)) == [(0, 0)] * STEPS


def test_the_host_tier_leaves_host_memory_alone() -> None:
    x = leaf(64)
    with rekindle.observe() as seen:
        with rekindle.offload(min_bytes=1):
            loss = chain(x).sum()
        loss.backward()
    assert (seen.offload.tensors_out, seen.spill.tensors_out) == (0, 0)


# Made again


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
    assert saved.activation.made_from is not None
    assert saved.activation.here is None


def test_what_was_fetched_is_let_go_when_backward_ends() -> None:
    x = leaf(64)
    with spilling(derive=False):
        out = (x + 1).cos()
        rest = padded(padded(out))
    rest.sum().backward(retain_graph=True)
    saved = saved_by(out.grad_fn, "self")
    assert saved.activation.copy is not None
    assert saved.activation.here is None


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
            sum(a.here is not None for a in activations if a.made_from is not None)
        )
    )
    out.sum().backward(retain_graph=True)
    assert here[0] <= 2  # how deep it goes is the engine's choice, but not to the bottom


# Arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tier": "tape"}, ValueError, 'tier should be "host" or "disk"'),
        ({"quota": 1.5}, ValueError, "from 0.0 to 1.0, but got 1.5"),
        ({"quota": -0.5}, ValueError, "from 0.0 to 1.0"),
        ({"quota": float("nan")}, ValueError, "from 0.0 to 1.0"),
        ({"quota": -1}, ValueError, "quota should not be negative"),
        ({"quota": "much"}, ValueError, 'quota should be "auto", like'),
        ({"quota": "150%"}, ValueError, "from 0.0 to 1.0"),
        ({"quota": "half%"}, ValueError, "quota as a share should be like"),
        ({"quota": True}, TypeError, "quota should be a whole number of bytes"),
        ({"quota": None}, TypeError, "quota should be a whole number of bytes"),
        ({"min_bytes": 1.0}, TypeError, "min_bytes should be a whole number"),
        ({"min_bytes": -1}, ValueError, "min_bytes should not be negative"),
        ({"min_bytes": "x"}, ValueError, "min_bytes should be like"),
        ({"max_host_bytes": -1}, ValueError, "max_host_bytes should not be negative"),
        ({"max_host_bytes": "1 parsec"}, ValueError, "max_host_bytes should be like"),
        ({"on_full": "cry"}, ValueError, 'on_full should be "keep" or "raise"'),
        ({"directory": "/no/such/folder"}, ValueError, "an existing folder"),
        ({"tier": "host", "directory": "/tmp"}, ValueError, 'directory is for tier="disk"'),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rekindle.offload(**({"tier": "disk"} | options))


def test_derive_takes_nothing_but_a_bool() -> None:
    """Any text is true: derive="no" would do the contrary of what it says."""
    with pytest.raises(TypeError, match="derive"):
        spilling(derive="no")


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        rekindle.offload("disk")  # type: ignore[misc]


def test_it_prints_as_it_was_made() -> None:
    assert repr(spilling(min_bytes="1KiB")).startswith(
        "rekindle.offload(tier='disk', quota=1.0, min_bytes=1024"
    )


# Decorator


def test_a_decorated_function_is_offloaded() -> None:
    x = leaf(16)
    decorated = spilling()(chain)
    with rekindle.observe() as seen:
        decorated(x).sum().backward()
    assert (seen.spill.tensors_out, seen.spill.tensors_in) == (8, 8)


def test_a_decorated_function_keeps_its_name_and_takes_its_arguments() -> None:
    decorated = spilling()(chain)
    assert decorated.__name__ == "chain"
    x = leaf(16)
    assert same_bits(decorated(x, length=3), chain(x, length=3))


def test_a_decorated_method_has_plain_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(depth=4)

        def plain(self, x: Tensor) -> Tensor:
            return self.stack(x)

        forward = spilling()(plain)

    model, x = Model(), leaf(4, 8)
    for _ in range(STEPS):
        assert_same_step(lambda: model.plain(x), lambda: model(x), [x, *model.parameters()])


def test_a_decorated_function_may_call_itself() -> None:
    @spilling()
    def deep(x: Tensor, depth: int) -> Tensor:
        return deep(x.sin(), depth - 1) if depth else x.cos()

    x = leaf(16)
    expected = chain(x, 6).cos()
    for _ in range(STEPS):
        assert_same_step(lambda: chain(x, 6).cos(), lambda: deep(x, 6), [x])
    assert same_bits(expected, deep(x, 6))


async def coroutine() -> None: ...


def generator() -> Iterable[int]:
    yield 1


async def async_generator() -> Any:
    yield 1


@pytest.mark.parametrize("function", [coroutine, generator, async_generator])
def test_a_function_that_does_not_run_when_called_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="does not run when it is called"):
        spilling()(function)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="decorates a function, not int"):
        spilling()(3)  # type: ignore[type-var]


def test_a_model_that_holds_its_offload_can_be_copied() -> None:
    model = nn.Linear(2, 2)
    model.offload = spilling()  # type: ignore[assignment]
    assert copy.deepcopy(model).offload.options == spilling().options  # type: ignore[union-attr]


def test_trim_gives_the_disk_back() -> None:
    x, offload = leaf(16), spilling()
    with offload:
        loss = chain(x).sum()
    loss.backward()
    offload.trim()
    assert _lane().tier.pool_bytes == 0
    assert moved(lambda: chain(x)) == [(8, 8 * 64)] * STEPS


def test_nothing_is_moved_after_the_with() -> None:
    x = leaf(16)
    with rekindle.observe() as seen:
        with spilling():
            h = x.sin()
        chain(h).sum().backward()
    assert seen.spill.tensors_out == 0


def test_a_module_is_no_function_to_decorate() -> None:
    with pytest.raises(TypeError, match="not Linear"):
        rekindle.offload()(torch.nn.Linear(2, 2))


def test_the_repr_is_the_call() -> None:
    assert repr(rekindle.offload(quota=0.5)) == (
        "rekindle.offload(tier='host', quota=0.5, min_bytes=1048576, max_host_bytes=None, "
        "directory=None, on_full='keep', derive=True)"
    )
    assert "quota='auto'" in repr(rekindle.offload())


def test_what_comes_back_is_seen_by_who_observes_only_the_backward() -> None:
    x = leaf(64)
    with spilling():
        loss = padded(padded(x)).sum()
    with rekindle.observe() as seen:
        loss.backward()
    assert seen.spill.tensors_in > 0
    assert str(seen).startswith("fate")


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
