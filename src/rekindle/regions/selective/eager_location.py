"""The place of an op in the user's code: its module, the functions around it, their names.

All of it is looked up only when a policy asks. The modules that are being called now are on
Python's stack, and so is the `forward` of an `autograd.Function`: nothing has to be hooked.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from rekindle.regions.base import current, region_code_ids
from rekindle.regions.recompute.ambient import names
from rekindle.regions.selective import graph_location
from rekindle.torch_private.autograd_graph import function_class
from rekindle.torch_private.fx_nodes import runs_a_node
from rekindle.torch_private.module_calls import MODULE_CALL
from rekindle.torch_private.torch_checkpoint import TorchSelectiveContext


class SelectiveCheckpointContext(TorchSelectiveContext):
    """The first argument of a policy function: as torch's, and the place of the op.

    >>> import torch, rekindle
    >>> def policy(ctx, op, *args, **kwargs):
    ...     return ctx.module_path.startswith("mlp") and ctx.index == 0
    """

    def __init__(
        self,
        *,
        is_recompute: bool,
        op_output: Any = None,
        op: Any = None,
        index: int = 0,
        number: int = -1,
        region: Any = None,
        state: dict[Any, Any] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output
        self.op = op
        self.args = args
        self.kwargs = kwargs or {}
        self.index = index
        """Number of runs of this op before, in this call of the region."""
        self.number = number
        """Number of ops before, in this call of the region, that can be run again."""
        self.region = region
        """The region that runs; not for policies of users."""
        self.state: dict[Any, Any] = {} if state is None else state
        """A dict for the policy to write to, new for each call of a region."""
        self.is_compiled = False
        """True if torch's compiler asks, which may recompute what a policy prefers to keep."""

    @functools.cached_property
    def module_path(self) -> str:
        """The path of the module that runs, from the outermost that does, as in `layers.3.mlp`."""
        return graph_location.module_path() if runs_a_node() else module_path()

    @functools.cached_property
    def path_in_region(self) -> str | None:
        """The path of the module that runs from the region's own module; None if it has none."""
        if self.region is None:
            return None
        return graph_location.path_under(self.region) if runs_a_node() else path_in(self.region)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions that run, given by `rekindle.name`, the innermost last."""
        return graph_location.names() if runs_a_node() else names.get()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the op made."""
        made = _tensors(self.op_output)
        return sum(tensor.numel() * tensor.element_size() for tensor in made)

    @property
    def requires_grad(self) -> bool:
        """True if autograd follows the op; what backward does not need is not held in any case."""
        given = _tensors([*self.args, *self.kwargs.values()])
        return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, tuple | list):
        return [tensor for item in tree for tensor in _tensors(item)]
    return []


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


_paths: "WeakKeyDictionary[nn.Module, dict[int, str]]" = WeakKeyDictionary()
"""The paths of a module's descendants, by their ids."""


def _path_in(parent: nn.Module, child: nn.Module) -> str:
    path = _paths.get(parent, {}).get(id(child))
    if path is not None:
        with suppress(AttributeError):
            if parent.get_submodule(path) is child:
                return path
    paths = _paths[parent] = {id(module): path for path, module in parent.named_modules()}
    return paths.get(id(child), type(child).__name__)


def module_path() -> str:
    """The path of the module that is being called now, from the outermost that is.

    A replay calls a region from elsewhere than the forward did. So in forward the path down to each
    region around is left with it, and in replay the path goes on from there.
    """
    modules: list[nn.Module] = []
    above = ""
    regions: list[tuple[Any, int]] = []
    running = current.get()
    for frame in _stack():
        code = frame.f_code
        if code is MODULE_CALL:
            modules.append(frame.f_locals["self"])
        elif id(code) in region_code_ids and running is not None:
            region = running.region
            if running.is_replay:
                above, parent = (None if region is None else region.path) or ("", None)
                module = None if parent is None else parent()
                if module is not None:
                    modules.append(module)
                break
            regions.append((region, len(modules)))
            running = running.outer
    for region, depth in regions:
        if region is not None and depth < len(modules):
            region.path = _joined(above, modules[depth:]), ref(modules[depth])
    return _joined(above, modules)


def path_in(region: Any) -> str | None:
    """The path of the module that is being called, from the module whose forward a region runs."""
    root = getattr(region.function, "__self__", None)
    if not isinstance(root, nn.Module):
        return None
    modules: list[nn.Module] = []
    running = current.get()
    for frame in _stack():
        if frame.f_code is MODULE_CALL:
            modules.append(frame.f_locals["self"])
        elif id(frame.f_code) in region_code_ids and running is not None:
            if running.region is region and not running.is_replay:
                return _joined("", [*modules, root])
            running = running.outer
    return None


def _joined(above: str, modules: list[nn.Module]) -> str:
    """The path through modules, the innermost first, of which the outermost is at `above`."""
    parts = [_path_in(parent, child) for child, parent in pairwise(modules)]
    return ".".join(part for part in (above, *reversed(parts)) if part)


def runs_one_of(functions: dict[CodeType, set[Any]]) -> bool:
    """Returns whether the forward of one of some `autograd.Function`s runs; by the code of each.

    Several may share their code: then its first argument, the context, tells whose it is.
    """
    if runs_a_node():
        return graph_location.runs_one_of(functions)
    for frame in _stack():
        classes = functions.get(frame.f_code)
        if classes is not None:
            names = frame.f_code.co_varnames
            context = frame.f_locals.get(names[0]) if names else None
            owner = function_class(type(context))
            if owner is None or any(issubclass(owner, cls) for cls in classes):
                return True
    return False


def inside(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that runs `function` under a name that policies see."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return graph_location.named_call(function, name, args, kwargs)
        before = names.get()
        try:
            names.set((*before, name))
            return function(*args, **kwargs)
        finally:
            names.set(before)

    return named
