"""Logits by rows: the same numbers as without, in less memory."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from rekindle.planner.instruments.memory_meter import LiveBytes
from rekindle.rows import expressions
from rekindle.rows.by_rows import by_rows
from rekindle.rows.chunks import chunks
from rekindle.rows.row_tensor import RowTensor
from tests.rows.losses import ALL_AT_ONCE, BY_ROWS, EVERY, Loss, labels_shifted, with_z_loss

BATCH, LENGTH, WIDTH, CLASSES = 3, 50, 16, 1003


class Run:
    """One forward and backward of a head and its loss."""

    def __init__(self, loss: Loss, dtype: torch.dtype, goes_by_rows: bool) -> None:
        torch.manual_seed(1)
        hidden = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
        weight = torch.randn(CLASSES, WIDTH, dtype=dtype, requires_grad=True)
        labels = torch.randint(0, CLASSES, (BATCH, LENGTH))
        labels[:, :7] = -100
        self.came_by_rows: list[bool] = []
        logits = F.linear(hidden, weight)
        if goes_by_rows:
            logits = by_rows(logits, lambda saved: self.came_by_rows.append(saved > 0))
            assert isinstance(logits, RowTensor)
        self.loss = loss(logits, labels)
        self.loss.backward()
        self.gradients = hidden.grad, weight.grad

    def is_same_as(self, other: "Run") -> bool:
        pairs = zip((self.loss, *self.gradients), (other.loss, *other.gradients), strict=True)
        return all(one is not None and torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", EVERY, ids=lambda loss: loss.__name__)
def test_loss_and_gradients_are_bit_for_bit_those_of_whole_logits(
    loss: Loss, dtype: torch.dtype
) -> None:
    assert Run(loss, dtype, True).is_same_as(Run(loss, dtype, False))


@pytest.mark.parametrize("loss", BY_ROWS, ids=lambda loss: loss.__name__)
def test_the_gradient_comes_by_rows(loss: Loss) -> None:
    assert Run(loss, torch.float32, True).came_by_rows == [True]


@pytest.mark.parametrize("loss", ALL_AT_ONCE, ids=lambda loss: loss.__name__)
def test_logits_are_simply_there_for_ops_that_need_all(loss: Loss) -> None:
    assert Run(loss, torch.float32, True).came_by_rows == [False]


def test_chunks_cover_all_rows_once() -> None:
    for count in (1, 31, 32, 33, 150):
        parts = list(chunks(count, CLASSES))
        assert [row for part in parts for row in range(*part)] == list(range(count))


def test_chunks_begin_at_multiples_of_sixteen_and_none_has_one_row() -> None:
    for count in (2, 17, 33, 49, 1000):
        parts = list(chunks(count, 2**14 + 1))
        assert all(start % 16 == 0 for start, _ in parts)
        assert all(stop - start > 1 for start, stop in parts)


def test_rows_of_a_shifted_slice_are_read_with_the_alignment_that_they_have_among_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an odd number of classes, rows have other alignments one after the other."""
    read: list[tuple[int, int]] = []
    compute = expressions.RowCall.compute

    def noted(self: Any, start: int, stop: int, memo: Any) -> Tensor:
        function = self._function

        def call(rows: Tensor, *others: Any) -> Tensor:
            if function is torch.ops.aten._log_softmax.default:
                read.append(((rows.data_ptr() - start * rows.shape[1] * 4) % 16, start % 4))
            found: Tensor = function(rows, *others)
            return found

        self._function = call if self._sums else function
        try:
            return compute(self, start, stop, memo)
        finally:
            self._function = function

    monkeypatch.setattr(expressions.RowCall, "compute", noted)
    logits = torch.randn(4, 40, 2001, dtype=torch.bfloat16, requires_grad=True)
    out = F.log_softmax(by_rows(logits * 1).float(), -1)[:, 1:]
    F.nll_loss(out.flatten(0, 1), torch.zeros(4 * 39, dtype=torch.long)).backward()
    assert {offset for offset, _ in read} == {0}
    assert {rest for _, rest in read} > {0}  # some of them begin elsewhere


def _peaks(loss: Loss, goes_by_rows: bool, holds_logits: bool) -> tuple[float, float, float]:
    """Peaks of the forward and the step, and what is left, in sizes of bfloat16 logits."""
    hidden = torch.randn(4, 256, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4000, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 4000, (4, 256))
    held: list[Tensor] = []
    unit = 4 * 256 * 4000 * 2
    with LiveBytes() as meter:
        logits = F.linear(hidden, weight)
        if goes_by_rows:
            logits = by_rows(logits)
        if holds_logits:
            held.append(logits)
        out = loss(logits, labels)
        del logits
        of_forward = meter.peak()
        out.backward()
    return of_forward / unit, meter.peak() / unit, meter.now() / unit


def test_a_step_peaks_at_little_more_than_its_logits() -> None:
    plain, rows = _peaks(labels_shifted, False, False), _peaks(labels_shifted, True, False)
    assert 5.9 < plain[1] < 6.1
    assert 1.0 < rows[0] < 1.2
    assert 1.0 < rows[1] < 1.35


def test_logits_that_somebody_holds_are_not_written_over() -> None:
    assert 2.0 < _peaks(labels_shifted, True, True)[1] < 2.35


def test_nothing_is_left_after_backward() -> None:
    assert _peaks(labels_shifted, True, False)[2] == _peaks(labels_shifted, False, False)[2]
    assert _peaks(with_z_loss, True, False)[2] == _peaks(with_z_loss, False, False)[2]


def _logits(goes_by_rows: bool = True) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    source = torch.randn(4, 6, 11, requires_grad=True)
    return source, by_rows(source * 1) if goes_by_rows else source * 1


def test_logits_are_as_before_after_a_backward_while_somebody_holds_them() -> None:
    source, logits = _logits()
    F.cross_entropy(logits.view(-1, 11), torch.arange(24) % 11).backward()
    assert torch.equal(logits, source)


def test_a_second_backward_through_a_retained_graph_gives_the_same_gradient() -> None:
    source, logits = _logits()
    loss = F.cross_entropy(logits.view(-1, 11), torch.arange(24) % 11)
    del logits
    loss.backward(retain_graph=True)
    first = source.grad
    source.grad = None
    loss.backward()
    assert first is not None
    assert source.grad is not None
    assert torch.equal(source.grad, first)


def test_a_tensor_that_shares_memory_with_logits_is_not_written_to() -> None:
    source = torch.randn(4, 6, 11, requires_grad=True)
    whole = source * 1
    loss = F.cross_entropy(by_rows(whole).view(-1, 11), torch.arange(24) % 11)
    loss.backward()
    assert torch.equal(whole, source)


def test_a_gradient_that_is_retained_stays_right() -> None:
    gradients = []
    for goes_by_rows in (True, False):
        source, logits = _logits(goes_by_rows)
        wide = logits.double()
        del logits
        wide.retain_grad()
        F.cross_entropy(wide.view(-1, 11), torch.arange(24) % 11).backward()
        assert wide.grad is not None
        gradients.append((wide.grad.clone(), source.grad))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_a_hook_on_logits_sees_their_gradient() -> None:
    seen: list[Tensor] = []
    for goes_by_rows in (True, False):
        _, logits = _logits(goes_by_rows)
        logits.register_hook(lambda grad: seen.append(grad.clone()))
        F.cross_entropy(logits.view(-1, 11), torch.arange(24) % 11).backward()
    assert torch.equal(seen[0], seen[1])


def test_a_second_derivative_is_that_of_whole_logits() -> None:
    found = []
    for goes_by_rows in (True, False):
        source, logits = _logits(goes_by_rows)
        loss = F.cross_entropy(logits.view(-1, 11), torch.arange(24) % 11)
        (grad,) = torch.autograd.grad(loss, source, create_graph=True)
        found.append(torch.autograd.grad(grad.pow(2).sum(), source)[0])
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.detach().numpy().tolist(),
        lambda x: x.detach().tolist(),
        lambda x: x.tolist(),
        lambda x: x.argmax(-1).tolist(),
        lambda x: x.topk(3).indices.tolist(),
        lambda x: x[0, 1].detach().tolist(),
        lambda x: x[:, -1].detach().numpy().tolist(),
        lambda x: [row.tolist() for row in x],
        lambda x: x.sum().item(),
        lambda x: copy.deepcopy(x.detach()).tolist(),
        lambda x: pickle.loads(pickle.dumps(x.detach())).tolist(),
        lambda x: (x.shape, x.dtype, x.stride(), x.device, x.requires_grad, x.is_contiguous()),
    ],
)
def test_logits_look_as_ever(look: Any) -> None:
    _, by_row = _logits()
    _, plain = _logits(False)
    assert look(by_row) == look(plain)


@pytest.mark.parametrize(
    "logits",
    [
        torch.randn(4, 5),
        torch.randn(1, 5, requires_grad=True) * 1,
        torch.randn(5, requires_grad=True) * 1,
        (torch.randn(5, 4, requires_grad=True) * 1).t(),
        torch.empty(0, 5, requires_grad=True) * 1,
    ],
    ids=["no gradient", "one row", "one dimension", "not contiguous", "no rows"],
)
def test_other_tensors_stay_as_they_are(logits: Tensor) -> None:
    assert by_rows(logits) is logits


def test_without_gradients_logits_are_plain() -> None:
    with torch.no_grad():
        assert type(by_rows(torch.randn(4, 5))) is Tensor


def test_a_wrong_label_is_an_error_as_ever() -> None:
    _, logits = _logits()
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(logits.view(-1, 11), torch.full((24,), 11))
