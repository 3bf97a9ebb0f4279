"""What users of selective checkpointing ran into elsewhere, row by row of the field notes."""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.graph import saved_tensors_hooks

import rekindle
from rekindle import CheckpointPolicy, policies
from rekindle.policies import at, every, first, keep, named, of, offload, recompute, spill
from rekindle.regions.selective.op_graph import RecordedOp
from tests.toys import Stack, assert_same_step, same_bits

aten = torch.ops.aten
PRESETS = {
    "keep_routing": policies.keep_routing,
    "keep_matmuls": policies.keep_matmuls,
    "keep_attention": policies.keep_attention,
    "keep_matmuls_and_attention": policies.keep_matmuls_and_attention,
    "recompute_cheap": policies.recompute_cheap,
}


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def product(w: Tensor) -> Tensor:
    """Backward needs the first three results: a product, a `sin`, a product."""
    return ((w @ w).sin() @ w).sin()


def replayed(function: Callable[..., Any], x: Tensor, context_fn: Any, **options: Any) -> int:
    with rekindle.observe() as seen:
        out = rekindle.checkpoint(function, x, context_fn=context_fn, **options)
        out.sum().backward()
    return seen.total.ops_replayed


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often each op is run again."""
    again, ran = RecordedOp.rerun, Counter[Any]()

    def counted(self: RecordedOp, *args: Any) -> None:
        ran[self.func] += 1
        again(self, *args)

    monkeypatch.setattr(RecordedOp, "rerun", counted)
    return ran


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

    assert replayed(product, leaf(4, 4), of(policy)) == 1  # `sin`


def test_an_op_policy_can_offload() -> None:
    """Field note 8."""
    w = leaf(4, 4)
    assert replayed(product, w, offload(aten.mm)) == 1
    run = functools.partial(rekindle.checkpoint, product, w, context_fn=offload(aten.mm))
    assert_same_step(lambda: product(w), run, [w])


@pytest.mark.parametrize(
    "policy", [[aten.mm], keep(aten.mm), [aten.mm.default], ["aten::mm"]], ids=repr
)
def test_a_packet_matches_as_an_overload_does(policy: Any) -> None:
    """Field note 9."""
    contexts = functools.partial(rekindle.create_selective_checkpoint_contexts, policy)
    assert replayed(product, leaf(4, 4), contexts) == 1


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


FATES = [keep(), recompute(), spill(), first(1, keep()), keep(aten.sin)]


@pytest.mark.parametrize("policy", FATES, ids=repr)
def test_a_graph_is_gone_through_as_often_as_wanted(policy: policies.Policy) -> None:
    """Field note 10."""
    w = leaf(4, 4)
    (expected,) = torch.autograd.grad(product(w).sum(), w)
    loss = rekindle.checkpoint(product, w, context_fn=policy).sum()
    for _ in range(3):
        (found,) = torch.autograd.grad(loss, w, retain_graph=True)
        assert same_bits(found, expected)
    loss.backward()
    assert same_bits(w.grad, expected)


def test_every_backward_through_a_retained_graph_runs_the_same_ops_again() -> None:
    """Field note 10."""
    counts = []
    with rekindle.observe() as seen:
        loss = rekindle.checkpoint(product, leaf(4, 4), context_fn=keep(aten.mm)).sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
            counts.append((seen.total.replays, seen.total.ops_replayed))
    assert counts == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("policy", FATES, ids=repr)
def test_gradients_of_gradients_are_plain(policy: policies.Policy) -> None:
    """Field note 10."""

    def ways(run: Callable[[], Tensor]) -> list[Tensor]:
        out = run().sum()
        (one,) = torch.autograd.grad(out, w, create_graph=True)
        (two,) = torch.autograd.grad(one.sin().sum(), w, retain_graph=True)
        (again,) = torch.autograd.grad(out, w)
        return [one, two, again]

    w = leaf(4, 4)
    expected = ways(lambda: product(w))
    found = ways(lambda: rekindle.checkpoint(product, w, context_fn=policy))
    for a, b in zip(expected, found, strict=True):
        assert same_bits(a, b)


def test_two_backwards_without_shared_ops_need_no_retained_graph() -> None:
    """Field note 10."""
    x = leaf(4)

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        shared = x + 1
        return shared.exp(), shared.sin()

    (expected,) = torch.autograd.grad(sum(part.sum() for part in region(x)), x)
    one, two = rekindle.checkpoint(region, x, context_fn=recompute())
    one.sum().backward()
    two.sum().backward()
    torch.testing.assert_close(x.grad, expected)


Way = policies.Policy | str | None
WAYS: dict[str, Way] = {
    "keep": keep(),
    "recompute": recompute(),
    "sin": keep(aten.sin),
    "spill": spill(),
    "first": first(1, keep()),
    "region": "plain",
    "reentrant": "reentrant",
}


def nested(x: Tensor, ways: tuple[Way, ...]) -> Tensor:
    """Two ops, a region with the rest, two ops; as often as there are ways to run a region."""
    x = x.sin().exp()
    if ways:
        inner = functools.partial(nested, ways=ways[1:])
        if isinstance(ways[0], policies.Policy):
            x = rekindle.checkpoint(inner, x, context_fn=ways[0])
        elif ways[0] is None:
            x = inner(x)
        else:
            x = rekindle.checkpoint(inner, x, use_reentrant=ways[0] == "reentrant")
    return x.cos() * x


@pytest.mark.parametrize("inner", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("outer", WAYS.values(), ids=WAYS.keys())
def test_regions_of_every_sort_nest(outer: Way, inner: Way) -> None:
    """Field note 10."""
    x = leaf(4)
    assert_same_step(lambda: nested(x, (None,) * 2), lambda: nested(x, (outer, inner)), [x])


@pytest.mark.parametrize("ways", [*itertools.product(list(WAYS)[:6], repeat=3)], ids="-".join)
def test_regions_of_every_sort_nest_three_deep(ways: tuple[str, ...]) -> None:
    """Field note 10."""
    x = leaf(4)
    chosen = tuple(WAYS[way] for way in ways)
    assert_same_step(lambda: nested(x, (None,) * 3), lambda: nested(x, chosen), [x])


def test_a_region_inside_a_selective_one_is_asked_by_its_own_policy() -> None:
    """Field note 10."""

    def inner(x: Tensor) -> Tensor:
        return x.sin().exp().sin().exp()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x.cos().tanh(), context_fn=keep(aten.sin)).cos().tanh()

    with rekindle.observe() as seen:
        rekindle.checkpoint(outer, leaf(4), context_fn=keep(aten.cos)).sum().backward()
    assert seen.regions[inner.__qualname__].ops_replayed == 2  # both `exp`


def test_paths_are_the_same_where_a_plain_region_around_is_replayed() -> None:
    """Field note 10. The replay calls the region alone, without the model around it."""
    stack, x = Stack(2), leaf(2, 8)
    policy = at("blocks.*.mlp", keep())

    def run(block: nn.Module, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return rekindle.checkpoint(block, x, context_fn=policy)

        return rekindle.checkpoint(inner, x)

    assert_same_step(lambda: stack(x), lambda: stack(x, run), [x, *stack.parameters()])


def test_names_are_the_same_where_a_plain_region_around_is_replayed() -> None:
    """Field note 10."""
    x = leaf(4)

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(product_of_vectors, x.sin(), context_fn=named("all"))

    def product_of_vectors(x: Tensor) -> Tensor:
        return x.exp().sin() * x.cos().exp()

    around = rekindle.name(lambda x: rekindle.checkpoint(outer, x), "all")
    assert_same_step(lambda: product_of_vectors(x.sin()), lambda: around(x), [x])


@pytest.mark.parametrize("policy", [first(3, keep()), keep(aten.mm), first(1, keep())], ids=repr)
def test_what_is_kept_passes_through_the_users_hooks(policy: policies.Policy) -> None:
    """Field note 11. What hooks around the region give back is what backward computes with."""
    w = leaf(4, 4)
    given: list[Tensor] = []

    def unpack(index: int) -> Tensor:
        return held[index].float()

    def pack(tensor: Tensor) -> int:
        given.append(tensor)
        held.append(tensor.detach().double())
        return len(held) - 1

    held: list[Tensor] = []
    with saved_tensors_hooks(pack, unpack):
        out = rekindle.checkpoint(product, w, context_fn=policy)
    made = [tensor for tensor in given if tensor is not w]
    assert len(made) == {first(3, keep()): 3, keep(aten.mm): 2, first(1, keep()): 1}[policy]
    (found,) = torch.autograd.grad(out.sum(), w)
    assert same_bits(found, torch.autograd.grad(product(w).sum(), w)[0])


@pytest.mark.parametrize("policy", FATES, ids=repr)
def test_debug_works(policy: policies.Policy) -> None:
    """Field note 12."""
    w = leaf(4, 4)
    run = functools.partial(rekindle.checkpoint, product, w, context_fn=policy, debug=True)
    assert_same_step(lambda: product(w), run, [w])


def test_debug_works_when_it_is_turned_on_for_all() -> None:
    """Field note 12."""
    with rekindle.set_checkpoint_debug_enabled(True):
        assert replayed(product, leaf(4, 4), keep(aten.mm)) == 1


class Swish(torch.autograd.Function):
    """Four ops; backward needs what goes in and the second result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x * 1.0)
        ctx.save_for_backward(x, gate)
        return x * gate * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        return grad * gate * (1 + x * (1 - gate))


def gated(x: Tensor) -> Tensor:
    return Swish.apply(Swish.apply(x.sin()).exp()).exp()


def test_a_custom_function_can_be_kept_as_a_unit() -> None:
    """Field note 13."""
    x = leaf(4)
    assert replayed(gated, x, recompute()) == 11
    assert replayed(gated, x, keep(Swish)) == 3  # `sin`, and `exp` twice
    run = functools.partial(rekindle.checkpoint, gated, x, context_fn=keep(Swish))
    assert_same_step(lambda: gated(x), run, [x])


def test_a_custom_function_can_be_recomputed_as_a_unit() -> None:
    """Field note 13."""
    assert replayed(gated, leaf(4), recompute(Swish) | keep()) == 4  # `mul`, `sigmoid`, twice


def test_a_custom_function_can_be_counted_and_placed() -> None:
    """Field note 13. The first four ops that the policy speaks of are those of the first call."""
    x = leaf(4)
    assert replayed(gated, x, first(4, keep(Swish))) == 7
    assert replayed(rekindle.name(gated, "g"), x, named("g")) == 0


def test_a_custom_function_with_context_set_up_apart_can_be_kept() -> None:
    """Field note 13."""

    class Apart(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin().exp()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs, output)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x, out = ctx.saved_tensors
            return grad * x.cos() * out

    x = leaf(4)
    assert replayed(lambda x: Apart.apply(x).cos(), x, recompute()) == 2
    assert replayed(lambda x: Apart.apply(x).cos(), x, keep(Apart)) == 0


def test_a_custom_function_is_not_taken_for_another() -> None:
    """Field note 13. Mixed-precision kernels all have the same decorator around their forward."""

    def kernel() -> Any:
        class Kernel(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda", cast_inputs=torch.float16)
            def forward(ctx: Any, x: Tensor) -> Tensor:
                y = x.sin()
                ctx.save_for_backward(y)
                return y.exp()

            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * ctx.saved_tensors[0]

        return Kernel

    one, other = kernel(), kernel()
    assert replayed(one.apply, leaf(4), recompute()) == 1
    assert replayed(one.apply, leaf(4), keep(one)) == 0
    assert replayed(one.apply, leaf(4), keep(other)) == 1


@pytest.mark.parametrize("policy", FATES, ids=repr)
def test_a_kept_result_may_be_changed_in_place_in_the_region(policy: policies.Policy) -> None:
    """Field note 14."""
    x = leaf(4)

    def region(x: Tensor) -> Tensor:
        y = x.sin()
        z = (y + 1).exp()
        y.mul_(2).add_(1)
        y[1:3] = 0
        return z * y.sin()

    run = functools.partial(rekindle.checkpoint, region, x, context_fn=policy)
    assert_same_step(lambda: region(x), run, [x])


@pytest.mark.parametrize("policy", FATES, ids=repr)
def test_a_view_of_a_kept_result_may_be_changed_in_place(policy: policies.Policy) -> None:
    """Field note 14. As rotary positions are often put into queries."""
    linear, x = nn.Linear(4, 4), leaf(2, 3, 4)

    def region(x: Tensor) -> Tensor:
        heads = linear(x.sin()).view(2, 3, 2, 2).transpose(1, 2)
        gate = (heads + 1).sigmoid()
        heads.mul_(2)
        return heads.exp() * gate

    run = functools.partial(rekindle.checkpoint, region, x, context_fn=policy)
    assert_same_step(lambda: region(x), run, [x, *linear.parameters()])


def with_second(w: Tensor) -> tuple[Tensor, Tensor]:
    """The second result is made from the first, which autograd itself does not save."""
    first = w @ w
    return first, (first + 1).exp()


def test_a_kept_result_changed_after_the_region_is_told_with_the_op_that_made_it() -> None:
    """Field note 14."""
    w = leaf(4, 4)
    one, two = rekindle.checkpoint(with_second, w, context_fn=keep(aten.mm))
    one.add_(1)
    with pytest.raises(rekindle.CheckpointError, match=r"aten\.mm.*changed in place.*clone"):
        (one.sum() + two.sum()).backward()


def test_a_recomputed_result_may_be_changed_after_the_region() -> None:
    """Field note 14."""
    w = leaf(4, 4)

    def step(run: Callable[..., Any]) -> Any:
        one, two = run(with_second, w)
        return one.add_(1), two

    checkpoint = functools.partial(rekindle.checkpoint, context_fn=recompute())
    assert_same_step(lambda: step(lambda f, w: f(w)), lambda: step(checkpoint), [w])


def test_an_input_changed_after_the_region_is_told() -> None:
    """Field note 14."""
    x = leaf(4) * 1
    out = rekindle.checkpoint(lambda x: (x + 1).exp(), x, context_fn=recompute())
    x.zero_()
    with pytest.raises(rekindle.CheckpointError, match=r"outside the region.*changed in place"):
        out.sum().backward()


def test_a_change_that_plain_autograd_refuses_does_no_harm_to_what_is_made_again() -> None:
    """Field note 14. `sin` needs what is changed; made again, it is as `sin` saw it."""
    x = leaf(4)

    def region(x: Tensor, double: Callable[[Tensor], Tensor]) -> Tensor:
        y = x + 1
        return y.sin() * double(y)

    with pytest.raises(RuntimeError, match="inplace operation"):
        region(x, lambda y: y.mul_(2)).sum().backward()
    (expected,) = torch.autograd.grad(region(x, lambda y: y * 2).sum(), x)
    out = rekindle.checkpoint(region, x, lambda y: y.mul_(2), context_fn=recompute())
    assert same_bits(torch.autograd.grad(out.sum(), x)[0], expected)


def test_a_policy_that_counts_by_its_state_counts_the_same_in_every_call() -> None:
    """Field note 15."""

    def every_second_product(ctx: Any, op: Any, *args: Any) -> bool:
        if op is not aten.mm.default:
            return False
        ctx.state["products"] = ctx.state.get("products", 0) + 1
        return ctx.state["products"] % 2 == 1

    w = leaf(4, 4)
    by_hand = of(every_second_product)
    assert [replayed(product, w, by_hand) for _ in range(3)] == [2, 2, 2]
    assert [replayed(product, w, every(2, keep(aten.mm))) for _ in range(3)] == [2, 2, 2]


def shared_counter() -> Callable[..., CheckpointPolicy]:
    """As trainers write it: one counter for forwards and one for replays, in all layers."""
    seen: defaultdict[str, int] = defaultdict(int)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        mode = "recompute" if ctx.is_recompute else "forward"
        if op is aten.addmm.default:
            seen[mode] += 1
        if op is aten.addmm.default and seen[mode] % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def test_a_policy_that_shares_a_counter_between_layers_has_the_plain_gradients() -> None:
    """Field note 15. Layers run forwards 1, 2, 3 and are made again 3, 2, 1."""
    stack, x = Stack(3, drop=0.2), leaf(2, 8)
    context_fn = functools.partial(rekindle.create_selective_checkpoint_contexts, shared_counter())

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return rekindle.checkpoint(block, x, context_fn=context_fn)

    for _ in range(2):
        assert_same_step(lambda: stack(x), lambda: stack(x, run), [x, *stack.parameters()])


def test_a_policy_that_answers_at_random_has_the_plain_gradients() -> None:
    """Field note 15."""
    stack, x = Stack(3, drop=0.2), leaf(2, 8)
    draw = torch.Generator().manual_seed(0)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(torch.rand((), generator=draw) < 0.5)

    for _ in range(5):
        assert_same_step(
            lambda: stack(x),
            lambda: rekindle.checkpoint(stack, x, context_fn=of(policy)),
            [x, *stack.parameters()],
        )


def test_two_regions_with_one_counted_policy_do_not_count_each_other() -> None:
    """Field note 15."""
    w, policy = leaf(4, 4), first(1, keep(aten.mm))

    def region(w: Tensor) -> Tensor:
        return product(w)

    with rekindle.observe() as seen:
        one = rekindle.checkpoint(product, w, context_fn=policy)
        two = rekindle.checkpoint(region, w, context_fn=policy)
        (one.sum() + two.sum()).backward()
    assert seen.regions[product.__qualname__].ops_replayed == 2
    assert seen.regions[region.__qualname__].ops_replayed == 2
