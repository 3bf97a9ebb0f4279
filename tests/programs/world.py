"""What programs run on: the modules, parameters and inputs that every program can use."""

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

ROWS, WIDTH = 4, 6


class Count(nn.Module):
    """Counts its calls in a buffer that is replaced each time, and adds the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * 0.5 + self.calls


class Average(nn.Module):
    """Follows the mean of what it sees in a buffer that is written in place, and scales by it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().float().abs().mean(), 0.25)
        return x * self.mean.clone()


class World(nn.Module):
    """The modules and parameters that every program can use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.count = Count()
        self.average = Average()
        self.dropout = nn.Dropout(0.3)
        self.rrelu = nn.RReLU()
        self.gates = nn.Linear(WIDTH, 3 * WIDTH)
        self.rnn_cell = nn.RNNCell(WIDTH, WIDTH)
        self.gru_cell = nn.GRUCell(WIDTH, WIDTH)
        self.lstm_cell = nn.LSTMCell(WIDTH, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH, nonlinearity="relu")
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.gru_both_ways = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.lstm_projected = nn.LSTM(WIDTH, WIDTH, proj_size=WIDTH // 2)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.scale64 = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))


def new_world() -> World:
    """A world like any other: made once, since its parametrizations take their time, and copied."""
    return copy.deepcopy(_first_world())


@functools.cache
def _first_world() -> World:
    set_seed(11)
    return World()


def set_seed(seed: int) -> None:
    """As `torch.manual_seed`, which for every device that is not there formats a stack trace."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _leaf(dtype: torch.dtype, requires_grad: bool) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.randn(
        ROWS, WIDTH, dtype=dtype, device=device, requires_grad=requires_grad
    )


INPUTS: dict[str, Callable[[torch.device], Tensor]] = {
    "x": _leaf(torch.float32, True),
    "y": _leaf(torch.float32, True),
    "constant": _leaf(torch.float32, False),
    "half": _leaf(torch.bfloat16, True),
    "long": _leaf(torch.float64, True),
}
