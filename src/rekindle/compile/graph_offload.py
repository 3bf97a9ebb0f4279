"""Offload inside graphs: ops that hand a graph's results to the offload engine and get them back.

Note [Offload in a graph]. A forward graph ends with one `rekindle::send` of all that is to go, and
saves tickets in place of it; a backward graph has a `rekindle::fetch` where each is first used. The
engine is the one of eager code: copies on its own streams, brought back ahead of need. Compilers
use the memory of a result again once nothing in the graph reads it, and the engine reads it for
longer. So `send` also takes all else that the graph returns: nothing can be made after it. In the
place of a random state, which no compiler takes for a tensor, it takes what was drawn from it. And
what shares its memory with another result does not go.

A ticket is a tensor whose memory is a Python object: the object lives as long as the memory does,
wherever autograd keeps it.
"""

import operator
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import Library

from rekindle.compile.node_tags import FATE
from rekindle.errors import OffloadError
from rekindle.offload.activation import Kept, Saved
from rekindle.regions.selective.decisions import Decision
from rekindle.regions.selective.offload_bridge import pause, take
from rekindle.torch_private.autograd_graph import keep_graph
from rekindle.torch_private.fx_nodes import RUN_AND_SAVE_RNG_STATE
from rekindle.torch_private.storages import storage_key

_library = Library("rekindle", "FRAGMENT")
_library.define("send(Tensor[] leaving, Tensor[] staying, str[] fates) -> Tensor[]")
_library.define(
    "fetch(Tensor ticket, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor"
)


class _Ticket(bytearray):
    """Eight bytes with a number, and what the engine has for it."""

    saved: Saved | Kept


_tickets: "WeakValueDictionary[int, _Ticket]" = WeakValueDictionary()
_numbers = count()


def _send(leaving: list[Tensor], staying: list[Tensor], fates: list[str]) -> list[Tensor]:
    shared = {x.untyped_storage().data_ptr() for x in staying}
    tickets = []
    for x, fate in zip(leaving, fates, strict=True):
        is_shared = x.untyped_storage().data_ptr() in shared  # as no graph says, but a backend may
        shared.add(x.untyped_storage().data_ptr())
        number = next(_numbers)
        ticket = _tickets[number] = _Ticket(number.to_bytes(8, "little"))
        ticket.saved = take(Decision(fate), x.clone() if is_shared else x)
        tickets.append(torch.frombuffer(ticket, dtype=torch.int64))
    pause({Decision(fate) for fate in fates}, failed=False)
    return tickets


def _fetch(
    ticket: Tensor, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    found = _tickets.get(int(ticket))
    if found is None:
        raise OffloadError(
            "What a compiled graph sent to host memory is gone: saved-tensor hooks around it gave "
            "back a copy of its ticket. Take them off, or let the policy keep its results."
        )
    x = found.saved.get()
    if list(x.stride()) != list(stride):  # the forward's compiler chose others than its graph has
        return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(x)
    return x.clone() if keep_graph() else x  # the graph may write to it


def _fake_send(leaving: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty(1, dtype=torch.int64, device="cpu") for _ in leaving]


def _fake_fetch(
    _: Tensor, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


for _name, _real, _fake in (("send", _send, _fake_send), ("fetch", _fetch, _fake_fetch)):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rekindle::{_name}", _fake, lib=_library)


def offload_marked(forward: Any, backward: Any, outputs: int) -> None:
    """Have what is marked in a pair of graphs go and come back: Note [Offload in a graph].

    Args:
        forward: the graph module of the forward, whose results are the model's and the saved ones.
        backward: that of the backward, whose placeholders have the names of what is saved.
        outputs: how many of the forward's results are the model's.
    """
    if not any(FATE in node.meta for node in forward.graph.nodes):
        return
    output = forward.graph.find_nodes(op="output")[0]
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    results = _without_unused(list(output.args[0]), outputs, placeholders)
    leaving = [
        node
        for node in _saved_alone(forward, results, outputs)
        if _has_fixed_size(node) and node.name in placeholders
    ]
    others = [node for node in results if node not in leaving] + _ends(forward.graph)
    staying = list(dict.fromkeys(made for node in others for made in _made_with(node)))
    tickets = _add_send(forward.graph, output, leaving, staying) if leaving else {}
    output.update_arg(0, tuple(tickets.get(node, node) for node in results))
    for node, ticket in tickets.items():
        _add_fetch(backward.graph, placeholders[node.name], ticket)
        del node.meta[FATE]
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _without_unused(results: list[Any], outputs: int, placeholders: dict[str, Any]) -> list[Any]:
    """A forward's results but for marked ones that are saved and that its backward does not use.

    Their placeholders are erased too. Torch's partitioner saves them for a random op in backward
    of which nobody needs the numbers, and takes that op away afterwards.
    """
    left = results[:outputs]
    for node in results[outputs:]:
        is_marked = isinstance(node, torch.fx.Node) and FATE in node.meta
        placeholder = placeholders.get(node.name) if is_marked else None
        if placeholder is not None and not placeholder.users:
            placeholder.graph.erase_node(placeholder)
        else:
            left.append(node)
    return left


def _ends(graph: Any) -> list[Any]:
    """What a graph makes and does not return: for an input that it changes, and what nobody reads.

    The latter is what random ops draw: they are not taken for dead.
    """
    ends = [node for node in graph.nodes if node.op == "call_function" and not node.users]
    return [node.args[1] if node.target is torch.ops.aten.copy_.default else node for node in ends]


def _made_with(node: Any) -> list[Any]:
    """The tensors that exist once a node has run: what it made, or else what that was made from.

    A random state is none of them: it is real where all else is fake.
    """
    if not isinstance(node, torch.fx.Node):
        return []
    drawing: Any = node.args[0] if _is_item(node) and node.args[1] == 0 else None
    if drawing is None or drawing.target is not RUN_AND_SAVE_RNG_STATE:
        if _is_tensor(node):
            return [node]
        return [made for each in node.all_input_nodes for made in _made_with(each)]
    drawn = [user for user in drawing.users if user is not node]
    parts = [part for each in drawn for part in each.users if _is_item(part)]
    return [*filter(_is_tensor, drawn + parts)] or _made_with(drawing)


def _is_item(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is operator.getitem


def _saved_alone(forward: Any, results: list[Any], outputs: int) -> list[Any]:
    """The marked nodes that are saved, and share their memory with nothing else that lives on."""
    living = {*results, *forward.graph.find_nodes(op="placeholder")}
    holders: dict[int, int] = {}
    for node in filter(_is_tensor, living):
        holders[_memory(node)] = holders.get(_memory(node), 0) + 1
    given = set(results[:outputs])
    return [
        node
        for node in dict.fromkeys(results[outputs:])
        if _is_tensor(node) and FATE in node.meta and node not in given
        if node.op == "call_function" and holders[_memory(node)] == 1
    ]


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), Tensor)


def _has_fixed_size(node: Any) -> bool:
    val = node.meta["val"]
    return all(type(n) is int for n in (*val.shape, *val.stride()))


def _memory(node: Any) -> int:
    return storage_key(node.meta["val"].untyped_storage())


def _add_send(graph: Any, output: Any, leaving: list[Any], staying: list[Any]) -> dict[Any, Any]:
    """The ticket of each node that is to leave."""
    fates = [node.meta[FATE].value for node in leaving]
    vals = [node.meta["val"] for node in leaving]
    with graph.inserting_before(output), vals[0].fake_mode:
        sent = graph.call_function(torch.ops.rekindle.send.default, (leaving, staying, fates))
        sent.meta["val"] = _fake_send(vals)
        tickets = {}
        for i, node in enumerate(leaving):
            name = f"ticket_of_{node.name}"
            ticket = graph.create_node("call_function", operator.getitem, (sent, i), name=name)
            ticket.meta["val"] = sent.meta["val"][i]
            tickets[node] = ticket
    return tickets


def _add_fetch(graph: Any, placeholder: Any, ticket: Any) -> None:
    """Let a backward graph take a ticket, and fetch what it stands for before its first use."""
    val = placeholder.meta["val"]
    with graph.inserting_after(placeholder):
        taken = graph.placeholder(ticket.name)
    taken.meta["val"] = ticket.meta["val"]
    users = set(placeholder.users)
    first = next(node for node in graph.nodes if node in users)
    with graph.inserting_before(first):
        given = (taken, list(val.shape), list(val.stride()), val.dtype, val.device)
        fetched = graph.call_function(torch.ops.rekindle.fetch.default, given)
    fetched.meta["val"] = val
    placeholder.replace_all_uses_with(fetched)
    graph.erase_node(placeholder)
