"""The drivers as ops, for graphs that torch makes: one op each, however many tiles there are.

An op does what the driver of its name does, for `LogProbRows`. Where a driver gives None, an op
gives an empty tensor. A compiler decides what memory a graph's tensors have: so backward does not
write over logits, but returns their gradient as a tensor of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from rekindle.losses.cross_entropy import CrossEntropy
from rekindle.losses.exact import backward_by_rows, forward_by_rows
from rekindle.losses.head_tiles import Head, HeadGradients
from rekindle.losses.log_prob_rows import LogProbRows
from rekindle.losses.row_function import Values, save_args, saved_args
from rekindle.losses.summed import power_of_two, sum_by_tiles
from rekindle.losses.tiled import backward_by_tiles, forward_by_tiles

_FUNCTION = (
    "Tensor labels, Tensor? class_weight, int rows, ScalarType dtype, int ignore_index, "
    "float? softcap, float temperature, bool smooth, bool lse_squared, bool entropy"
)
_LOSS = (
    "Tensor labels, Tensor? class_weight, int rows, "
    "int ignore_index, float label_smoothing, float z_loss, float? softcap, str reduction"
)
_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, ScalarType matmul_dtype"
_GRADS = "Tensor? nll, Tensor? of_smooth, Tensor? of_lse_squared, Tensor? of_entropy"
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"
_library = Library("rekindle", "FRAGMENT")
_SCHEMAS = {
    "by_rows": f"(Tensor logits, {_FUNCTION}) -> {_FOUR}",
    "by_rows_backward": f"({_GRADS}, Tensor logits, {_FUNCTION}) -> Tensor",
    "by_tiles": f"({_HEAD}, {_FUNCTION}) -> {_FOUR}",
    "by_tiles_backward": f"({_GRADS}, {_HEAD}, bool[] wanted, {_FUNCTION}) -> Tensor[]",
    "sum_by_tiles": f"({_HEAD}, bool[] wanted, {_LOSS}) -> Tensor[]",
}


def values_of_logits(
    function: LogProbRows, logits: Tensor, args: Sequence[Any], rows: int
) -> tuple[Any, ...]:
    """`exact.values_of_logits` as an op."""
    found = torch.ops.rekindle.by_rows(logits, *args, rows, *function.fields())
    return _asked_for(function, found)


def values_of_head(
    function: LogProbRows, head: Head, args: Sequence[Any], rows: int
) -> tuple[Any, ...]:
    """`tiled.values_of_head` as an op."""
    found = torch.ops.rekindle.by_tiles(
        *(head.hidden, head.weight, head.bias, head.dtype), *args, rows, *function.fields()
    )
    return _asked_for(function, found)


def sum_of_head(loss: CrossEntropy, head: Head, args: Sequence[Any], rows: int) -> Tensor:
    """`summed.sum_of_head` as an op, of a cross entropy."""
    tensors = head.hidden, head.weight, head.bias
    wanted = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in tensors
    ]
    found: Tensor = torch.ops.rekindle.sum_by_tiles(
        *tensors, head.dtype, wanted, *args, rows, *loss.fields()
    )[0]
    return found


def _asked_for(function: LogProbRows, found: Sequence[Tensor]) -> tuple[Any, ...]:
    """The values of an op, with None for those that are empty because nobody asked for them."""
    asked = True, function.smooth, function.lse_squared, function.entropy
    return tuple(value if ask else None for value, ask in zip(found, asked, strict=True))


def _by_rows(logits: Tensor, labels: Tensor, weight: Any, rows: int, *spec: Any) -> Any:
    return _four(forward_by_rows(LogProbRows(*spec), logits, (labels, weight), rows), labels)


def _by_rows_backward(*given: Any) -> Tensor:
    grads, (logits, labels, weight, rows, *spec) = given[:4], given[4:]
    out = torch.empty_like(logits)
    backward_by_rows(LogProbRows(*spec), logits, (labels, weight), rows, grads, out)
    return out


def _by_tiles(*given: Any) -> Any:
    head, (labels, weight, rows, *spec) = Head(*given[:4]), given[4:]
    return _four(forward_by_tiles(LogProbRows(*spec), head, (labels, weight), rows), labels)


def _by_tiles_backward(*given: Any) -> list[Tensor]:
    grads, head, (wanted, labels, weight, rows, *spec) = given[:4], Head(*given[4:8]), given[8:]
    found = HeadGradients(head, wanted)
    backward_by_tiles(LogProbRows(*spec), head, (labels, weight), rows, grads, found)
    return _three(found.in_dtypes_of(head.hidden, head.weight, head.bias), head)


def _sum_by_tiles(*given: Any) -> list[Tensor]:
    head, (wanted, labels, weight, rows, *spec) = Head(*given[:4]), given[4:]
    dtype = torch.promote_types(head.dtype, torch.float32)
    of = CrossEntropy(*spec).as_sum(labels, weight, len(head.weight), dtype)
    found = HeadGradients(head, wanted) if any(wanted) else None
    loss = sum_by_tiles(of, head, (labels, weight), rows, found)
    grads: Values = (found.hidden, found.weight, found.bias) if found else (None, None, None)
    return [loss, power_of_two(of.total), *_three(grads, head)]


def _four(values: Values, labels: Tensor) -> tuple[Tensor, ...]:
    dtype = next(value.dtype for value in values if value is not None)
    empty = labels.new_empty(0, dtype=dtype)
    return tuple(empty.clone() if value is None else value for value in values)


def _three(grads: Values, head: Head) -> list[Tensor]:
    return [head.weight.new_empty(0) if grad is None else grad for grad in grads]


def _fake_four(rows: Tensor, dtype: torch.dtype, *flags: bool) -> tuple[Tensor, ...]:
    sizes = [rows.shape[0] if there else 0 for there in (True, *flags)]
    return tuple(rows.new_empty(size, dtype=dtype) for size in sizes)


def _fake_by_rows(logits: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _fake_four(logits, given[3], *given[-3:])


def _fake_by_rows_backward(*given: Any) -> Tensor:
    return torch.empty_like(given[4])


def _fake_by_tiles(hidden: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _fake_four(hidden, given[6], *given[-3:])


def _fake_by_tiles_backward(*given: Any) -> list[Tensor]:
    wanted: list[bool] = given[8]
    head = [
        torch.empty_like(tensor) if want and tensor is not None else None
        for tensor, want in zip(given[4:7], wanted, strict=True)
    ]
    return _three(head, Head(*given[4:8]))


def _fake_sum_by_tiles(*given: Any) -> list[Tensor]:
    head, wanted = Head(*given[:4]), given[4]
    wide = torch.promote_types(head.dtype, torch.float32)
    found = HeadGradients(head, wanted)
    scalars = [head.weight.new_empty((), dtype=wide) for _ in range(2)]
    return [*scalars, *_three((found.hidden, found.weight, found.bias), head)]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.set_materialize_grads(False)
    save_args(ctx, inputs)


def _grad_of_rows(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    inputs = saved_args(ctx)
    grad = torch.ops.rekindle.by_rows_backward(*grads, *inputs)
    return grad, *[None] * (len(inputs) - 1)


def _grad_of_tiles(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    inputs = saved_args(ctx)
    wanted = [bool(want) for want in ctx.needs_input_grad[:3]]
    found = torch.ops.rekindle.by_tiles_backward(*grads, *inputs[:4], wanted, *inputs[4:])
    return *_wanted(found, wanted), *[None] * (len(inputs) - 3)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.inputs, ctx.dtypes = len(inputs), [t if t is None else t.dtype for t in inputs[:3]]
    ctx.wanted = inputs[4]


def _grad_of_sum(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    power, *found = ctx.saved_tensors
    scale = grads[0] / power
    scaled = [
        (grad * scale).to(dtype) if want else None
        for grad, dtype, want in zip(found, ctx.dtypes, ctx.wanted, strict=True)
    ]
    return *scaled, *[None] * (ctx.inputs - 3)


def _wanted(found: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    return [grad if want else None for grad, want in zip(found, wanted, strict=True)]


for _name, _real, _fake in (
    ("by_rows", _by_rows, _fake_by_rows),
    ("by_rows_backward", _by_rows_backward, _fake_by_rows_backward),
    ("by_tiles", _by_tiles, _fake_by_tiles),
    ("by_tiles_backward", _by_tiles_backward, _fake_by_tiles_backward),
    ("sum_by_tiles", _sum_by_tiles, _fake_sum_by_tiles),
):
    _library.define(_name + _SCHEMAS[_name])
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rekindle::{_name}", _fake, lib=_library)
for _name, _backward, _save in (
    ("by_rows", _grad_of_rows, _save_inputs),
    ("by_tiles", _grad_of_tiles, _save_inputs),
    ("sum_by_tiles", _grad_of_sum, _save_gradients),
):
    torch.library.register_autograd(
        f"rekindle::{_name}", _backward, setup_context=_save, lib=_library
    )
