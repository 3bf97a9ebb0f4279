"""What `rekindle.offload` moves and what stays, through the disk tier, to the byte."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle.offload.owners import shared_offloader
from rekindle.offload.residency import AWAY
from rekindle.offload.tiers.spill_file import SpillFile
from rekindle.torch_private.autograd_graph import saved_by
from tests.offloading import (
    STEPS,
    assert_plain_gradients,
    chain,
    leaf,
    looked_at,
    moved,
    only_offloader,
    padded,
    spilling,
    traffic_of,
)
from tests.toys import Stack, same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


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
    """1 == 1.0 in Python, also as a key: their offloaders must not be one."""
    one, everything = spilling(quota=1), spilling(quota=1.0)
    assert shared_offloader(one.strategy) is not shared_offloader(everything.strategy)


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
            assert may_go.wait(120)
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
        offloader = only_offloader()
        slow, quick = [each.copy._writing for each in offloader._copy_outs.queue._queue]
        quick.wait()
        saved = saved_by(outs[1].grad_fn, "self")
        activation = saved.activation  # which the thread lets go of some time after it was written
        while activation.residency is not AWAY or activation.storage_held_elsewhere() is not None:
            time.sleep(0.001)
        one = saved.get()
        may_go.set()
        slow.wait()
        other = saved.get()
    assert one.data_ptr() == other.data_ptr()
    assert seen.spill.bytes_in == 64
    del first, rest


def test_what_comes_back_is_seen_by_who_observes_only_the_backward() -> None:
    x = leaf(64)
    with spilling():
        loss = padded(padded(x)).sum()
    with rekindle.observe() as seen:
        loss.backward()
    assert seen.spill.tensors_in > 0
    assert str(seen).startswith("strategy")
