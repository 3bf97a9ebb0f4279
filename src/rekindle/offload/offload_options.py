"""The arguments of `rekindle.offload`, checked once and made into a strategy."""

import os
import tempfile
from typing import Literal, get_args

from rekindle.sizes import parse_bytes
from rekindle.strategy import Offload, TierName

OnFull = Literal["keep", "raise"]
Quota = int | float | str


def offload_strategy(
    tier: TierName = "host",
    quota: Quota = "auto",
    min_bytes: int | str = "1MiB",
    max_host_bytes: int | str | None = None,
    directory: str | os.PathLike[str] | None = None,
    on_full: OnFull = "keep",
    derive: bool = True,
) -> Offload:
    """Returns the strategy, or raises an error that names the argument that is wrong.

    The folder is not looked for: `check_folder` does that where a user names it. A copy of a model
    may run on a machine that has no such folder: activations stay on the device there.
    """
    if tier not in get_args(TierName):
        raise ValueError(f'tier should be "host" or "disk", but got {tier!r}')
    if on_full not in get_args(OnFull):
        raise ValueError(f'on_full should be "keep" or "raise", but got {on_full!r}')
    if directory is not None and tier != "disk":
        raise ValueError(f'directory is for tier="disk", but tier is {tier!r}')
    if not isinstance(derive, bool):
        raise TypeError(f"derive should be True or False, but got {derive!r}")
    smallest = parse_bytes(min_bytes, "min_bytes")
    return Offload(
        tier,
        _quota(quota, smallest),
        smallest,
        None if max_host_bytes is None else parse_bytes(max_host_bytes, "max_host_bytes"),
        _directory(directory) if tier == "disk" else None,
        on_full,
        derive,
    )


def _quota(quota: Quota, min_bytes: int) -> int | float | None:
    if quota == "auto":
        return None
    if isinstance(quota, str) and quota.endswith("%"):
        try:
            quota = float(quota[:-1]) / 100
        except ValueError:
            raise ValueError(f'quota as a share should be like "40%", but got {quota!r}') from None
    if isinstance(quota, float):
        if not 0 <= quota <= 1:
            raise ValueError(
                f"quota as a share should be from 0.0 to 1.0, but got {quota}; bytes are an int"
            )
        return quota
    if isinstance(quota, str) and not quota[:1].isdigit():
        raise ValueError(f'quota should be "auto", like "4GiB" or like "40%", but got {quota!r}')
    nbytes = parse_bytes(quota, "quota")
    if 0 < nbytes < min_bytes:
        raise ValueError(
            f"quota is {nbytes} bytes, less than the smallest activation that goes (min_bytes is "
            f"{min_bytes}); a share is a float: quota=1.0 is everything"
        )
    return nbytes


def _directory(directory: str | os.PathLike[str] | None) -> str:
    return os.path.abspath(os.fspath(directory or tempfile.gettempdir()))


def check_folder(strategy: Offload) -> None:
    """Raise an error if the folder of a strategy for disk does not exist."""
    if strategy.tier != "disk":
        return
    path = _directory(strategy.directory)
    if not os.path.isdir(path):
        raise ValueError(f"directory should be an existing folder, but there is none at {path!r}")
