"""A pass over a pair of graphs: marked tensors are offloaded in forward and fetched in backward.

Note [Offload in a graph]. A forward graph ends with one `rekindle::send` of all tensors that are
offloaded, and saves tickets in their place; a backward graph has a `rekindle::fetch` where each is
first used. The engine is the one of eager code: copies on its own streams, prefetched. Compilers
reuse the memory of a result once nothing in the graph reads it, and the engine reads it for longer.
So `send` also takes all else that the graph returns: nothing can be computed after it. In the place
of a random state, which no compiler takes for a tensor, it takes the numbers drawn from it. A
tensor that shares its memory with another result is not offloaded.
"""

import operator
from typing import Any

import torch
from torch import Tensor

from rekindle.compile.node_tags import DECISION
from rekindle.compile.offload_ops import fake_send
from rekindle.torch_private.fx_nodes import saves_rng_state
from rekindle.torch_private.storages import storage_key


def offload_marked(forward: Any, backward: Any, outputs: int) -> None:
    """Offload the marked tensors that a pair of graphs saves: Note [Offload in a graph].

    Args:
        forward: the graph module of the forward, whose results are the model's and the saved ones.
        backward: that of the backward, whose placeholders have the names of what is saved.
        outputs: how many of the forward's results are the model's.
    """
    if not any(DECISION in node.meta for node in forward.graph.nodes):
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
        del node.meta[DECISION]
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _without_unused(results: list[Any], outputs: int, placeholders: dict[str, Any]) -> list[Any]:
    """A forward's results without the marked ones that its backward does not use.

    Their placeholders are erased too. Torch's partitioner saves them for a random op in backward
    of which nobody needs the numbers, and takes that op away afterwards.
    """
    left = results[:outputs]
    for node in results[outputs:]:
        is_marked = isinstance(node, torch.fx.Node) and DECISION in node.meta
        placeholder = placeholders.get(node.name) if is_marked else None
        if placeholder is not None and not placeholder.users:
            placeholder.graph.erase_node(placeholder)
        else:
            left.append(node)
    return left


def _ends(graph: Any) -> list[Any]:
    """The nodes of a graph that nothing reads, and the new values of inputs that it changes.

    Nothing reads the numbers that some random ops draw: torch does not take these ops for dead.
    """
    ends = [node for node in graph.nodes if node.op == "call_function" and not node.users]
    return [node.args[1] if node.target is torch.ops.aten.copy_.default else node for node in ends]


def _made_with(node: Any) -> list[Any]:
    """The tensors that exist once a node has run: its own, or else those that it was made from.

    A random state is none of them: it is real where all else is fake.
    """
    if not isinstance(node, torch.fx.Node):
        return []
    drawing: Any = node.args[0] if _is_item(node) and node.args[1] == 0 else None
    if drawing is None or not saves_rng_state(drawing):
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
        if _is_tensor(node) and DECISION in node.meta and node not in given
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
    """End a forward graph with `send`, and return the ticket of each node that is offloaded."""
    decisions = [node.meta[DECISION].value for node in leaving]
    vals = [node.meta["val"] for node in leaving]
    with graph.inserting_before(output), vals[0].fake_mode:
        sent = graph.call_function(torch.ops.rekindle.send.default, (leaving, staying, decisions))
        sent.meta["val"] = fake_send(vals)
        tickets = {}
        for i, node in enumerate(leaving):
            name = f"ticket_of_{node.name}"
            ticket = graph.create_node("call_function", operator.getitem, (sent, i), name=name)
            ticket.meta["val"] = sent.meta["val"][i]
            tickets[node] = ticket
    return tickets


def _add_fetch(graph: Any, placeholder: Any, ticket: Any) -> None:
    """Give a backward graph a ticket for a tensor, and fetch the tensor before its first use."""
    val = placeholder.meta["val"]
    with graph.inserting_after(placeholder):
        ticket_input = graph.placeholder(ticket.name)
    ticket_input.meta["val"] = ticket.meta["val"]
    users = set(placeholder.users)
    first = next(node for node in graph.nodes if node in users)
    with graph.inserting_before(first):
        given = (ticket_input, list(val.shape), list(val.stride()), val.dtype, val.device)
        fetched = graph.call_function(torch.ops.rekindle.fetch.default, given)
    fetched.meta["val"] = val
    placeholder.replace_all_uses_with(fetched)
    graph.erase_node(placeholder)
