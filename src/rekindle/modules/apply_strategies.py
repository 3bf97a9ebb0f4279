"""Strategies on the modules of a model: applied and removed in place, with no module replaced."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from rekindle.module_attachment import (
    detach,
    discard,
    remove_new_hooks,
    resume,
    snapshot_hooks,
    suspend,
)
from rekindle.modules import patterns
from rekindle.modules.applied import Applied, Entry
from rekindle.modules.blocks import blocks_of, is_a_list
from rekindle.modules.compiled_blocks import (
    close_blocks,
    open_blocks,
    restore_opened,
    snapshot_opened,
)
from rekindle.modules.forward import (
    forward_of,
    install_forward,
    parts_of,
    snapshot_forward,
    uninstall_forward,
)
from rekindle.modules.nested_strategies import strategies_to_run
from rekindle.modules.strategy_spelling import Spelling, strategy_of
from rekindle.modules.wrappers import ActivationWrapper
from rekindle.offload.owners import OffloaderSet, owner_of, process_owner, release
from rekindle.strategy import Recompute, RecomputeInTiles, Strategy, Tile


def apply_strategies(
    model: nn.Module,
    strategies: Spelling | Mapping[str, Spelling],
    attach: Callable[[], None] | None = None,
    offloaders: OffloaderSet | None = None,
    compiled: Iterable[str] | None = None,
) -> Applied:
    """Have a model's modules run by strategies, in place of those that were applied before.

    Args:
        model: a model, or a part of one.
        strategies: one for every block of the model, or a mapping from patterns of module paths.
        attach: called when all modules have their strategies. If it raises, or anything else does,
            the model is as before.
        offloaders: those that the modules use; without them the model has its own, which live until
            the strategies are removed.
        compiled: blocks that are compiled by themselves, of a model that is compiled: paths without
            wrappers. None: those that are now.
    """
    owned = owner_of(model) if offloaders is None else offloaders
    wanted = _wanted(model, strategies)
    _refuse_what_is_checkpointed(model, wanted)
    modules = {path: module for path, (module, _) in wanted.items()}
    run = strategies_to_run({path: strategy for path, (_, strategy) in wanted.items()})
    with _all_or_nothing(model, compiled):
        for module, strategy in {id(modules[p]): (modules[p], run[p]) for p in run}.values():
            install_forward(module, strategy, owned)
        for path, strategy in run.items():
            _install_parts(modules[path], strategy, owned)
        if attach is not None:
            attach()
    _forget_unused_offloaders(model, owned)
    first_paths = {id(module): path for path, module in reversed(modules.items())}
    return Applied(
        type(model).__name__,
        tuple(
            Entry(path, type(module).__name__, strategy)
            for path, (module, strategy) in wanted.items()
            if first_paths[id(module)] == path
        ),
    )


def _install_parts(module: nn.Module, strategy: Strategy, offloaders: OffloaderSet) -> None:
    """Have modules inside one be recomputed, or run in tiles, as its strategy says.

    Those that have a strategy of their own keep it.
    """
    for part in parts_of(module, strategy).values():
        if forward_of(part) is not None:
            continue
        if isinstance(strategy, RecomputeInTiles):
            install_forward(part, Tile(strategy.chunks), offloaders)
        else:
            install_forward(part, Recompute(), offloaders, is_part=True)


def _forget_unused_offloaders(model: nn.Module, owned: OffloaderSet) -> None:
    """Forget the offloaders of strategies that were applied before, to the model or parts of it."""
    forwards = [forward_of(module) for module in model.modules()]
    owned.retain({forward.offload_strategy for forward in forwards if forward is not None})
    release(module for module in model.modules() if module is not model)


@contextmanager
def _all_or_nothing(model: nn.Module, compiled: Iterable[str] | None) -> Iterator[None]:
    """Take away the strategies of a model; if the body raises, they are put back."""
    modules = list(model.modules())
    forwards = [snapshot_forward(module) for module in modules]
    hooks = snapshot_hooks(model)
    suspended, opened = suspend(model), snapshot_opened(model)
    try:
        for module in modules:
            uninstall_forward(module)
        if compiled is not None:
            close_blocks(model)
            open_blocks(model, compiled)
        yield
    except BaseException:
        for module in modules:
            uninstall_forward(module)
        restore_opened(model, opened)
        for module, was in zip(modules, forwards, strict=True):
            detach(module)
            was.put_back()
        remove_new_hooks(hooks)
        resume(suspended)
        raise
    discard(suspended)


def remove_strategies(model: nn.Module) -> None:
    """Undo `apply_strategies`, and give back host memory and disk that nothing uses."""
    forwards = [forward_of(module) for module in model.modules()]
    undo(model)
    close_blocks(model)
    release(model.modules())
    for owner in {forward.offloaders for forward in forwards if forward is not None}:
        owner.trim()
    process_owner.trim()


def compile_blocks_alone(model: nn.Module, paths: Iterable[str]) -> None:
    """Undo strategies, and compile some blocks by themselves, of a model that is compiled."""
    undo(model)
    close_blocks(model)
    open_blocks(model, paths)


def undo(model: nn.Module) -> None:
    """Undo `apply_strategies`; host memory and disk stay set aside, to be used again soon."""
    for module in model.modules():
        uninstall_forward(module)
        detach(module)


_Wanted = dict[str, tuple[nn.Module, Strategy]]


def _wanted(model: nn.Module, given: Any) -> _Wanted:
    """The modules that are named, by path, each with its strategy."""
    if not isinstance(given, Mapping):
        strategy = strategy_of(given)
        return {path: (block, strategy) for path, block in blocks_of(model).items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    strategies: dict[str, Strategy] = {}
    for pattern, spelling in given.items():
        if not isinstance(pattern, str):
            raise TypeError(f"A pattern is a string, but got {pattern!r}")
        strategies[pattern] = strategy_of(spelling)
        _check_matches(pattern, modules)
    wild = filter(patterns.has_wildcards, strategies)
    ordered = sorted(wild, key=patterns.specificity, reverse=True)
    found: _Wanted = {}
    for path, module in modules.items():
        named = path in strategies  # nothing is more specific than the path itself
        pattern = path if named else next((p for p in ordered if patterns.matches(path, p)), None)
        if pattern is not None and not is_a_list(module):
            found[path] = module, strategies[pattern]
    _check_shared(found)
    for module, strategy in found.values():
        parts_of(module, strategy)  # an error if it names a module that is not there
    return found


def _check_matches(pattern: str, modules: dict[str, nn.Module]) -> None:
    if pattern in modules:
        named = [modules[pattern]]
    else:
        named = [module for path, module in modules.items() if patterns.matches(path, pattern)]
    if not named:
        raise patterns.no_match(pattern, modules)
    if all(map(is_a_list, named)):
        raise patterns.names_a_list(pattern)


def _check_shared(wanted: _Wanted) -> None:
    first: dict[int, str] = {}
    for path, (module, strategy) in wanted.items():
        other = first.setdefault(id(module), path)
        if wanted[other][1] != strategy:
            raise ValueError(
                f"{other} and {path} are one module, but it is given two strategies: "
                f"{wanted[other][1]} and {strategy}"
            )


def _refuse_what_is_checkpointed(model: nn.Module, wanted: _Wanted) -> None:
    """Refuse a module that is checkpointed already: it would be replayed in a replay."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, (named, _) in wanted.items():
        around = [modules[outer] for outer in patterns.outer_paths(path)]
        for module in [*around, *named.modules()]:
            if isinstance(module, ActivationWrapper):
                raise ValueError(
                    f"{path or type(model).__name__} is, contains or is in a "
                    f"{type(module).__name__}: unwrap it, or leave it out"
                )
            if getattr(module, "gradient_checkpointing", False) is True:
                raise ValueError(
                    f"{path or type(model).__name__} is checkpointed by the model itself "
                    f"({type(module).__name__}.gradient_checkpointing): call "
                    "gradient_checkpointing_disable() first, or give a Trainer "
                    "TrainingArguments(gradient_checkpointing=False)"
                )
