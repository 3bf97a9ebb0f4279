"""The ops by which a graph hands its results to the offload engine and gets them back.

A ticket is a tensor whose memory is a Python object: the object lives as long as the memory does,
wherever autograd keeps it. Note [Offload in a graph].
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import Library

from rekindle.errors import OffloadError
from rekindle.offload.saved_tensors import KeptTensor, OffloadedTensor
from rekindle.regions.selective.decisions import Decision
from rekindle.regions.selective.offload_bridge import copy_out, pause
from rekindle.torch_private.autograd_graph import keep_graph

_library = Library("rekindle", "FRAGMENT")
_library.define("send(Tensor[] leaving, Tensor[] staying, str[] decisions) -> Tensor[]")
_library.define(
    "fetch(Tensor ticket, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor"
)


class _Ticket(bytearray):
    """Eight bytes that hold a number, with the activation that the offloader has for it."""

    saved: OffloadedTensor | KeptTensor


_tickets: "WeakValueDictionary[int, _Ticket]" = WeakValueDictionary()
_numbers = count()


def tickets_alive() -> int:
    """Number of activations that graphs have sent and that nothing has let go of."""
    return len(_tickets)


def _send(leaving: list[Tensor], staying: list[Tensor], decisions: list[str]) -> list[Tensor]:
    """Give tensors to the offloader, and return a ticket for each."""
    shared = {x.untyped_storage().data_ptr() for x in staying}
    tickets = []
    for x, decision in zip(leaving, decisions, strict=True):
        is_shared = x.untyped_storage().data_ptr() in shared  # as no graph says, but a backend may
        shared.add(x.untyped_storage().data_ptr())
        number = next(_numbers)
        ticket = _tickets[number] = _Ticket(number.to_bytes(8, "little"))
        ticket.saved = copy_out(Decision(decision), x.clone() if is_shared else x)
        tickets.append(torch.frombuffer(ticket, dtype=torch.int64))
    pause(set(map(Decision, decisions)), failed=False)
    return tickets


def _fetch(
    ticket: Tensor, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the tensor that a ticket stands for, once it is on its device again."""
    found = _tickets.get(int(ticket))
    if found is None:
        raise OffloadError(
            "An activation that a compiled graph sent to host memory is gone: saved-tensor hooks "
            "around the graph gave back a copy of its ticket. Take the hooks off, or have the "
            "policy keep the graph's results."
        )
    x = found.saved.get()
    if list(x.stride()) != list(stride):  # the forward's compiler chose others than its graph has
        return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(x)
    return x.clone() if keep_graph() else x  # the graph may write to it


def fake_send(leaving: list[Tensor], *_: Any) -> list[Tensor]:
    """Tickets without memory, as a trace needs them."""
    return [torch.empty(1, dtype=torch.int64, device="cpu") for _ in leaving]


def _fake_fetch(
    _: Tensor, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


for _name, _real, _fake in (("send", _send, fake_send), ("fetch", _fetch, _fake_fetch)):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rekindle::{_name}", _fake, lib=_library)
