"""Torch's module of activation wrappers, which FSDP and libraries use."""

from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

torch_wrappers = checkpoint_wrapper
"""The module with `checkpoint_wrapper`, `CheckpointWrapper` and the like.

Tried on torch 2.11 and 2.13. Goes when it has a public path."""
