"""What cannot be planned of compiled code, and what to do instead."""

from collections.abc import Iterable

from torch import nn

from rekindle.modules.compiled_blocks import compiled_paths

COMPILED_STEP = (
    "a graph around the model has no blocks to plan by. Compile the model, or its blocks, and not "
    "the function that calls it; or give the model itself, with loss="
)


def refuse_compiled(model: nn.Module, blocks: Iterable[str]) -> None:
    """Refuse a model whose blocks are compiled, to be profiled without a device."""
    compiled = compiled_paths(model, blocks)
    if compiled:
        raise ValueError(
            f"{compiled[0] or type(model).__name__} is compiled: compiled code is measured where "
            'it runs. With device="meta", profile the model before torch.compile.'
        )
