"""The ops that programs are made of: what each does, and on which shapes.

To add an op, add a line to `OPS`, to `WRITES` if it changes its first operand in place, or to
`CHUNKS` if it makes chunks of one storage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tests.programs import functions
from tests.programs.world import ROWS, WIDTH


@dataclass(frozen=True)
class Kind:
    """One op: how to run it as `run(world, k, *tensors)`, and on which shapes."""

    run: Callable[..., Any]
    operands: int = 1
    fits: Callable[[tuple[int, ...]], bool] = bool
    aliases: bool = False
    """Whether the outcome may share memory with the first operand."""
    graph: bool = False
    """Whether it depends on the grad mode."""
    late: bool = False
    """Whether it writes to what it saves after it saved it."""


def _wide(shape: tuple[int, ...]) -> bool:
    return shape[-1] == WIDTH


def _batch(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] == WIDTH and shape[0] > 1


def _matrix(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


def _sequence(shape: tuple[int, ...]) -> bool:
    return len(shape) in (2, 3) and shape[-1] == WIDTH


def _tall(shape: tuple[int, ...]) -> bool:
    return shape[0] > 1


def _even(shape: tuple[int, ...]) -> bool:
    return shape[-1] % 2 == 0


def _grow(shape: tuple[int, ...]) -> bool:
    return len(shape) < 4


OPS: dict[str, Kind] = {
    # pointwise
    "exp": Kind(lambda w, k, x: (x * 0.3).exp()),
    "sin": Kind(lambda w, k, x: x.sin()),
    "tanh": Kind(lambda w, k, x: x.tanh()),
    "relu": Kind(lambda w, k, x: x.relu()),
    "gelu": Kind(lambda w, k, x: functional.gelu(x)),
    "silu": Kind(lambda w, k, x: functional.silu(x)),
    "square": Kind(lambda w, k, x: x * x),
    "clone": Kind(lambda w, k, x: x.clone()),
    "add": Kind(lambda w, k, x, y: x + y, 2),
    "mul": Kind(lambda w, k, x, y: x * y, 2),
    "div": Kind(lambda w, k, x, y: x / (y.abs() + 1), 2),
    "lerp": Kind(lambda w, k, x, y: x.lerp(y.to(x.dtype), 0.3), 2),
    "plus": Kind(lambda w, k, x: x + k),
    # parameters
    "first": Kind(lambda w, k, x: w.first(x.to(w.first.weight.dtype)), fits=_wide),
    "second": Kind(lambda w, k, x: w.second(x.to(w.second.weight.dtype)), fits=_wide),
    "tied": Kind(lambda w, k, x: functional.linear(x.float(), w.first.weight.t()), fits=_wide),
    "spectral": Kind(lambda w, k, x: w.spectral(x.float()), fits=_wide),
    "weight_norm": Kind(lambda w, k, x: w.weight_norm(x.float()), fits=_wide),
    "scale": Kind(lambda w, k, x: x * w.scale, fits=_wide),
    "scale64": Kind(lambda w, k, x: x * w.scale64, fits=_wide),
    "layer_norm": Kind(lambda w, k, x: w.layer_norm(x.float()), fits=_wide),
    "matmul": Kind(lambda w, k, x: x @ x.mT),
    "attention": Kind(lambda w, k, x: functions.attention(x, k), fits=lambda s: len(s) in (2, 3)),
    # recurrent modules: all but `RNN` change chunks of one storage in place
    "gates": Kind(lambda w, k, x: functions.gates(w, x.float()), fits=_batch),
    "rnn_cell": Kind(lambda w, k, x: w.rnn_cell(x.float()), fits=_batch),
    "gru_cell": Kind(lambda w, k, x: w.gru_cell(x.float()), fits=_batch),
    "lstm_cell": Kind(lambda w, k, x: w.lstm_cell(x.float())[k % 2], fits=_batch),
    "rnn": Kind(lambda w, k, x: w.rnn(x.float())[0], fits=_sequence),
    "gru": Kind(lambda w, k, x: w.gru(x.float())[0], fits=_sequence),
    "gru_both_ways": Kind(lambda w, k, x: w.gru_both_ways(x.float())[0], fits=_sequence),
    "lstm": Kind(lambda w, k, x: w.lstm(x.float())[0], fits=_sequence, graph=True),
    "lstm_projected": Kind(lambda w, k, x: functions.projected(w, x.float()), fits=_sequence),
    # buffers
    "batch_norm": Kind(lambda w, k, x: w.batch_norm(x.float()), fits=_batch),
    "count": Kind(lambda w, k, x: w.count(x)),
    "average": Kind(lambda w, k, x: w.average(x)),
    "read_count": Kind(lambda w, k, x: (x + w.count.calls).sin()),
    "read_average": Kind(lambda w, k, x: (x + w.average.mean).sin()),
    "read_batch_norm": Kind(lambda w, k, x: (x + w.batch_norm.running_mean).sin(), fits=_wide),
    # random numbers
    "dropout": Kind(lambda w, k, x: functional.dropout(x, 0.2 + 0.2 * k)),
    "dropout_module": Kind(lambda w, k, x: w.dropout(x), aliases=True),
    "noise": Kind(lambda w, k, x: x + torch.rand_like(x)),
    "bernoulli": Kind(lambda w, k, x: x * torch.bernoulli(x.detach().sigmoid())),
    "rrelu": Kind(lambda w, k, x: w.rrelu(x), late=True),
    "rrelu_function": Kind(lambda w, k, x: functional.rrelu(x, training=True), late=True),
    "alpha_dropout": Kind(lambda w, k, x: functional.alpha_dropout(x, 0.4, training=True)),
    "permuted": Kind(lambda w, k, x: x[torch.randperm(x.shape[0], device=x.device)]),
    "reseeded": Kind(lambda w, k, x: functions.reseeded(x, k)),
    # views
    "transpose": Kind(lambda w, k, x: x.mT, aliases=True),
    "flip_dims": Kind(lambda w, k, x: x.movedim(0, -1), aliases=True),
    "rows": Kind(lambda w, k, x: x[k % 2 :: 2], fits=_tall, aliases=True),
    "columns": Kind(lambda w, k, x: x[..., : 2 + k], aliases=True),
    "chunk": Kind(lambda w, k, x: x.chunk(2)[k % 2], fits=_tall, aliases=True),
    "split": Kind(lambda w, k, x: x.split(2, -1)[0], fits=_even, aliases=True),
    "expand": Kind(lambda w, k, x: x.unsqueeze(0).expand(2, *x.shape), fits=_grow, aliases=True),
    "pairs": Kind(lambda w, k, x: x.reshape(-1, 2), fits=_even, aliases=True),
    "flat": Kind(lambda w, k, x: x.reshape(1, -1), aliases=True),
    "contiguous": Kind(lambda w, k, x: x.contiguous(), aliases=True),
    "detach": Kind(lambda w, k, x: x.detach(), aliases=True),
    "diagonal": Kind(lambda w, k, x: x.diagonal().unsqueeze(0), fits=_matrix, aliases=True),
    # shapes
    "resize": Kind(
        lambda w, k, x: x.flatten()[torch.arange(ROWS * WIDTH, device=x.device) % x.numel()].view(
            ROWS, WIDTH
        )
    ),
    "cat": Kind(lambda w, k, x, y: torch.cat([x, y.to(x.dtype)], k % 2), 2),
    "stack": Kind(lambda w, k, x, y: torch.stack([x, y.to(x.dtype)]), 2, fits=_grow),
    "sum": Kind(lambda w, k, x: x.sum(-1, keepdim=True).expand_as(x) + x),
    "softmax": Kind(lambda w, k, x: x.softmax(-1)),
    "log_softmax": Kind(lambda w, k, x: x.log_softmax(0)),
    "logsumexp": Kind(lambda w, k, x: x - x.logsumexp(-1, keepdim=True)),
    "cumsum": Kind(lambda w, k, x: x.cumsum(-1)),
    "cumprod": Kind(lambda w, k, x: x.sigmoid().cumprod(0)),
    "sort": Kind(lambda w, k, x: x.sort(dim=-1, stable=True).values),
    "topk": Kind(lambda w, k, x: x.topk(2, -1).values, fits=lambda s: s[-1] >= 2),
    "max": Kind(lambda w, k, x: x.max(0, keepdim=True).values * x),
    "gather": Kind(lambda w, k, x: x.gather(-1, x.detach().sort(dim=-1, stable=True).indices)),
    "index_add": Kind(
        lambda w, k, x: x.index_add(
            0, torch.zeros(x.shape[0], dtype=torch.long, device=x.device), x
        )
    ),
    "where": Kind(lambda w, k, x, y: torch.where(x > y, x, y), 2),
    "masked_fill": Kind(lambda w, k, x: x.masked_fill(x.detach() > 0.5, k)),
    "norm": Kind(lambda w, k, x: functional.normalize(x, dim=-1)),
    "complex": Kind(lambda w, k, x: functions.through_complex(x)),
    # dtypes
    "to_double": Kind(lambda w, k, x: x.double(), aliases=True),
    "to_float": Kind(lambda w, k, x: x.float(), aliases=True),
    "to_bfloat16": Kind(lambda w, k, x: x.bfloat16(), aliases=True),
    # autograd
    "saves_both": Kind(lambda w, k, x: functions.saves_both(x)),
    "saves_nothing": Kind(lambda w, k, x: functions.saves_nothing(x, k)),
    "hooked": Kind(lambda w, k, x: functions.hooked(x, k), aliases=True, graph=True),
    "inner_grad": Kind(lambda w, k, x: functions.inner_grad(x), graph=True),
    "grad_of": Kind(lambda w, k, y, x: functions.grad_of(k, y, x), 2, graph=True),
}

WRITES: dict[str, Kind] = {
    "add_": Kind(lambda w, k, x: x.add_(k)),
    "mul_": Kind(lambda w, k, x: x.mul_(0.5 * k)),
    "sigmoid_": Kind(lambda w, k, x: x.sigmoid_()),
    "relu_": Kind(lambda w, k, x: x.relu_()),
    "tanh_": Kind(lambda w, k, x: x.tanh_()),
    "clamp_": Kind(lambda w, k, x: x.clamp_(-1, 1)),
    "dropout_": Kind(lambda w, k, x: functional.dropout(x, 0.4, inplace=True)),
    "rrelu_": Kind(lambda w, k, x: functional.rrelu(x, training=True, inplace=True), late=True),
    "uniform_": Kind(lambda w, k, x: x.uniform_()),
    "first_row_": Kind(lambda w, k, x: x.select(0, 0).mul_(k)),
    "set_row_": Kind(lambda w, k, x: x.__setitem__(0, x[-1].clone())),
    "scale_": Kind(lambda w, k, x: x.mul_(w.scale), fits=_wide),
    "add_other_": Kind(lambda w, k, x, y: x.add_(y), 2),
    "copy_other_": Kind(lambda w, k, x, y: x.copy_(y), 2),
    "detached_": Kind(lambda w, k, x: x.detach().mul_(0.5)),
}

CHUNKS: dict[str, Kind] = {
    # Of something that nobody else has, and no op saved: what these make is not to overlap with it.
    "unsafe_chunk": Kind(lambda w, k, x: tuple((x * 1.5).unsafe_chunk(k + 1, -1))),
    "unsafe_chunk_rows": Kind(lambda w, k, x: tuple((x + k).unsafe_chunk(2)), fits=_tall),
    "unsafe_split": Kind(lambda w, k, x: tuple((x * 0.5).unsafe_split(k, -1))),
    "unsafe_split_with_sizes": Kind(
        lambda w, k, x: tuple((x - k).unsafe_split_with_sizes([1, x.shape[-1] - 1], -1)),
        fits=lambda s: s[-1] > 1,
    ),
    "unsafe_chunk_of_linear": Kind(
        lambda w, k, x: tuple(w.gates(x.float()).unsafe_chunk(3, -1)), fits=_wide
    ),
}
