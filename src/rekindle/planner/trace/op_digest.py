"""Digests of the ops that blocks run in a forward, by which blocks that run the same ops are found.

A digest covers each op's name, its flags, and the shapes, dtypes, strides and devices of the
tensors it is given and returns. Numbers among the arguments do not count: a rate of dropout changes
neither bytes nor seconds.

Note [Where a digest ends]. The values of tensors may decide which ops run: an expert of a mixture
gets as many tokens as its layer routes to it, and none if it gets none. So a digest ends at the
first op whose result has a shape, or is a Python number, that depends on values. Layers that route
tokens in other ways are one kind of block then.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rekindle.regions.selective.op_addresses import is_parameter
from rekindle.rows.row_tensor import runs_by_rows
from rekindle.torch_private.dispatch_modes import (
    ASKS_DEVICE,
    TorchDispatchMode,
    is_traced,
    reads_metadata,
)
from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.pytrees import tree_leaves


class OpDigest:
    """The digest of the ops that ran since it was made."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._has_ended = False

    def add(self, op: str) -> None:
        """Add an op, unless the digest has ended."""
        if not self._has_ended:
            self._hash.update(op.encode() + b"\n")

    def end(self) -> None:
        """Add no further op: Note [Where a digest ends]."""
        self._has_ended = True

    def text(self) -> str:
        """The digest of all ops so far, in hexadecimal digits."""
        return self._hash.hexdigest()


class OpDigests(TorchDispatchMode):
    """Adds each op that runs to the digests that are open."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open: list[OpDigest] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def begin(self) -> OpDigest:
        """Return a new digest of what runs from now on."""
        digest = OpDigest()
        self._open.append(digest)
        return digest

    def finish(self, digest: OpDigest) -> str:
        """Return the text of a digest, to which no op is added from now on."""
        self._open.remove(digest)
        return digest.text()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if runs_by_rows(types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._open and _counts(func, args):
            leaves = tree_leaves((args, kwargs))
            ends = _depends_on_values(func, leaves)
            made = [] if ends else tree_leaves(out)
            op = " ".join([str(func), *_described(leaves), ">", *_described(made)])
            for digest in self._open:
                digest.add(op)
                if ends:
                    digest.end()
        return out


@contextmanager
def op_digests() -> Iterator[OpDigests]:
    """Enter a mode that digests what runs inside."""
    digests = OpDigests()
    with digests:
        yield digests


def _counts(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an op is one that the block runs itself, and at every call.

    Autocast casts a parameter in the block that uses it first, unless a cache has the cast, so
    casts of parameters do not count. Neither does the gathering of sharded parameters, which may
    have begun in the block before.
    """
    if func is ASKS_DEVICE or is_traced() or reads_metadata(func):
        return False
    if getattr(func, "namespace", None) in _GATHERING:
        return False
    return not (func is torch.ops.aten._to_copy.default and is_parameter(args[0]))


_GATHERING = ("c10d", "fsdp")


def _depends_on_values(func: Any, leaves: list[Any]) -> bool:
    """Return whether values of tensors decide the shape of an op's result, or are its result."""
    if func is torch.ops.aten.index.Tensor:
        return any(isinstance(leaf, Tensor) and leaf.dtype in _MASKS for leaf in leaves[1:])
    return _is_tagged(func)


_MASKS = (torch.bool, torch.uint8)
"""Dtypes of masks: an index by numbers has a result of the shape of the numbers."""


@cache
def _is_tagged(func: Any) -> bool:
    tags = getattr(func, "tags", ())
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _described(leaves: list[Any]) -> Iterator[str]:
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield _describe_tensor(leaf)
        elif isinstance(leaf, bool | torch.dtype):
            yield str(leaf)


def _describe_tensor(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype, device type and, where it has them, strides."""
    device = "cpu" if tensor.is_meta else tensor.device.type  # as that of the fake it will become
    text = f"{tensor.dtype}{list(tensor.shape)}{device}"
    if tensor.layout is not torch.strided:
        return f"{text}{tensor.layout}"
    if type(tensor) in (Tensor, FakeTensor) or is_parameter(tensor):
        # Where there is one element, kernels differ in the stride that they give it.
        strides = (s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
        return f"{text}{tuple(strides)}"
    return f"{text}{type(tensor).__name__}"
