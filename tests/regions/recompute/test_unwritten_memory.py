"""Memory that an op of a region under a policy makes, and that is filled some time later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import rekindle
from rekindle import policies
from tests.offloading import assert_plain_gradients
from tests.toys import leaf

POLICIES = {
    "keep": policies.keep(),
    "recompute": policies.recompute(),
    "every second": policies.every(2, policies.keep()),
    "spill": policies.spill(),
}
pytestmark = [
    pytest.mark.usefixtures("new_offloaders", "written_at_once"),
    pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys()),
]


def in_region(function: Callable[..., Tensor], policy: Any) -> Callable[..., Tensor]:
    """A function in a region, followed by what may be saved last and so is not sent."""

    def run(*args: Tensor) -> Tensor:
        out: Tensor = rekindle.checkpoint(function, *args, context_fn=policy)
        return out.sin().sin().sin()

    return run


def fill(memory: Tensor, source: Tensor) -> None:
    """Write to memory as a kernel does that no dispatcher sees."""
    memory.numpy()[:] = source.detach().cos().numpy()


def test_noise_that_an_op_fills_after_it_is_saved_is_sent_when_it_is_filled(policy: Any) -> None:
    x = leaf(4, 300)

    def noisy(x: Tensor) -> Tensor:
        hidden = x * 2.0
        functional.rrelu(hidden, training=True, inplace=True)
        return hidden.exp()

    assert_plain_gradients(lambda: in_region(noisy, policy)(x), [x], derive=False)


def test_memory_that_is_filled_unseen_is_sent_when_it_is_used(policy: Any) -> None:
    x = leaf(4, 300)

    def filled(x: Tensor) -> Tensor:
        memory = torch.empty(4, 300)
        hidden = x.sin().exp()
        fill(memory, x)
        return hidden.exp() * memory

    assert_plain_gradients(lambda: in_region(filled, policy)(x), [x], derive=False)


def test_views_of_memory_that_is_filled_unseen_are_sent_when_they_are_used(policy: Any) -> None:
    x = leaf(4, 300)

    def filled(x: Tensor) -> Tensor:
        first, second = torch.empty(2, 4, 300)
        hidden = x.sin().exp()
        fill(first, x)
        fill(second, x)
        return (hidden * first).exp() * second

    assert_plain_gradients(lambda: in_region(filled, policy)(x), [x], derive=False)


def test_a_copy_that_is_filled_unseen_is_sent_when_it_is_used(policy: Any) -> None:
    x = leaf(4, 300)

    def filled(x: Tensor) -> Tensor:
        with torch.no_grad():
            memory = x.clone()
        hidden = x.sin().exp()
        fill(memory, x)
        return hidden.exp() * memory

    assert_plain_gradients(lambda: in_region(filled, policy)(x), [x], derive=False)
