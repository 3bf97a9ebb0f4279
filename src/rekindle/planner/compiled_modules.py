"""Refusals of compiled code that cannot be planned, with what to do instead."""

from collections.abc import Iterable

from torch import nn

from rekindle.modules.compiled_blocks import compiled_paths, options_around
from rekindle.planner.caller_warnings import warn_at_caller
from rekindle.torch_private.compiled_functions import compiles_backwards

COMPILED_STEP = (
    "a graph around the model has no blocks to plan by. Compile the model, or its blocks, and not "
    "the function that calls it; or give the model itself, with loss="
)


def refuse_without_device(model: nn.Module, blocks: Iterable[str]) -> None:
    """Refuse a model whose blocks are compiled, to be profiled without a device."""
    compiled = compiled_paths(model, blocks)
    if compiled:
        raise ValueError(
            f"{compiled[0] or type(model).__name__} is compiled: compiled code is measured where "
            'it runs. With device="meta", profile the model before torch.compile.'
        )


def refuse_cuda_graphs(model: nn.Module, blocks: Iterable[str]) -> None:
    """Refuse a model whose compiled blocks record CUDA graphs."""
    for path, options in options_around(model, blocks).items():
        if options.captures_cuda_graphs:
            raise ValueError(
                f"{path or type(model).__name__} is compiled with CUDA graphs, as by "
                'mode="reduce-overhead" or "max-autotune": their memory is one pool, in which '
                "nothing that a plan drops or moves is free for others. Compile with "
                'mode="default", or "max-autotune-no-cudagraphs".'
            )


def warn_of_uncounted_memory(model: nn.Module, blocks: Iterable[str]) -> None:
    """Warn that peaks on a CPU are without what inductor's code allocates."""
    if any(options.is_inductor for options in options_around(model, blocks).values()):
        warn_at_caller(
            "On a CPU, the memory that inductor's code allocates is not counted: steps peak higher "
            "than the plan says. On a GPU it is. To count each op's results, compile with "
            'backend="aot_eager".'
        )


def refuse_compiled_backward() -> None:
    """Refuse to measure while backwards are compiled."""
    if compiles_backwards():
        raise ValueError(
            "Backwards are compiled here (torch._dynamo.compiled_autograd), and no step can be "
            "measured. Call this outside of that context; the plan holds inside it, too."
        )
