"""Inputs of a graph that its forward changes in place, such as buffers: backward has them as given.

A region's backward recomputes its results from the inputs that the forward graph was given. A
forward writes an input that it changes back at its end, and torch's partitioner saves the input
itself: backward would begin from the new value. So a copy of the old value is saved.
"""

from typing import Any

import torch


def save_changed_inputs(forward: Any, backward: Any, outputs: int) -> None:
    """Have a pair of graphs save a copy of each input that the forward changes and backward reads.

    Args:
        forward: the graph module of the forward, whose results are the model's and the saved ones.
        backward: that of the backward, whose placeholders have the names of what is saved.
        outputs: how many of the forward's results are the model's.
    """
    output = forward.graph.find_nodes(op="output")[0]
    results = list(output.args[0])
    written = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    changed = {node.args[0] for node in written if node.args[0].op == "placeholder"}
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    saved = [node for node in dict.fromkeys(results[outputs:]) if node in changed]
    for node in saved:
        if node.name in placeholders:
            copy = _add_copy(forward.graph, node)
            results[outputs:] = [copy if each is node else each for each in results[outputs:]]
            _rename(backward.graph, placeholders[node.name], copy)
    if saved:
        output.update_arg(0, tuple(results))
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()


def _add_copy(graph: Any, placeholder: Any) -> Any:
    """A copy of an input, made before anything else."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    val = placeholder.meta["val"]
    with graph.inserting_before(first), val.fake_mode:
        copy = graph.call_function(torch.ops.aten.clone.default, (placeholder,))
        copy.meta["val"] = val.clone()
    return copy


def _rename(graph: Any, placeholder: Any, copy: Any) -> None:
    """Give a backward graph the copy in the place of the input."""
    with graph.inserting_after(placeholder):
        new_input = graph.placeholder(copy.name)
    new_input.meta["val"] = copy.meta["val"]
    placeholder.replace_all_uses_with(new_input)
    graph.erase_node(placeholder)
