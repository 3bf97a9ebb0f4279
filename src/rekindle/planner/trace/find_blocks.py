"""Finds the blocks that a plan treats one by one: layers, also inside of stages, stems and heads.

```
blocks that repeat ─┬─ layers ───────────────────────────────▶ blocks
                    └─ stages: chains of layers ─cut─▶ layers ▶ blocks
other modules ──────── those that make many bytes ────────────▶ blocks
```

Lists of modules show which modules repeat. Whether one of these is a stage, which is better planned
layer by layer, and which other modules are worth a block, a forward shows: it is run if the answer
is not clear from the modules alone.
"""

import logging
from collections.abc import Iterator

from torch import nn

from rekindle.modules.blocks import blocks_of, is_a_block, unwrapped_blocks
from rekindle.modules.patterns import is_inside
from rekindle.modules.unwrapping import class_name, unwrapped
from rekindle.planner.ranks.rank_sync import all_gather, is_first_rank
from rekindle.planner.trace.module_flow import ModuleFlow, module_flow
from rekindle.planner.training_step import TrainingStep
from rekindle.torch_private.dynamo_frames import is_compiled

_log = logging.getLogger("rekindle")

_LARGE = 1 / 8
"""A block that makes more than this share of a forward's bytes is large: recomputing it takes that
memory again."""
_MOST_OF_A_STAGE = 3 / 4
"""A stage is cut if its layers make this share of its bytes: what is between them stays held."""
_MOST_OF_A_MODULE = 1 / 2
"""As above, of a module that does not repeat."""
_WORTH_A_BLOCK = 1 / 50
"""A module that does not repeat is a block if it makes this share of a forward's bytes beyond what
it returns."""

Modules = dict[str, nn.Module]
"""Modules by their paths without wrappers."""


def find_blocks(step: TrainingStep) -> Modules:
    """Return the blocks of a step's model, by their paths without wrappers; ranks agree on them."""
    repeated = unwrapped_blocks(step.model)
    model = unwrapped(step.model)
    modules = dict(_modules(model, ""))
    if not _needs_a_forward(modules, repeated):
        return repeated
    flow = _flow(step, modules)
    own = None if flow is None else list(_Cutter(modules, flow).blocks())
    of_ranks = all_gather(own)
    if any(paths is None for paths in of_ranks):
        return repeated
    paths = of_ranks[0] or [""]
    if "" in repeated and is_first_rank():
        parts = "one block" if paths == [""] else f"{len(paths)} blocks, by its tree of modules"
        _log.info("%s has no layers that repeat: it is planned as %s", class_name(model), parts)
    return {path: modules[path] for path in paths}


def _needs_a_forward(modules: Modules, repeated: Modules) -> bool:
    """Return whether a forward may show other blocks than those that repeat."""
    if "" in repeated:
        return any(path and is_a_block(module) for path, module in modules.items())
    if any("" not in blocks_of(block) for block in repeated.values()):
        return True
    return any(
        is_a_block(module) and not any(path == b or is_inside(path, b) for b in repeated)
        for path, module in modules.items()
        if not any(is_inside(b, path) for b in repeated)
    )


def _flow(step: TrainingStep, modules: Modules) -> ModuleFlow | None:
    """Return the flow of a forward; None if it fails without gradients, as some do."""
    watched = {path: m for path, m in modules.items() if is_a_block(m) or not path}
    try:
        return module_flow(step, watched)
    except RuntimeError as error:  # if it is an error with gradients, too, the next step raises it
        _log.info("Blocks are those that repeat: a forward without gradients failed: %s", error)
        return None


def _modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and those inside, without wrappers, by path; nothing that is inside a compiled one.

    A module with several paths is at the first.
    """
    seen: set[nn.Module] = set()
    pending = [(path, unwrapped(module))]
    while pending:
        path, module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        if not is_compiled(module):
            inside = [
                (n, unwrapped(child)) for n, child in module._modules.items() if child is not None
            ]
            pending += [(f"{path}.{n}" if path else n, child) for n, child in reversed(inside)]


class _Cutter:
    """Cuts a model into blocks, by the flow of a forward."""

    def __init__(self, modules: Modules, flow: ModuleFlow) -> None:
        self._modules = modules
        self._flow = flow

    def blocks(self) -> list[str]:
        """The paths of the blocks, in the order of the modules; none if the model is one itself."""
        repeated = set(self._repeated(""))
        found = set(self._inside("") if repeated or self._is_divisible("") else ())
        return [path for path in self._modules if path in found]

    def _repeated(self, path: str) -> list[str]:
        """Paths of the modules that repeat inside one, the outermost ones."""
        found = unwrapped_blocks(self._modules[path])
        if "" in found:
            return []
        paths = (f"{path}.{name}" if path else name for name in found)
        return [each for each in paths if each in self._modules]

    def _inside(self, path: str) -> Iterator[str]:
        """Blocks inside a module that is none itself."""
        repeated = self._repeated(path)
        for each in repeated:
            if self._is_large(each) and self._is_stage(each):
                yield from self._inside(each)
            else:
                yield each
        for each in self._parts(path, repeated):
            calls = self._flow.calls[each]
            if self._is_large(each) and self._is_divisible(each):
                yield from self._inside(each)
            elif self._flow.share(calls.made - calls.returned) >= _WORTH_A_BLOCK:
                yield each

    def _is_large(self, path: str) -> bool:
        calls = self._flow.calls.get(path)
        return calls is not None and self._flow.share(calls.most_made) > _LARGE

    def _is_stage(self, path: str) -> bool:
        """Return whether a module is a chain of layers, which make most of its bytes."""
        layers = self._repeated(path)
        if not layers or not self._flow.is_chain(layers):
            return False
        return self._makes_most(path, layers, _MOST_OF_A_STAGE)

    def _makes_most(self, path: str, inside: list[str], most: float) -> bool:
        made = self._flow.made_in([path])
        return bool(made) and self._flow.made_in(inside) >= most * made

    def _parts(self, path: str, repeated: list[str]) -> list[str]:
        """The outermost modules inside one that ran, and neither repeat nor hold those that do."""
        found: list[str] = []
        for each, module in self._modules.items():
            if not is_inside(each, path) or each not in self._flow.calls:
                continue
            if not is_a_block(module) or any(is_inside(r, each) for r in repeated):
                continue
            if any(each == other or is_inside(each, other) for other in (*repeated, *found)):
                continue
            found.append(each)
        return found

    def _is_divisible(self, path: str) -> bool:
        """Return whether several calls of parts of a module make most of its bytes."""
        parts = self._parts(path, [])
        count = sum(self._flow.calls[part].count for part in parts)
        return count > 1 and self._makes_most(path, parts, _MOST_OF_A_MODULE)
