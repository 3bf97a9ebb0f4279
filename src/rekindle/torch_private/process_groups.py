"""The default process group, and the key-value store by which it was set up."""

from typing import Any

import torch.distributed as dist


def in_process_group() -> bool:
    """True if this process is a rank, be it the only one, so that gradients may be reduced.

    Public names, tried on torch 2.11 and 2.13. Goes when `is_initialized` answers without
    distributed support.
    """
    return dist.is_available() and dist.is_initialized()


def default_store() -> Any:
    """The key-value store by which the default process group was set up.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

    return _get_default_store()


def prefixed_store(name: str, store: Any) -> Any:
    """The part of a key-value store whose keys begin with a name.

    Public, and imported late: not every build of torch has it. Tried on torch 2.11 and 2.13; goes
    when `default_store` does.
    """
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415

    return PrefixStore(name, store)
