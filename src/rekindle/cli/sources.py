"""Names on the command line, and what they stand for: steps, dtypes, optimizers."""

import torch

from rekindle.cli.config_source import ConfigSource
from rekindle.cli.failures import UsageError
from rekindle.cli.function_source import FunctionSource
from rekindle.cli.steps import Source


def source_of(text: str, architecture: str | None) -> Source:
    """Return the source that the command line names."""
    kind, _, rest = text.partition(":")
    if kind == "hf":
        return ConfigSource(rest, architecture)
    if architecture is not None:
        raise UsageError("--architecture is for models that a configuration describes: hf:PATH")
    if not kind or not rest:
        raise UsageError(
            f"{text!r} is neither MODULE:FUNCTION, such as train:step or train.py:step, nor hf: "
            "with a config.json or a model's folder, such as hf:llama/config.json"
        )
    return FunctionSource(kind, rest)


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the dtype of parameters that the command line names."""
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, _SHORT.get(name, name))
    return dtype


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def optimizer_named(name: str) -> type[torch.optim.Optimizer] | None:
    """Return the class of optimizers that the command line names; None for "none"."""
    if name.lower() == "none":
        return None
    base = torch.optim.Optimizer
    found = [kind for each, kind in vars(torch.optim).items() if each.lower() == name.lower()]
    if not found or not isinstance(found[0], type) or not issubclass(found[0], base):
        raise UsageError(
            "--optimizer should be a class of torch.optim, such as adamw or sgd, or none, but is "
            f"{name}"
        )
    return found[0]
