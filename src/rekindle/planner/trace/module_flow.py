"""The flow of a forward through a model's modules: the bytes that each makes, and who feeds whom.

The forward runs without gradients, so that it holds less than any training step.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.planner.instruments.memory_meter import storages_of
from rekindle.planner.nested_tensors import tensors_in
from rekindle.planner.training_step import TrainingStep
from rekindle.rows.row_tensor import runs_by_rows
from rekindle.torch_private.dispatch_modes import TorchDispatchMode
from rekindle.torch_private.dynamo_frames import no_graph_begins, within_compiled_code
from rekindle.torch_private.pytrees import tree_leaves
from rekindle.torch_private.storages import storage_key


@dataclass
class ModuleCalls:
    """The calls of one module in a forward."""

    first: int
    """Its place among the modules, in the order of their first calls."""
    count: int = 0
    made: int = 0
    """Bytes that ops made in all of its calls."""
    most_made: int = 0
    """Bytes that ops made in the largest of its calls."""
    returned: int = 0
    """Bytes of what its calls returned, and were not given."""
    fed_by: int = 0
    """The modules whose outputs its inputs were made from: a bit for each, by `first`."""


@dataclass(frozen=True)
class ModuleFlow:
    """The calls of the modules that ran in a forward, by path."""

    calls: dict[str, ModuleCalls]
    made: int
    """Bytes that ops made in the whole forward."""

    def share(self, nbytes: int) -> float:
        """Bytes as a share of all that the forward made."""
        return nbytes / max(self.made, 1)

    def made_in(self, paths: Iterable[str]) -> int:
        """Bytes that ops made in some modules, none of which is inside another."""
        return sum(self.calls[path].made for path in paths if path in self.calls)

    def is_chain(self, paths: Iterable[str]) -> bool:
        """Return whether modules ran, and each was given what was made from the one before.

        The experts of a mixture are no chain: all are given the same tokens.
        """
        if not all(path in self.calls for path in paths):
            return False
        ran = sorted((self.calls[path] for path in paths), key=lambda calls: calls.first)
        return all(after.fed_by >> before.first & 1 for before, after in pairwise(ran))


def module_flow(step: TrainingStep, modules: Mapping[str, nn.Module]) -> ModuleFlow:
    """Run a forward without gradients, and return its flow through some modules."""
    recorder = _FlowRecorder()
    with ExitStack() as stack:
        for path, module in modules.items():
            before = _in_plain_calls(partial(recorder.before_module, path))
            after = _in_plain_calls(recorder.after_module)
            for hook in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ):
                stack.callback(hook.remove)
        stack.callback(torch.clear_autocast_cache)
        with recorder, torch.no_grad():
            step.run_forward()
    return ModuleFlow(recorder.calls, recorder.made)


def _in_plain_calls(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's hook that runs in calls of this thread, outside of compiled code."""
    thread = get_ident()

    @no_graph_begins
    def run(*args: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != thread or within_compiled_code():
            return
        hook(*args)

    return run


@dataclass
class _RunningCall:
    module: nn.Module
    calls: ModuleCalls
    made_before: int


class _FlowRecorder(TorchDispatchMode):
    """Counts the bytes that ops make, and follows which outputs of modules they are made from.

    It holds no storage.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, ModuleCalls] = {}
        self.made = 0
        self._running: list[_RunningCall] = []
        self._made_from: dict[int, int] = {}
        """By the keys of storages that ops made and that are alive: the modules whose outputs they
        were made from, as `ModuleCalls.fed_by`."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def before_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what a module is given."""
        calls = self.calls.setdefault(path, ModuleCalls(first=len(self.calls)))
        given = _keys(tensors_in((args, kwargs)))
        calls.fed_by |= self._sources(given)
        self._running.append(_RunningCall(module, calls, self.made))

    def after_module(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Note what a module made, and mark what it returns."""
        running = self._running.pop()
        while running.module is not module:  # one that failed, and whose error was caught
            running = self._running.pop()
        calls, made = running.calls, self.made - running.made_before
        calls.count += 1
        calls.made += made
        calls.most_made = max(calls.most_made, made)
        given = _keys(tensors_in((args, kwargs)))
        for storage in _storages(tensors_in(out)):
            key = storage_key(storage)
            if key not in given:
                given.add(key)
                calls.returned += storage.nbytes()
            if key in self._made_from:
                self._made_from[key] |= 1 << calls.first

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if runs_by_rows(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        given = _keys((args, kwargs))
        sources = self._sources(given)
        for storage in _storages(result):
            key = storage_key(storage)
            if key not in given and key not in self._made_from:
                self.made += storage.nbytes()
                self._made_from[key] = 0
                weakref.finalize(storage, self._made_from.pop, key, None)
            if key in self._made_from:
                self._made_from[key] |= sources
        return result

    def _sources(self, keys: Iterable[int]) -> int:
        """The modules whose outputs some storages were made from."""
        found = 0
        for key in keys:
            found |= self._made_from.get(key, 0)
        return found


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [storage for tensor in tensors for storage in storages_of(tensor)]


def _keys(values: Any) -> set[int]:
    return {storage_key(storage) for storage in _storages(values)}
