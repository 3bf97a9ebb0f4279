"""Storages: the memory behind tensors."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storage_from_reference(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage behind a weak reference, if somebody still holds it.

    Tried on torch 2.11 and 2.13. Goes when torch has a public weak reference to
    a storage.
    """
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def storage_users(storage: torch.UntypedStorage) -> int:
    """Number of tensors and storage objects that hold a storage.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return torch._C._storage_Use_Count(storage._cdata)


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that no other living storage has.

    Tried on torch 2.11 and 2.13. `data_ptr()` is 0 for every fake or empty one. Goes when torch has
    a public form.
    """
    key: int = storage._cdata
    return key
