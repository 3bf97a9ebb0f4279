"""A region whose values are checked."""

import functools

import pytest
from torch import Tensor

import rekindle

checked = functools.partial(rekindle.checkpoint, determinism_check="values")


def drift_of(y: Tensor) -> str:
    with pytest.raises(rekindle.CheckpointError) as caught:
        y.sum().backward()
    return str(caught.value)
