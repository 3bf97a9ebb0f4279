"""`checkpoint`: runs one call as a region, or as torch's operator where a graph is made of it.

It is below `modules`, which runs whole modules by it, and is public as `rekindle.checkpoint`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from rekindle import policies
from rekindle.compile.graph_breaks import run_outside_graphs
from rekindle.compile.hand_over import hand_over, is_exporting, run_traced
from rekindle.regions.meant_calls import is_decorated, note_option, refuse_policy
from rekindle.regions.recompute.reentrant import CheckpointFunction
from rekindle.regions.region_options import ContextFn, DeterminismCheck, Options, options_of
from rekindle.regions.run import run_checkpointed
from rekindle.torch_private.dynamo_frames import no_graph_begins, within_compiled_code
from rekindle.torch_private.dynamo_tracing import without_nested_graph_breaks
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.torch_checkpoint import noop_context_fn

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CheckpointDecorator(Protocol):
    """Makes a function run as a region at every call; its signature stays."""

    def __call__(self, function: Callable[_P, _R], /) -> Callable[_P, _R]: ...


# Without options, arguments are checked against the function's signature. With options they are
# not: types cannot say "the parameters of the function, and these". Each option has an overload
# that requires it, so that a call without any option reaches the last overload.


@overload
def checkpoint(
    function: Callable[..., _R],
    *args: Any,
    use_reentrant: bool,
    context_fn: ContextFn = ...,
    determinism_check: DeterminismCheck = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    preserve_rng_state: bool = ...,
    **kwargs: Any,
) -> _R: ...
@overload
def checkpoint(
    function: Callable[..., _R],
    *args: Any,
    use_reentrant: bool = ...,
    context_fn: ContextFn,
    determinism_check: DeterminismCheck = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    preserve_rng_state: bool = ...,
    **kwargs: Any,
) -> _R: ...
@overload
def checkpoint(
    function: Callable[..., _R],
    *args: Any,
    use_reentrant: bool = ...,
    context_fn: ContextFn = ...,
    determinism_check: DeterminismCheck,
    debug: bool = ...,
    early_stop: bool = ...,
    preserve_rng_state: bool = ...,
    **kwargs: Any,
) -> _R: ...
@overload
def checkpoint(
    function: Callable[..., _R],
    *args: Any,
    use_reentrant: bool = ...,
    context_fn: ContextFn = ...,
    determinism_check: DeterminismCheck = ...,
    debug: bool,
    early_stop: bool = ...,
    preserve_rng_state: bool = ...,
    **kwargs: Any,
) -> _R: ...
@overload
def checkpoint(
    function: Callable[..., _R],
    *args: Any,
    use_reentrant: bool = ...,
    context_fn: ContextFn = ...,
    determinism_check: DeterminismCheck = ...,
    debug: bool = ...,
    early_stop: bool,
    preserve_rng_state: bool = ...,
    **kwargs: Any,
) -> _R: ...
@overload
def checkpoint(
    function: Callable[..., _R],
    *args: Any,
    use_reentrant: bool = ...,
    context_fn: ContextFn = ...,
    determinism_check: DeterminismCheck = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    preserve_rng_state: bool,
    **kwargs: Any,
) -> _R: ...
@overload
def checkpoint(
    function: None = None,
    *,
    use_reentrant: bool = ...,
    context_fn: ContextFn = ...,
    determinism_check: DeterminismCheck = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    preserve_rng_state: bool = ...,
) -> CheckpointDecorator: ...
@overload  # Note [A function alone]: without parameters it is run, by the next one decorated
def checkpoint(  # type: ignore[overload-overlap]
    function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> _R: ...
@overload
def checkpoint(function: Callable[_P, _R], /) -> Callable[_P, _R]: ...
@no_graph_begins  # type: ignore[misc]  # the last one: parameters of a function may be called so
def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)`, hold its inputs only, and replay the rest in backward.

    As torch's function of that name, non-reentrant by default. Outputs and gradients are those of
    the plain call, bit for bit. It is a decorator too: `@rekindle.checkpoint`, or with options
    `@rekindle.checkpoint(context_fn=...)`. A function that needs no arguments is decorated with
    parentheses, `@rekindle.checkpoint()`: `checkpoint(function)` runs it, as in torch.

    >>> import torch, rekindle
    >>> x = torch.ones(3, requires_grad=True)
    >>> y = rekindle.checkpoint(lambda x: x.exp().sin(), x)
    >>> @rekindle.checkpoint(determinism_check="values")
    ... def region(x, scale):
    ...     return (x * scale).exp()
    >>> z = region(x, scale=2.0)

    Args:
        function: what to run.
        *args: its positional arguments.
        use_reentrant: the variant without a graph in forward, for code that relies on it. None is
            False.
        context_fn: a policy (`rekindle.policies`) that says what is kept, offloaded or spilled; or
            a function that gives two context managers, one for forward and one for the replay.
        determinism_check: `"default"` compares shape, dtype and device of what a replay gives back
            with the forward; `"values"` the content too; `"none"` nothing.
        debug: a mismatch shows the ops of forward and replay where they part.
        early_stop: a replay stops when all that backward needs is there.
        preserve_rng_state: a replay draws the random numbers that the forward drew.
        **kwargs: the function's keyword arguments.
    """
    if torch.compiler.is_dynamo_compiling() and function is not None:
        with without_nested_graph_breaks():  # Note [Break around]
            if torch.compiler.is_dynamo_compiling():
                contexts = _for_dynamo(context_fn)
                return hand_over(
                    function, args, kwargs, bool(use_reentrant), contexts, preserve_rng_state
                )
    if torch.compiler.is_compiling() and function is not None:
        return run_traced(
            *(function, args, kwargs),
            use_reentrant=bool(use_reentrant),
            context_fn=context_fn,
            preserve_rng_state=preserve_rng_state,
        )
    is_bare = use_reentrant is None and not (args or kwargs) and is_decorated(function)
    if within_compiled_code() and not (is_bare or function is None):  # which is not compiled here
        return run_outside_graphs(
            function,
            checkpoint,
            *(function, *args),
            use_reentrant=use_reentrant,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            preserve_rng_state=preserve_rng_state,
            **kwargs,
        )
    options = options_of(context_fn, determinism_check, debug, early_stop, preserve_rng_state)
    if function is None or is_bare:
        if args or kwargs:
            given = [*(type(arg).__name__ for arg in args), *kwargs]
            raise TypeError(f"checkpoint() got arguments but no function: {', '.join(given)}")
        decorate = functools.partial(
            _decorate,
            use_reentrant=bool(use_reentrant),
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            preserve_rng_state=preserve_rng_state,
        )
        return decorate if function is None else decorate(function)
    if use_reentrant:
        _check_reentrant(options.context_fn, debug, kwargs)
    return _run(function, args, kwargs, bool(use_reentrant), options)


@no_graph_begins
def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_reentrant: bool,
    options: Options,
) -> Any:
    """Run a function as a region by its options, where no graph is made of it."""
    if not callable(function):
        raise TypeError(
            f"checkpoint() runs a function, but got {type(function).__name__}: it is called as "
            "checkpoint(function, x), not checkpoint(function(x))"
        )
    if isinstance(kwargs.get("policy"), policies.Policy):
        refuse_policy(function)
    try:
        if not torch.is_grad_enabled() or func_transform() is not None:
            return function(*args, **kwargs)
        if use_reentrant:
            return CheckpointFunction.apply(  # type: ignore[no-untyped-call]
                function, options.preserve_rng_state, *args
            )
        return run_checkpointed(function, args, kwargs, options)
    except TypeError as error:
        if kwargs:
            note_option(error, function, kwargs, _OPTIONS)
        raise


_OPTIONS = tuple(inspect.signature(checkpoint).parameters)[2:-1]
"""The names of the options of `checkpoint`."""


def _for_dynamo(context_fn: ContextFn) -> ContextFn:
    """A `context_fn` as a function that Dynamo can read."""
    if isinstance(context_fn, policies.Policy):
        return context_fn.for_compiler
    if context_fn is noop_context_fn and is_exporting():
        return _EXPORTED.for_compiler
    return context_fn


_EXPORTED = policies.recompute()
"""The policy of a region without one in `torch.export`, which copies a region's `context_fn` to the
exported graph and fails where there is none. It can go when torch's `proxy_mode_key` of
`tag_activation_checkpoint` asks whether there is one; torch 2.11 and 2.13 do not."""


def _decorate(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The decorator form: `function`, checkpointed at every call."""
    if not callable(function):
        raise TypeError(f"checkpoint() decorates a function, not {type(function).__name__}")

    @functools.wraps(function)
    def region(*args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() & options.keys():  # the function's own, not ours
            return checkpoint(functools.partial(function, **kwargs), *args, **options)
        return checkpoint(function, *args, **options, **kwargs)

    return region


def _check_reentrant(context_fn: ContextFn | None, debug: bool, kwargs: dict[str, Any]) -> None:
    """Refuse what the reentrant variant cannot do."""
    if kwargs:
        raise ValueError(
            f"Unexpected keyword arguments: {', '.join(kwargs)}. With use_reentrant=True a region "
            "takes positional arguments only; use_reentrant=False takes both."
        )
    if context_fn is not None or debug:
        raise ValueError(
            "Passing `context_fn` or `debug` is only supported when use_reentrant=False."
        )
