"""Checks of the arguments of `profile`, `solve`, `frontier` and `fit`."""

import inspect
import logging
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from rekindle.modules.blocks import Named, named_blocks, unwrapped_blocks
from rekindle.modules.compiled_blocks import compiled_paths
from rekindle.modules.unwrapping import class_name, unwrapped
from rekindle.planner.compiled_modules import (
    refuse_compiled_backward,
    refuse_cuda_graphs,
    refuse_without_device,
)
from rekindle.planner.devices import Device
from rekindle.planner.loss import Loss
from rekindle.planner.ranks.rank_sync import is_first_rank
from rekindle.planner.trace.fake_tensors import is_without_memory
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Profile
from rekindle.sizes import format_count
from rekindle.torch_private.autograd_graph import has_accumulation_hooks

_log = logging.getLogger("rekindle")


def check_model(model: Any) -> None:
    """Refuse what is no model, is not trained, or has hooks that a step would run."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"profile() takes a model, but got {type(model).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("No parameter of the model requires a gradient: it is not trained")
    if any(has_accumulation_hooks(p) for p in model.parameters()):
        raise ValueError(
            "A parameter has a hook that runs when its gradient is there, such as an optimizer's: "
            "measuring would run it. Profile the model before such hooks are registered."
        )


def check_compiled(model: nn.Module, blocks: Named | None, on_meta: bool) -> None:
    """Refuse compiled code that cannot be measured, or not without a device."""
    refuse_compiled_backward()
    found = unwrapped_blocks(model) if blocks is None else named_blocks(model, blocks)
    refuse = refuse_without_device if on_meta else refuse_cuda_graphs
    refuse(model, found)


def check_batch(model: nn.Module, batch: Any) -> None:
    """Refuse what is no batch, or one that the model cannot be called with."""
    if isinstance(batch, DataLoader | Dataset | Iterator | Generator):
        kind = type(batch).__name__
        one = {"DataLoader": "next(iter(loader))"}.get(kind, "one batch of it")
        raise TypeError(
            f"A batch is what the model is called with, but got a {kind}: give {one}, moved to "
            "the model's device"
        )
    step = TrainingStep(model, batch)
    inner = unwrapped(model)
    if step.function is not None or inner._forward_pre_hooks:
        return
    try:
        signature = inspect.signature(inner.forward)
    except (TypeError, ValueError):  # compiled or scripted
        return
    try:
        signature.bind(*step.call.args, **step.call.kwargs)
    except TypeError as error:
        given = ", ".join(step.call.kwargs) or format_count(len(step.call.args), "item")
        raise TypeError(
            f"A batch is what the model is called with, and {class_name(model)}.forward takes "
            f"{signature}, but the batch has {given}: {error}. Give the inputs alone; labels that "
            "the model does not take go to the loss: loss=lambda out: criterion(out, labels)"
        ) from None


def check_source_of_times(like: Any, spill: bool, on_meta: bool) -> None:
    """Refuse `like=` and `spill=` that do not go with the device."""
    if like is not None and not on_meta:
        raise ValueError('like= is for device="meta": elsewhere, times are measured')
    if like is not None and not isinstance(like, str | Device | Profile):
        raise TypeError(
            f"like should be the name of a device or a profile, but got {type(like).__name__}"
        )
    if spill and on_meta:
        raise ValueError('spill=True is for a real device: with device="meta" no disk is measured')


def refuse_without_memory(model: nn.Module) -> None:
    """Refuse a model on the meta device: there is nothing to measure."""
    for name, parameter in model.named_parameters():
        if is_without_memory(parameter):
            raise ValueError(
                f"{name} has no memory: there is nothing to measure. "
                'With device="meta", and like="H200" or such, it is profiled all the same.'
            )


def check_options(optimizer: Any, spill: Any, exact: Any = True) -> None:
    """Refuse an optimizer, `spill=` or `exact=` of another type."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise TypeError(
            "optimizer should be an optimizer, as torch.optim.AdamW(model.parameters()), but got "
            f"{'the class ' if kind is optimizer else ''}{kind.__name__}"
        )
    if not isinstance(spill, bool):
        raise TypeError(f"spill should be True or False, but got {type(spill).__name__}")
    if not isinstance(exact, bool):
        raise TypeError(f"exact should be True or False, but got {type(exact).__name__}")


def is_meta(device: Any) -> bool:
    """Return whether `device=` asks for a profile on fake tensors."""
    if device is None:
        return False
    if isinstance(device, str | torch.device) and str(device) == "meta":
        return True
    raise ValueError(f'device should be "meta", or nothing to measure, but got {device!r}')


def check_given_profile(profile: Any, model: nn.Module, batch: Any, loss: Loss | None) -> None:
    """Refuse a profile that is not of this model, batch and loss."""
    if not isinstance(profile, Profile):
        raise TypeError(f"profile should be a Profile, but got {type(profile).__name__}")
    if profile.model not in (class_name(model), type(model).__name__):
        raise ValueError(
            f"The profile is of a {profile.model}, but the model is a {class_name(model)}"
        )
    check_compiled(model, None, on_meta=False)
    paths = {path for path, _ in profile.order}
    if set(profile.compiled) != set(compiled_paths(model, paths)):
        were = "compiled" if profile.compiled else "not compiled"
        raise ValueError(
            f"The profile is of blocks that were {were}, and now other ones are: compiled code "
            "saves other activations. Profile the model as it is now"
        )
    shapes = TrainingStep(model, batch).describe_batch()
    if profile.batch != shapes:
        raise ValueError(f"The profile is of a batch {profile.batch}, but the batch is {shapes}")
    if (profile.loss == "given") != (loss is not None):
        had = "with" if profile.loss == "given" else "without"
        raise ValueError(
            f"The profile was measured {had} loss=, and fit is called the other way: give the same "
            "loss to both"
        )


def say_if_in_eval_mode(model: nn.Module) -> None:
    """Log a warning if a model that is fitted is in eval mode, which is seldom meant."""
    if isinstance(model, nn.Module) and not model.training and is_first_rank():
        _log.warning(
            "%s is in eval mode, and is planned so: without dropout, and with the running "
            "statistics of batch norm. To plan for training, call model.train() before fit",
            class_name(model),
        )


def has_spill_candidates(profile: Profile) -> bool:
    """Return whether a profile has candidates that move results to disk."""
    return any(each.tier == "disk" for block in profile.blocks for each in block.candidates)


def need_scipy() -> None:
    """Raise an `ImportError` that says what to install, without scipy."""
    if find_spec("scipy") is None:
        raise ImportError(
            "A plan needs scipy (its HiGHS), which is not installed: pip install scipy"
        )
