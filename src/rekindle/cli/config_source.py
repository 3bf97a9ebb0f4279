"""A training step of a model of transformers, from its configuration: `hf:llama/config.json`.

Weights are never read, and nothing is fetched. The class is the one that the configuration names,
else the first of transformers' own tables that knows such a configuration. The batch is the model's
main input, in the sizes that the configuration has; labels have the shape of the logits without
their last dimension, as losses of classes take them.
"""

import copy
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.cli.failures import UsageError
from rekindle.cli.steps import Sizes, Step
from rekindle.integrations import library
from rekindle.planner.trace.fake_tensors import with_fake_tensors

_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "PRETRAINING",
)
"""Tables of transformers, in the order in which they are asked for a class; then the base model."""
_TOKENS = 2048
"""Tokens of a sequence where none are asked for, if the model has as many positions."""


@dataclass(frozen=True)
class _Input:
    """A tensor of a batch: whole numbers below `high`, or floats."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.long
    high: int = 2

    def made(self, place: str) -> Tensor:
        """Make the tensor on a device, with random values."""
        if self.dtype.is_floating_point:
            return torch.randn(self.shape, dtype=self.dtype, device=place)
        return torch.randint(self.high, self.shape, dtype=self.dtype, device=place)


class ConfigSource:
    """A model of transformers by its configuration alone, with a batch that fits it."""

    optimizer = "adamw"

    def __init__(self, path: str, architecture: str | None) -> None:
        self.config = _config(path)
        self.config.use_cache = False
        _keep_all_layers(self.config)
        self.kind = _model_class(self.config, architecture)

    def step(self, sizes: Sizes, place: str) -> Step:
        model = self._model(sizes, place)
        return Step(model, self._batch(model, sizes, place))

    def batch(self, step: Step, sizes: Sizes, place: str) -> Any:
        return self._batch(step.model, sizes, place)

    def most(self, over: str) -> int | None:
        return _positions(self.config) if over == "sequence" else None

    def _model(self, sizes: Sizes, place: str) -> nn.Module:
        """Make the model, with random weights or without memory."""
        with torch.device(place), _default_dtype(sizes.dtype or _dtype(self.config)):
            model: nn.Module = self.kind(copy.deepcopy(self.config)).train()
        return model

    def _batch(self, model: nn.Module, sizes: Sizes, place: str) -> dict[str, Tensor]:
        """Make the main input, and labels if the model takes them."""
        inputs = _inputs(model, self.config, sizes)
        inputs |= _labels(model, inputs, sizes)
        return {name: each.made(place) for name, each in inputs.items()}


@cache
def _transformers() -> Any:
    """Import transformers, so that it fetches nothing and says nothing but errors."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # it is read once, by the import
    transformers = library("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


def _config(path: str) -> Any:
    """Read a configuration: a file, a folder, or one that the hub's cache on this machine has."""
    if not path:
        raise UsageError("hf: should be followed by a config.json or a model's folder")
    if not Path(path).exists() and (path.endswith(".json") or path.count("/") != 1):
        raise UsageError(f"There is no file or folder {path}")
    if Path(path).is_dir() and not Path(path, "config.json").exists():
        raise UsageError(f"There is no config.json in {path}")
    try:
        return _transformers().AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except OSError as error:
        if Path(path).exists():
            raise UsageError(f"{path} cannot be read as a configuration: {error}") from error
        raise UsageError(
            f"There is no folder {path}, and no model of this name in the hub's cache; nothing is "
            f"fetched. To fetch it: hf download {path} config.json --local-dir ."
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise UsageError(f"{path}: {error}") from error
        raise UsageError(
            f"The model of {path} has code of its own, which is not run: write a function that "
            "returns model, batch"
        ) from error


def _model_class(config: Any, wanted: str | None) -> Any:
    """Return the class that is asked for, that the configuration names, or that fits it."""
    for name in [wanted] if wanted is not None else config.architectures or []:
        found = getattr(_transformers(), name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    if wanted is not None:
        raise UsageError(f"--architecture should be a model of transformers, but is {wanted}")
    tables = [f"MODEL_FOR_{task}_MAPPING" for task in _TASKS]
    for table in [*tables, "MODEL_MAPPING"]:
        known: Any = getattr(_transformers(), table, {})
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise UsageError(
        f"transformers has no model for a {type(config).__name__}: --architecture names its class"
    )


def _keep_all_layers(config: Any) -> None:
    """Have no layer dropped at random: the step that is planned is the one with all of them."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in [name for name in vars(part or ()) if name.endswith("layerdrop")]:
            setattr(part, name, 0.0)


def _dtype(config: Any) -> torch.dtype:
    """Return the dtype that the configuration states; bfloat16 without one."""
    stated = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    stated = getattr(torch, stated, None) if isinstance(stated, str) else stated
    return stated if isinstance(stated, torch.dtype) else torch.bfloat16


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _positions(config: Any) -> int | None:
    """Return the positions that the model's text part has; None if that is not known."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def _inputs(model: Any, config: Any, sizes: Sizes) -> dict[str, _Input]:
    """Return the model's main input in the sizes that are asked for."""
    name, batch = model.main_input_name, sizes.batch or 1
    if name == "input_ids":
        return {name: _Input((batch, _length(config, sizes)), high=_words(model))}
    if name == "pixel_values":
        size = _of(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape: tuple[int, ...] = (batch, _of(config, "num_channels", 3), height, width)
    elif name == "input_features" and _of(config, "max_source_positions", None):
        frames = 2 * _of(config, "max_source_positions", None)
        shape = (batch, _of(config, "num_mel_bins", 80), frames)
    elif name == "input_values":
        shape = (batch, sizes.seq or 16000)
    else:
        raise UsageError(
            f"{type(model).__name__} takes {name}, whose shape does not follow from the "
            "configuration: write a function that returns model, batch"
        )
    if sizes.seq is not None and name != "input_values" and not _decodes(model):
        raise UsageError(f"{type(model).__name__} takes {name}, which have no length: no --seq")
    return {name: _Input(shape, model.dtype)}


def _decodes(model: Any) -> bool:
    """Return whether a model has a decoder beside what reads its main input."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def _length(config: Any, sizes: Sizes) -> int:
    """Return the tokens of a sequence: a power of two that the model has positions for."""
    if sizes.seq is not None:
        return sizes.seq
    most = min(_positions(config) or _TOKENS, _TOKENS)
    return 1 << (most.bit_length() - 1)


def _words(model: Any) -> int:
    embedding = model.get_input_embeddings()
    return int(embedding.weight.shape[0]) if isinstance(embedding, nn.Embedding) else 2


def _of(config: Any, name: str, default: Any) -> Any:
    """Return what a configuration states, or one of the configurations in it."""
    parts = [config, *(getattr(config, part, None) for part in config.sub_configs)]
    return next((found for part in parts if (found := getattr(part, name, None))), default)


def _labels(model: Any, inputs: dict[str, _Input], sizes: Sizes) -> dict[str, _Input]:
    """Return the labels by which the model returns a loss; none if it takes none.

    The model runs once, on fake tensors.
    """
    takes = inspect.signature(model.forward).parameters
    given = {name: each.made("meta") for name, each in inputs.items()}
    if _decodes(model):  # where there are labels, the model makes it from them
        shape = (sizes.batch or 1, _length(model.config, sizes))
        given["decoder_input_ids"] = _Input(shape).made("meta")
    with with_fake_tensors(model, given, as_on="cuda") as fakes, torch.no_grad():
        out = model(**fakes)
    logits = getattr(out, "logits", None)
    if "labels" not in takes or not isinstance(logits, Tensor) or out.get("loss") is not None:
        return {}
    return {"labels": _Input(tuple(logits.shape[:-1]), high=logits.shape[-1])}
