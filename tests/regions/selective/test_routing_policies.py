"""Mixtures of experts under the policies that rekindle comes with, and answers that offload."""

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle import CheckpointPolicy, policies
from rekindle.policies import keep, of, offload, recompute
from tests.regions.selective.toy_regions import replayed, two_products
from tests.toys import assert_same_step, leaf

aten = torch.ops.aten


PRESETS = {
    "keep_routing": policies.keep_routing,
    "keep_matmuls": policies.keep_matmuls,
    "keep_attention": policies.keep_attention,
    "keep_matmuls_and_attention": policies.keep_matmuls_and_attention,
    "recompute_cheap": policies.recompute_cheap,
}


class Experts(nn.Module):
    """Each token goes to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def scores(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.scores(x).topk(2, dim=-1)
        each = torch.einsum("td,tkde->tke", x, self.weight[chosen])
        return (each.sin() * scores[..., None]).sum(1)


@functools.cache
def flips() -> Any:
    """An op that makes something else each time, enough to turn a near tie over."""
    runs = itertools.count()

    def noise(x: Tensor) -> Tensor:
        sign = 1 if next(runs) % 2 else -1
        return x + sign * 1e-3 * torch.arange(x.shape[-1])

    op = torch.library.custom_op("field_notes::flips", noise, mutates_args=())
    op.register_autograd(lambda ctx, grad: grad)
    return op


class NearTie(Experts):
    """All experts score alike but for noise."""

    def scores(self, x: Tensor) -> Tensor:
        return flips()(self.router(x) * 1e-6)


@pytest.mark.parametrize("policy", PRESETS.values(), ids=PRESETS.keys())
def test_routes_are_not_chosen_again(policy: policies.Policy, ran: Counter[Any]) -> None:
    """Field note 6."""
    experts, x = Experts(), leaf(5, 8)
    assert_same_step(
        lambda: experts(x),
        lambda: rekindle.checkpoint(experts, x, context_fn=policy),
        [x, *experts.parameters()],
    )
    assert aten.topk.default not in ran


@pytest.mark.parametrize("policy", PRESETS.values(), ids=PRESETS.keys())
def test_a_near_tie_does_not_flip_in_backward(policy: policies.Policy) -> None:
    """Field note 6."""
    experts, x = NearTie(), leaf(5, 8)
    chosen: list[Tensor] = []
    topk = torch.Tensor.topk

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = topk(self, *args, **kwargs)
        chosen.append(found[1])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", noted)
        rekindle.checkpoint(experts, x, context_fn=policy).sum().backward()
    used = experts.weight.grad.flatten(1).abs().sum(1) > 0
    assert set(used.nonzero().flatten().tolist()) == set(chosen[0].flatten().tolist())


@pytest.mark.parametrize(
    "answer", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD]
)
def test_what_is_to_be_offloaded_is_not_recomputed(answer: CheckpointPolicy) -> None:
    """Field note 8."""

    def policy(ctx: Any, op: Any, *args: Any) -> CheckpointPolicy:
        return answer if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    assert replayed(two_products, leaf(4, 4), of(policy)) == 1  # `sin`


def test_an_op_policy_can_offload() -> None:
    """Field note 8."""
    w = leaf(4, 4)
    assert replayed(two_products, w, offload(aten.mm)) == 1
    run = functools.partial(rekindle.checkpoint, two_products, w, context_fn=offload(aten.mm))
    assert_same_step(lambda: two_products(w), run, [w])


@pytest.mark.parametrize(
    "policy", [[aten.mm], keep(aten.mm), [aten.mm.default], ["aten::mm"]], ids=repr
)
def test_a_packet_matches_as_an_overload_does(policy: Any) -> None:
    """Field note 9."""
    contexts = functools.partial(rekindle.create_selective_checkpoint_contexts, policy)
    assert replayed(two_products, leaf(4, 4), contexts) == 1


def test_a_packet_matches_every_overload() -> None:
    """Field note 9."""
    x = torch.rand(3, requires_grad=True)
    contexts = functools.partial(rekindle.create_selective_checkpoint_contexts, [aten.pow])

    def region(x: Tensor) -> Tensor:
        return (x**2).sin() + (x**x).sin() + (2**x).sin()

    assert replayed(region, x, recompute()) == 3
    assert replayed(region, x, contexts) == 0


def test_what_is_no_op_is_refused_at_once() -> None:
    """Field note 9."""
    with pytest.raises(TypeError, match=r"Did you mean torch\.ops\.aten\.mm\?"):
        rekindle.create_selective_checkpoint_contexts([torch.mm])
