"""The table of tensors of a recorded region: Note [States of a tensor]."""

import torch
from torch import Tensor

from rekindle.regions.selective.op_graph import RecordedOp, RecordedValue
from rekindle.regions.selective.op_kinds import OpTraits
from rekindle.regions.selective.tensor_table import TensorTable
from tests.toys import leaf, same_bits

aten = torch.ops.aten


def recomputable(table: TensorTable, x: Tensor) -> tuple[Tensor, RecordedValue]:
    """The sine of a tensor, entered with the op that makes it again."""
    source = table.value_of(x)
    out = x.detach().sin()
    value = RecordedValue(RecordedOp(OpTraits(aten.sin.default), (source,), (), {}, is_flat=True))
    table.set_value(out, value)
    return out, value


def test_a_tensor_from_outside_is_held() -> None:
    table, x = TensorTable(None), leaf(4)
    value = table.value_of(x)
    assert value.op is None
    assert value.held is not None
    assert same_bits(value.held.get(), x)
    assert table.find(x) is value


def test_a_result_is_recomputable_until_it_is_held() -> None:
    table = TensorTable(None)
    out, value = recomputable(table, leaf(4))
    assert table.find(out) is value
    assert value.held is None
    table.hold(out, value, aten.sin.default)
    assert value.op is None
    assert value.held is not None


def test_a_pending_result_is_held_when_its_op_has_ended() -> None:
    table, out, value = TensorTable(None), torch.ones(4), RecordedValue(None)
    table.hold_after_op(out, value, aten.sin.default, None)
    assert table.is_pending(value)
    assert value.held is None
    table.hold_pending()
    assert not table.is_pending(value)
    assert value.held is not None


def test_a_tensor_for_a_tier_is_handed_over_at_the_end_if_something_needs_its_value() -> None:
    table, taken = TensorTable(None), []

    def pack(x: Tensor) -> Tensor:
        taken.append(x)
        return x

    needed, unneeded = RecordedValue(None), RecordedValue(None)
    for value in (needed, unneeded):
        table.hold_after_op(torch.ones(4), value, aten.sin.default, (pack, lambda x: x))
    table.hold_pending()
    assert table.is_pending(needed)
    del value, unneeded
    table.close(failed=False)
    assert len(taken) == 1
    assert needed.held is not None


def test_an_unwritten_tensor_has_no_value_until_it_is_used() -> None:
    table, out = TensorTable(None), torch.empty(4)
    table.add_unwritten([out], aten.empty.memory_format)
    assert table.is_unwritten(out)
    assert table.find(out) is None
    value = table.value_of(out)
    assert not table.is_unwritten(out)
    assert value.held is not None
    assert value.held.made_by is aten.empty.memory_format


def test_a_tensor_that_is_changed_has_another_value_and_what_was_held_is_a_copy() -> None:
    table, out, value = TensorTable(None), torch.ones(4), RecordedValue(None)
    table.hold(out, value, aten.sin.default)
    keys = table.copy_before_change([out])
    out.mul_(2)
    table.forget_changed([out], keys)
    assert table.find(out) is None
    assert value.held is not None
    assert same_bits(value.held.get(), torch.ones(4))


def test_a_tensor_whose_memory_is_exchanged_is_not_known_any_more() -> None:
    table = TensorTable(None)
    out, value = recomputable(table, leaf(4))
    assert table.find(out) is value
    out.data = torch.zeros(4)
    assert table.find(out) is None


def test_entries_of_dead_tensors_are_dropped() -> None:
    table = TensorTable(None)
    for _ in range(100):
        table.hold_after_op(torch.ones(4), RecordedValue(None), None, None)
        table.hold_pending()
    assert len(table) < 50
