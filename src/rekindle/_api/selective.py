"""Public functions of selective checkpointing: contexts of a policy, and names for tensors."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rekindle import policies
from rekindle.regions.selective.eager_location import inside
from rekindle.regions.selective.graph_location import named_tensor
from rekindle.regions.selective.policy_contexts import CachedMode, CachingMode, contexts_of
from rekindle.regions.selective.recorder import name_tensor

_Named = TypeVar("_Named")


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[CachingMode, CachedMode]:
    """The two contexts of a region under a policy, for `context_fn`. As torch's function.

    >>> import functools, torch, rekindle
    >>> ops = [torch.ops.aten.mm]  # all its overloads
    >>> context_fn = functools.partial(rekindle.create_selective_checkpoint_contexts, ops)
    >>> w = torch.randn(4, 4, requires_grad=True)
    >>> with rekindle.observe() as seen:
    ...     y = rekindle.checkpoint(lambda w: (w @ w).sin().exp(), w, context_fn=context_fn)
    ...     y.sum().backward()
    >>> seen.total.ops_replayed  # `sin` and `exp`, and no matrix product
    2

    Args:
        policy_fn_or_list: a value of `rekindle.policies`, a function of a context, an op and its
            arguments that returns the decision on what the op made, or a list of ops to keep.
        allow_cache_entry_mutation: a result that is kept may be changed in place. In a region under
            `rekindle.checkpoint` it always may: what was kept is what the op made. After the region
            it may not.
    """
    return contexts_of(policies.of(policy_fn_or_list), allow_cache_entry_mutation)


def name(what: _Named, name: str) -> _Named:
    """Give a tensor or a function a name, by which `policies.named` decides about it.

    A tensor is returned as it is; outside a region under a policy nothing happens. A function is
    returned so that everything it does goes by the name. A tensor's name comes after its op has
    run: it can have kept, offloaded or spilled what would be recomputed, not the reverse.

    >>> import torch, rekindle
    >>> from rekindle.policies import named
    >>> def region(x):
    ...     return rekindle.name(x.sin(), "wave").exp().cos()
    >>> x = torch.ones(4, requires_grad=True)
    >>> with rekindle.observe() as seen:
    ...     rekindle.checkpoint(region, x, context_fn=named("wave")).sum().backward()
    >>> seen.total.ops_replayed  # `exp`: `sin` has been kept
    1
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"A name is a string, but got {name!r}")
    if isinstance(what, Tensor):
        if torch.compiler.is_compiling():
            return named_tensor(what, name)  # type: ignore[return-value]
        name_tensor(what, name)
        return what
    if isinstance(what, nn.Module):
        raise TypeError("A module has a path already: policies.at(path, policy) gives it a policy")
    if callable(what):
        return inside(what, name)  # type: ignore[return-value]
    raise TypeError(f"name() takes a tensor or a function, but got {type(what).__name__}")
