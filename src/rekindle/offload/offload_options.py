"""What a user may ask of the offload engine, checked once."""

import os
import tempfile
from dataclasses import dataclass
from typing import Literal, get_args

from rekindle.sizes import parse_bytes

TierName = Literal["host", "disk"]
FATE_OF_TIER: dict[TierName, str] = {"host": "offload", "disk": "spill"}
OnFull = Literal["keep", "raise"]
Quota = int | float | str


@dataclass(frozen=True)
class Options:
    """How activations are offloaded: a value, by which the engine for it is found again."""

    tier: TierName
    quota: int | float | None
    """Bytes, a share of what can be moved, or None: as much as costs no time."""
    min_bytes: int
    max_host_bytes: int | None
    directory: str | None
    on_full: OnFull
    derive: bool
    is_share: bool = False
    """Whether the quota is a share: 1 byte is not everything, though 1 equals 1.0."""
    hurries: bool = True
    """Whether the device waits for copies so that little is on the way; else they take their time,
    as long as the forward lasts."""


def options_of(
    tier: TierName,
    quota: Quota,
    min_bytes: int | str,
    max_host_bytes: int | str | None,
    directory: str | os.PathLike[str] | None,
    on_full: OnFull,
    derive: bool,
) -> Options:
    """The options, or an error that names the one that is wrong."""
    if tier not in get_args(TierName):
        raise ValueError(f'tier should be "host" or "disk", but got {tier!r}')
    if on_full not in get_args(OnFull):
        raise ValueError(f'on_full should be "keep" or "raise", but got {on_full!r}')
    if directory is not None and tier != "disk":
        raise ValueError(f'directory is for tier="disk", but tier is {tier!r}')
    if not isinstance(derive, bool):
        raise TypeError(f"derive should be True or False, but got {derive!r}")
    smallest = parse_bytes(min_bytes, "min_bytes")
    amount = _quota(quota, smallest)
    return Options(
        tier,
        amount,
        smallest,
        None if max_host_bytes is None else parse_bytes(max_host_bytes, "max_host_bytes"),
        _directory(directory) if tier == "disk" else None,
        on_full,
        derive,
        isinstance(amount, float),
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
    path = os.path.abspath(os.fspath(directory or tempfile.gettempdir()))
    if not os.path.isdir(path):
        raise ValueError(f"directory should be an existing folder, but there is none at {path!r}")
    return path
