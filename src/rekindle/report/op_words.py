"""Words for ops: a plan says what it keeps, not by which numbers."""

from dataclasses import replace

from rekindle.planner.trace.block_graph import Graph
from rekindle.planner.types import Option


def named(option: Option, graph: Graph) -> Option:
    """An option, with words for the ops whose results it keeps, offloads and makes again."""
    ops = sorted(graph.ops, key=lambda op: -sum(graph.values[v].nbytes for v in op.outputs))

    def words(numbers: tuple[int, ...]) -> tuple[str, ...]:
        named = _ops(option, graph, numbers)
        return tuple(word_of(op.name) for op in ops if op.number in named)

    return replace(
        option,
        kept_names=words(option.kept),
        offloaded_names=words(option.offloaded),
        derived_names=words(option.derived),
    )


def _ops(option: Option, graph: Graph, numbers: tuple[int, ...]) -> set[int]:
    """The numbers of the ops that an option's numbers stand for."""
    if option.fate != "derive":
        return set(numbers)
    makers = (graph.values[v].maker for n in numbers if (v := graph.saves[n]) is not None)
    return {graph.ops[maker].number for maker in makers if maker is not None}


def word_of(name: str) -> str:
    """What people call an op.

    >>> [word_of(name) for name in ("aten::mm", "aten::add_.Tensor", "aten::native_layer_norm")]
    ['mm', 'add', 'layer_norm']
    >>> word_of("aten::_scaled_dot_product_flash_attention")
    'attention'
    """
    word = name.rpartition("::")[2].split(".")[0].strip("_")
    if "attention" in word:
        return "attention"
    return _WORDS.get(word, word.removeprefix("native_"))


_WORDS = {"to_copy": "cast"}
