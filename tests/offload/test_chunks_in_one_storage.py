"""Chunks that lie in one storage and have version counters of their own, under offload and plans.

`unsafe_chunk` and `unsafe_split` make such chunks, and so do the cells of recurrent modules. See
Note [Who shares a version counter] and Note [What a copy stands for].
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import rekindle
from rekindle import policies
from rekindle.offload.tiers.disk import DiskTier
from rekindle.offload.tiers.spill_file import SpillFile
from rekindle.strategy import SavedIndices
from rekindle.torch_private.autograd_graph import saved_by
from rekindle.torch_private.version_counters import VersionMark
from tests.offloading import (
    STEPS,
    assert_plain_gradients,
    chain,
    leaf,
    only_offloader,
    padded,
    spilling,
)
from tests.toys import assert_same_step, gradients, same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


class Gates(nn.Module):
    """A recurrent cell's arithmetic: the chunks of one product, each changed in place."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.linear(x).unsafe_chunk(3, 1)
        return a.sigmoid_() * x + b.tanh_() * c.sigmoid_()


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "RNNCell": lambda: nn.RNNCell(8, 8),
    "GRUCell": lambda: nn.GRUCell(8, 8),
    "LSTMCell": lambda: nn.LSTMCell(8, 8),
    "RNN": lambda: nn.RNN(8, 8, num_layers=2),
    "RNN with relu, both ways": lambda: nn.RNN(8, 8, nonlinearity="relu", bidirectional=True),
    "GRU": lambda: nn.GRU(8, 8, num_layers=2),
    "GRU, both ways": lambda: nn.GRU(8, 8, bidirectional=True),
    "LSTM": lambda: nn.LSTM(8, 8, num_layers=2),
    "LSTM with dropout": lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.3),
    "LSTM(proj_size=4)": lambda: nn.LSTM(8, 8, proj_size=4),
}


def unrolled(module: nn.Module, xs: Tensor) -> Tensor:
    """A module over a sequence; a cell is called for each item of it."""
    if not isinstance(module, nn.RNNCellBase):
        return padded(module(xs)[0])
    state: Any = None
    for x in xs:
        state = module(x, state)
    return padded(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("quota", [1.0, 0.5, 4096, "auto"])
@pytest.mark.parametrize("derive", [True, False])
def test_chunks_changed_in_place_have_plain_gradients_in_every_step(
    quota: Any, derive: bool
) -> None:
    model, x = nn.Sequential(*[Gates() for _ in range(8)]), leaf(16, 8)
    assert_plain_gradients(
        lambda: model(x), [x, *model.parameters()], steps=6, quota=quota, derive=derive
    )


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT.keys())
def test_a_recurrent_module_has_plain_gradients_in_every_step(make: Callable[[], Any]) -> None:
    module, xs = make(), leaf(5, 3, 8)
    assert_plain_gradients(
        lambda: unrolled(module, xs), [xs, *module.parameters()], steps=6, derive=False
    )


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each activation that was sent, in order."""
    found: list[int] = []
    send = DiskTier.begin_copy_out

    def noted(self: DiskTier, data: Tensor, *args: Any) -> Any:
        found.append(data.numel())
        return send(self, data, *args)

    monkeypatch.setattr(DiskTier, "begin_copy_out", noted)
    return found


ROWS, DIM = 16, 8
STORAGE = ROWS * 3 * DIM * 4
"""The bytes of the storage that three chunks share; nothing else in these programs is as large."""


def times_sent(
    run: Callable[[], Any], leaves: list[Tensor], sends: list[int], steps: int = STEPS
) -> list[int]:
    """How often each step sent the storage of the chunks; its gradients are those of the plain run.

    Something smaller follows: what is saved last is not moved.
    """

    def rest() -> Tensor:
        return padded(padded(padded(leaves[0] + 1.0)))

    def plain() -> Any:
        return run(), rest()

    def offloaded() -> Any:
        with spilling(derive=False):
            return plain()

    found = []
    for seed in range(steps):
        sends.clear()
        assert_same_step(plain, offloaded, leaves, seed=seed)
        found.append(sends.count(STORAGE))
    return found


def test_chunks_that_share_storage_and_not_a_version_counter_move_as_one_storage(
    sends: list[int],
) -> None:
    """Each chunk is changed and saved; the storage goes once, after the last of them."""
    cell, x = Gates(DIM), leaf(ROWS, DIM)
    assert times_sent(lambda: cell(x), [x, *cell.parameters()], sends) == [1] * STEPS


def test_views_of_one_base_move_as_one_storage(sends: list[int]) -> None:
    x = leaf(ROWS, DIM)

    def run() -> Any:
        a, b, c = x.repeat(1, 3).mul_(2.0).chunk(3, 1)
        return a.exp() * b, b * c, a.sin(), c.cos()

    assert times_sent(run, [x], sends) == [1] * STEPS


def test_a_chunk_changed_after_its_storage_has_left_has_it_sent_again_and_later_once(
    sends: list[int],
) -> None:
    """In the first step the storage goes with the first chunk, and with the last; then it waits."""
    x = leaf(ROWS, DIM)

    def run() -> Any:
        a, b, c = x.repeat(1, 3).unsafe_chunk(3, 1)
        out = chain(a.sigmoid_())  # enough that the storage has left
        return out + b.tanh_() + c.exp_()

    assert times_sent(run, [x], sends) == [2, 1, 1, 1]


def test_a_storage_that_is_changed_less_often_than_before_stays_until_that_is_learnt(
    sends: list[int],
) -> None:
    """A known step waits for as many changes as it had: if they do not come, nothing goes wrong."""
    x = leaf(ROWS, DIM)
    changes: list[int] = []

    def run() -> Any:
        a, b, c = x.repeat(1, 3).unsafe_chunk(3, 1)
        out = a.sigmoid_() + 1.0
        return out + b.tanh_() + c.exp_() if changes.pop() else out

    found = []
    for is_changed in (1, 1, 0, 0, 1, 1):
        changes += [is_changed, is_changed]  # of the plain step, and of the other
        found += times_sent(run, [x], sends, steps=1)
    assert found == [1, 1, 0, 1, 3, 1]


def test_a_copy_that_was_given_up_does_not_let_go_of_newer_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first copy is done while the second one is written: the bytes are still here."""
    monkeypatch.undo()
    first_may_go, second_may_go, write = threading.Event(), threading.Event(), SpillFile._write
    may_go = iter([first_may_go, second_may_go])

    def slow(self: SpillFile, data: Tensor, *args: Any) -> None:
        if data.numel() == STORAGE:
            next(may_go).wait(10)
        write(self, data, *args)

    monkeypatch.setattr(SpillFile, "_write", slow)
    x = leaf(ROWS, DIM)
    with spilling(quota=STORAGE, derive=False):
        a, b, _ = x.repeat(1, 3).unsafe_chunk(3, 1)
        out = chain(a.sigmoid_(), 8)
        offloader = only_offloader()
        (first,) = [d.copy for d in offloader._copy_outs.queue._queue if d.nbytes == STORAGE]
        saved = saved_by(b.tanh_().grad_fn, "result")
        activation = saved.activation
        assert activation.copy is None
        offloader._copy_outs._begin(activation)
    first_may_go.set()
    first._writing.wait()
    assert activation.data is not None
    second_may_go.set()
    activation.copy._writing.wait()
    expected = b.detach().clone()
    before = saved_by(a.grad_fn, "result")
    expected_before = a.detach().clone()
    del a, b, out
    assert activation.data is None
    assert same_bits(saved.get(), expected)
    assert same_bits(before.get(), expected_before)


PLANNED: dict[str, Any] = {
    "what is saved, spilled": SavedIndices((), tuple(range(100)), "disk"),
    "every second of what is saved, spilled": SavedIndices((), tuple(range(0, 100, 2)), "disk"),
    "what is saved, spilled or derived": SavedIndices(
        tuple(range(0, 100, 3)), tuple(range(1, 100, 2)), "disk"
    ),
    "everything, spilled": policies.spill(),
    "every second op, spilled": policies.every(2, policies.spill()),
    "every third op, spilled": policies.every(3, policies.spill()),
}


@pytest.mark.parametrize("strategy", PLANNED.values(), ids=PLANNED.keys())
@pytest.mark.parametrize("make", [Gates, lambda: nn.GRUCell(8, 8), lambda: nn.GRU(8, 8)])
def test_a_module_of_chunks_that_is_spilled_by_a_plan_has_plain_gradients_in_every_step(
    make: Callable[[], nn.Module], strategy: Any
) -> None:
    model, x = nn.ModuleList([make() for _ in range(4)]), leaf(6, 8)

    def run() -> Tensor:
        out = x
        for module in model:
            out = module(out)
            out = out[0] if isinstance(out, tuple) else out
        return padded(out)

    leaves = [x, *model.parameters()]
    expected = gradients(run, leaves)
    rekindle.apply(model, {"*": strategy})
    for _ in range(STEPS):
        found = gradients(run, leaves)
        assert all(map(same_bits, found[1], expected[1]))


def test_a_chunk_of_a_result_that_was_changed_is_not_made_again_by_the_op_before_the_change() -> (
    None
):
    """The chunk is at version 0, as the result was that is made again; and has other bytes."""
    kept: list[Tensor] = []

    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            product = silu(x)
            kept.append(product * product)  # saves it, and backward never gets there
            product.add_(1.0)
            return product.unsafe_chunk(2, 1)[0] * x[:, :4]

    module, x = Changes(), leaf(4, 8)
    expected = gradients(lambda: module(x), [x])
    rekindle.apply(module, {"": SavedIndices(tuple(range(100)))})
    for _ in range(STEPS):
        assert same_bits(gradients(lambda: module(x), [x])[1][0], expected[1][0])


def test_a_mark_is_of_views_of_one_base_until_one_of_them_is_written_to() -> None:
    base = torch.zeros(4, 6)
    mark = VersionMark(base[0])
    assert mark.is_of(base)
    assert mark.is_of(base.t()[1:])
    base[1].add_(1)
    assert not mark.is_of(base)


def test_a_mark_is_of_no_chunk_with_a_counter_of_its_own() -> None:
    base = torch.zeros(4, 6)
    a, b = base.unsafe_chunk(2)
    assert [VersionMark(a).is_of(x) for x in (a, a[0], b, base, a.data)] == [True, True] + [
        False
    ] * 3


def test_a_mark_is_of_no_tensor_that_has_the_address_of_one_that_is_gone() -> None:
    storage = torch.zeros(6).untyped_storage()
    mark = VersionMark(torch.empty(0).set_(storage))
    assert not any(mark.is_of(torch.empty(0).set_(storage)) for _ in range(100))


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("quota", [1.0, 0.5, "auto"])
def test_chunks_changed_in_place_have_plain_gradients_in_every_step_on_a_gpu(
    tier: Any, quota: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    model = nn.Sequential(*[Gates(256) for _ in range(8)]).cuda()
    x = leaf(512, 256, device="cuda")

    def offloaded() -> Tensor:
        with rekindle.offload(tier=tier, quota=quota, min_bytes=1):
            return model(x)

    for seed in range(6):
        assert_same_step(lambda: model(x), offloaded, [x, *model.parameters()], seed=seed)


@pytest.mark.gpu
def test_chunks_of_one_storage_move_once_a_step_on_a_gpu() -> None:
    """One storage for each cell but those that backward wants first, and nothing else is larger."""
    model = nn.Sequential(*[Gates(256) for _ in range(8)]).cuda()
    x = leaf(512, 256, device="cuda")
    storage = 512 * 3 * 256 * 4
    for step in range(STEPS):
        with rekindle.observe() as seen:
            with rekindle.offload(quota=1.0, min_bytes=storage):
                loss = model(x).sum()
            loss.backward()
        if step > 0:
            assert (seen.offload.tensors_out, seen.offload.bytes_out) == (6, 6 * storage)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_chunk_changed_while_its_storage_is_leaving_has_plain_gradients_on_a_gpu(
    tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step the storage has left, or is on its way, when other chunks are changed."""
    monkeypatch.undo()
    x = leaf(2048, 256, device="cuda")

    def run() -> Any:
        a, b, c = x.repeat(1, 3).unsafe_chunk(3, 1)
        out = chain(a.sigmoid_())
        torch.cuda._sleep(10**6)
        return chain(out + b.tanh_() + c.exp_())

    def offloaded() -> Tensor:
        with rekindle.offload(tier=tier, quota=1.0, min_bytes=1, derive=False):
            return run()

    for seed in range(STEPS):
        assert_same_step(run, offloaded, [x], seed=seed)
