"""Arguments of distinct blocks, collected in a forward: each block is later run alone with them.

Each block is given copies of the tensors that it is handed, so that it holds the copies, if
anything. When the next block begins, the originals are freed, or something other than the block
holds them: that tells how many bytes of a block's input live no longer than its forward.
"""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, UntypedStorage, nn

from rekindle.planner.instruments.cast_cache import as_activations, forward_in_ambient
from rekindle.planner.instruments.memory_meter import storages_of
from rekindle.planner.instruments.model_lock import for_this_thread
from rekindle.planner.nested_tensors import map_tensors, tensors_in
from rekindle.planner.ranks.rank_sync import wait_for_all_ranks
from rekindle.planner.trace.block_outputs import OutputUse
from rekindle.planner.trace.block_signature import block_key
from rekindle.planner.trace.op_digest import OpDigest, OpDigests, op_digests
from rekindle.planner.trace.stand_in_copies import StandInCopies
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import BlockKey
from rekindle.regions.recompute import ambient
from rekindle.torch_private.fsdp import sharded_parameters
from rekindle.torch_private.storages import storage_key

Arguments = tuple[Any, Any]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class BlockCall:
    """One call of a block: what it takes to run the block alone."""

    block: nn.Module
    arguments: Arguments
    """Without the graphs behind them."""
    ambient: ambient.Ambient
    """The state around the call, such as autocast."""
    output_uses: tuple[OutputUse, ...] = ()
    """The step's use of each tensor of the output; empty if that is not known."""

    def fresh_arguments(self) -> Arguments:
        """Return the arguments as results of ops that no run of the block has used."""
        args, kwargs = as_activations(without_graph(self.arguments))
        return args, kwargs

    def used_outputs(self, out: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of an output that a step uses, and those of them that it trains.

        The others are freed, and get no gradient.
        """
        tensors = tensors_in(out)
        uses = self.output_uses
        if len(uses) != len(tensors):
            uses = (OutputUse(),) * len(tensors)
        pairs = list(zip(tensors, uses, strict=True))
        used = [tensor for tensor, use in pairs if use.lives or use.has_gradient]
        return used, [t for t, use in pairs if use.has_gradient and t.requires_grad]

    def entered(self) -> AbstractContextManager[None]:
        """Enter the ambient state for one forward."""
        return forward_in_ambient(self.ambient)


@dataclass(frozen=True)
class CollectedCalls:
    """The calls of one forward."""

    order: tuple[str, ...]
    """Paths of the blocks, in the order of their calls."""
    keys: dict[str, BlockKey]
    """The key of each block's first call, by path."""
    calls: dict[BlockKey, BlockCall]
    """The first call with each key."""
    passed: tuple[int, ...]
    """Bytes that each block is given by the one before, and that nothing else holds."""


def collect_calls(step: TrainingStep, blocks: dict[str, nn.Module]) -> CollectedCalls:
    """Run a forward, and collect the calls of distinct blocks."""
    with ExitStack() as stack:
        collector = _CallCollector(stack.enter_context(op_digests()))
        for path, block in blocks.items():
            before = for_this_thread(partial(collector.before_block, path))
            hooks = (  # around those that gather a block's parameters, but digests are inside
                block.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                block.register_forward_pre_hook(for_this_thread(collector.before_ops)),
                block.register_forward_hook(for_this_thread(collector.after_ops), prepend=True),
                block.register_forward_hook(for_this_thread(collector.after_block)),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        stack.callback(collector.put_back_originals)
        loss = step.loss()
        collector.end_forward()
    wait_for_all_ranks()  # before a backward that one may not come to
    if sharded_parameters(step.model):
        loss.backward()  # FSDP minds a forward without one
    return CollectedCalls(
        tuple(collector.order), collector.keys, collector.calls, tuple(collector.passed)
    )


_WeakStorage = weakref.ref[UntypedStorage]


@dataclass
class _RunningCall:
    """A call of a block that runs."""

    path: str
    call: BlockCall
    copies: StandInCopies
    digest: OpDigest | None = None
    """The digest of its ops so far; None if the block's key is known."""


class _CallCollector:
    """Collects calls by hooks of blocks; it holds no storage but those of the calls."""

    def __init__(self, digests: OpDigests) -> None:
        self.order: list[str] = []
        self.keys: dict[str, BlockKey] = {}
        self.calls: dict[BlockKey, BlockCall] = {}
        self.passed: list[int] = []
        self._digests = digests
        self._running: list[_RunningCall] = []
        """Calls of blocks that run, the innermost last."""
        self._inputs: list[_WeakStorage] = []
        """Storages that the running block was given."""
        self._outputs: list[_WeakStorage] = []
        """Storages that the last block returned and was not given itself."""
        self._from_last: list[tuple[_WeakStorage, int]] | None = None
        """Storages that the running block was given by the one before, with their bytes; None
        before the first block."""

    def before_block(self, path: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Copy what the block before returned, and note the first call of each block."""
        self._count_passed()
        self.order.append(path)
        outputs = _keys(self._outputs)
        from_last: dict[int, tuple[_WeakStorage, int]] = {}

        def is_copied(tensor: Tensor) -> bool:
            passed = [s for s in storages_of(tensor) if storage_key(s) in outputs]
            for storage in passed:
                from_last[storage_key(storage)] = weakref.ref(storage), storage.nbytes()
            return bool(passed)

        copies = StandInCopies(is_copied)
        given = copies.put_into(args, kwargs)
        self._from_last = list(from_last.values())
        # The originals too: what a block returns of them, in a list of its caller, it did not make.
        self._inputs = _weak_storages((given, copies.originals))
        call = BlockCall(block, without_graph(given), ambient.snapshot())
        self._running.append(_RunningCall(path, call, copies))
        return given

    def before_ops(self, _block: nn.Module, _args: Any) -> None:
        """Begin the digest of a block's ops, if the block has not run before."""
        running = self._running[-1]
        if running.path not in self.keys:
            running.digest = self._digests.begin()

    def after_ops(self, block: nn.Module, _args: Any, _out: Any) -> None:
        """End the digest of a block's ops, and keep the first call with each key."""
        running = self._end_call()
        while running.call.block is not block:  # one that failed, and whose error was caught
            running = self._end_call()
        if running.digest is None:
            return
        call, ops = running.call, self._digests.finish(running.digest)
        key = block_key(block, call.arguments, call.ambient, ops)
        if running.path not in self.keys:
            self.keys[running.path] = key
            self.calls.setdefault(key, call)

    def _end_call(self) -> _RunningCall:
        running = self._running.pop()
        running.copies.put_back()
        return running

    def put_back_originals(self) -> None:
        """Put originals back that calls which failed have left copies of."""
        while self._running:
            self._end_call()

    def after_block(self, _block: nn.Module, _args: Any, out: Any) -> None:
        """Note the storages that a block made."""
        # What a block returns as it was given is copied once: a copy for each block would be
        # memory of its own.
        through = _keys(self._inputs)
        self._outputs = [weak for weak in _weak_storages(out) if not _keys([weak]) & through]

    def _count_passed(self) -> None:
        if self._from_last is not None:
            self.passed.append(sum(nbytes for weak, nbytes in self._from_last if weak() is None))

    def end_forward(self) -> None:
        """Count the last block; like the one before it, if that one's input is freed."""
        self._count_passed()
        if self.passed:
            self.passed[-1] = min(self.passed[-2:])


def _weak_storages(values: Any) -> list[_WeakStorage]:
    """Weak references to the storages of the tensors among some values."""
    return [
        weakref.ref(storage) for tensor in tensors_in(values) for storage in storages_of(tensor)
    ]


def _keys(weak_storages: Iterable[_WeakStorage]) -> set[int]:
    """The keys of those storages that are alive."""
    return {storage_key(storage) for weak in weak_storages if (storage := weak()) is not None}


def without_graph(arguments: Arguments) -> Arguments:
    """Return the arguments with leaves in the place of tensors, which share their memory."""
    leaves: Arguments = map_tensors(_as_leaf, arguments)
    return leaves


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
