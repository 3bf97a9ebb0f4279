"""Functions that `torch.compile` made: the function inside, and the options it was given."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class CompileOptions:
    """The options of one `torch.compile`, by which other functions can be compiled.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """

    backend: Any
    """A function of a graph and inputs; equal ones share what was compiled."""
    fullgraph: bool
    dynamic: bool | None
    guard_filter: Any = None
    settings: Any = None
    """The options of the backend, as `mode=` and `options=` made them."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompileOptions) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]  # torch's backends have none

    def _key(self) -> tuple[Any, ...]:
        return self.backend, self.fullgraph, self.dynamic, self.guard_filter

    @property
    def is_inductor(self) -> bool:
        """True if the backend is torch's own compiler."""
        return getattr(self.backend, "compiler_name", "") == "inductor"

    @property
    def captures_cuda_graphs(self) -> bool:
        """True if the backend records CUDA graphs, as with `mode="reduce-overhead"`."""
        own = getattr(self.backend, "config", None) or {}
        if "triton.cudagraphs" in own:
            return bool(own["triton.cudagraphs"])
        if getattr(self.backend, "compiler_name", "") == "cudagraphs":
            return True
        if not self.is_inductor:
            return False
        from torch._inductor import config  # noqa: PLC0415 (slow to import)

        return bool(config.triton.cudagraphs)

    def compile(self, function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
        """Return a function compiled by these options, but for the backend."""
        context = torch._dynamo.optimize(
            backend=backend,
            nopython=self.fullgraph,
            dynamic=self.dynamic,
            guard_filter_fn=self.guard_filter,
        )
        compiled: Callable[..., Any] = context(function)
        return compiled


def compile_options(compiled: Any) -> CompileOptions | None:
    """The options that a function, or a module's `_compiled_call_impl`, was compiled by.

    None for what is not compiled. The function that `torch.compile` returns holds them in its
    closure. Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    context = _context_of(compiled)
    if context is None:
        return None
    from torch._dynamo.eval_frame import innermost_backend  # noqa: PLC0415 (slow to import)

    return CompileOptions(
        innermost_backend(context.callback),
        bool(getattr(context, "fullgraph", False)),
        getattr(context, "_dynamic", None),
        getattr(getattr(context, "_hooks", None), "guard_filter_fn", None),
        getattr(context, "compiler_config", None),
    )


def _context_of(compiled: Any) -> Any:
    """The object that holds the options; None for what is not compiled, or has them disabled."""
    if not isinstance(compiled, FunctionType) or original_of(compiled) is None:
        return None
    cells = zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True)
    held = dict(cells).get("self")
    context = None if held is None else held.cell_contents
    return context if callable(getattr(context, "callback", None)) else None


def original_of(compiled: Any) -> Callable[..., Any] | None:
    """The function that was compiled; None for one that is not compiled.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    found: Callable[..., Any] | None = getattr(compiled, "_torchdynamo_orig_callable", None)
    return found


def compiles_backwards() -> bool:
    """True inside a context of `torch._dynamo.compiled_autograd`, on any thread.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def compiled_call(module: nn.Module) -> Any:
    """The call that `module.compile()` put in the place of the module's own; None without it.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return vars(module).get("_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Put back what `compiled_call` returned, or take it away by None.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        vars(module)["_compiled_call_impl"] = call
