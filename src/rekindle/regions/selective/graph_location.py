"""The module, functions and names that an op belongs to, read from the node of a graph.

A policy is asked while torch traces a flat graph that Dynamo has made of a region: no module is
being called by then, and no function runs. The origin of each op is written on its node.
"""

import re
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rekindle.torch_private.fx_nodes import annotated, node_meta
from rekindle.torch_private.module_calls import MODULE_CALL

_ROOT = re.compile(r"^[LG]\[.*?\](?:.*\.cell_contents)?")
_ITEM = re.compile(r"\._modules\[['\"]?([^\]'\"]*)['\"]?\]|\[['\"]?([^\]'\"]*)['\"]?\]")
_NO_PARTS = {"", "_orig_mod"}
_NAMES, _TENSOR = "rekindle_names", "rekindle_tensor"


def module_path() -> str:
    """The path of the op's module from the outermost module that is being called."""
    stack = node_meta().get("nn_module_stack") or {}
    if not stack:
        return ""
    key, (name, *_) = list(stack.items())[-1]
    root = _outermost()
    path = None if root is None else _path_of(str(key).partition("@")[0], root)
    return _tidy(_of_source(name) if path is None else path)


managed_forwards: "WeakValueDictionary[int, Any]" = WeakValueDictionary()
"""The `Forward`s in the place of modules' forwards, by the ids of the modules."""


def path_under(policy: Any) -> str | None:
    """The path of the op's module from the outermost one around it that has the policy."""
    stack = list(node_meta().get("nn_module_stack") or {})
    if not stack:
        return ""
    number = str(stack[-1]).partition("@")[0]
    around = [each.__self__ for each in list(managed_forwards.values()) if each.policy == policy]
    paths = [path for module in around if (path := _path_of(number, module)) is not None]
    return max(paths, key=len, default=None)


def _outermost() -> nn.Module | None:
    """The outermost module that is being called: the compiled one, or one that calls it."""
    found: nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


def _path_of(number: str, root: nn.Module) -> str | None:
    """The path of the module with this id."""
    paths = (path for path, module in root.named_modules() if str(id(module)) == number)
    return next(paths, None)


def _of_source(name: str) -> str:
    """The path in the expression by which Dynamo reached a module: `L['self'].layers.0`."""
    rest = _ROOT.sub("", name.replace(".forward._module()", ""))  # by way of what stands there
    return _ITEM.sub(lambda found: "." + (found[1] or found[2] or ""), rest)


def _tidy(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _NO_PARTS)


def runs_one_of(codes: Iterable[CodeType]) -> bool:
    """True if the op was traced in one of these functions, or in a function that they call."""
    trace: str = node_meta().get("stack_trace") or ""
    return any(_is_in(code, trace) for code in codes)


_FRAME = re.compile(r'File "(.*?)", line (\d+), in (.*)')


def _is_in(code: CodeType, trace: str) -> bool:
    lines = {line for _, _, line in code.co_lines() if line is not None}
    return any(
        file == code.co_filename and name == code.co_name and int(line) in lines
        for file, line, name in _FRAME.findall(trace)
    )


def named_call(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a function in code that is being compiled, and give its ops the name."""
    with annotated({f"{_NAMES}:{name}": name}):
        return function(*args, **kwargs)


def named_tensor(tensor: Tensor, name: str) -> Tensor:
    """A view of a tensor, in code that is being compiled, whose op has the name."""
    with annotated({_TENSOR: name}):
        alias: Tensor = torch.ops.aten.alias(tensor)
        return alias


def names() -> tuple[str, ...]:
    """The names of the functions that the op was traced in, the innermost last."""
    custom = node_meta().get("custom") or {}
    return tuple(name for key, name in custom.items() if key.startswith(_NAMES))


def tensor_name(op: Any) -> str | None:
    """The name that the op gives to its input, if it is a view made by `named_tensor`."""
    if op is not torch.ops.aten.alias.default:
        return None
    name: str | None = (node_meta().get("custom") or {}).get(_TENSOR)
    return name
