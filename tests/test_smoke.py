"""The one test to look at first: a checkpointed model trains exactly as a plain one."""

import torch

import rekindle
from tests.toys import Stack, assert_same_step


def test_a_checkpointed_stack_with_dropout_trains_like_a_plain_one() -> None:
    model, x = Stack(drop=0.3), torch.randn(4, 8, requires_grad=True)
    assert_same_step(
        lambda: model(x), lambda: model(x, rekindle.checkpoint), [x, *model.parameters()]
    )
