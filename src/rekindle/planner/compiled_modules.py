"""Finds blocks that run inside compiled code, where nothing can be measured."""

from collections.abc import Iterable

from torch import nn

from rekindle.torch_private.dynamo_frames import is_compiled

FIT_FIRST = (
    "blocks are measured op by op, which a graph has none of. Call rekindle.fit on the model "
    "before torch.compile: what is compiled after has the plan in its graphs"
)


def compiled_around(model: nn.Module, blocks: Iterable[str]) -> str | None:
    """The path of a compiled module that is, or contains, one of the blocks; None without any."""
    paths = list(blocks)
    path: str
    for path, module in model.named_modules(remove_duplicate=False):
        is_around = not path or any(f"{block}.".startswith(f"{path}.") for block in paths)
        if is_around and is_compiled(module):
            return path
    return None
