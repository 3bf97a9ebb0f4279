"""Policies as values: how they compare, print, join and match, and what they are told."""

import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import SelectiveCheckpointContext as TorchContext

import rekindle
from rekindle import CheckpointPolicy, policies
from rekindle.policies import (
    Policy,
    at,
    every,
    first,
    keep,
    keep_inputs,
    named,
    of,
    offload,
    recompute,
    recompute_cheap,
    spill,
)
from rekindle.regions.selective.recorder import is_recording
from rekindle.torch_private.dispatch_modes import dispatch_modes
from rekindle.torch_private.saved_tensor_hooks import top_hooks
from tests.toys import assert_same_step

aten = torch.ops.aten
flex_attention = torch.ops.higher_order.flex_attention


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def product(w: Tensor) -> Tensor:
    """Backward needs all three results again: three ops, or less by what is kept."""
    return (w @ w).sin().exp()


def waves(x: Tensor) -> Tensor:
    """Backward needs the first five of six results."""
    for _ in range(6):
        x = x.sin()
    return x


def replayed(function: Callable[..., Any], x: Tensor, context_fn: Any) -> int:
    """How many ops are run again for a step of one region."""
    with rekindle.observe() as seen:
        rekindle.checkpoint(function, x, context_fn=context_fn).sum().backward()
    return seen.total.ops_replayed


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool | None:
    return True if op is aten.mm.default else None


class Cube(torch.autograd.Function):
    """Three ops, of which backward needs the second; and none of the ops is named `Cube`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x.abs() * x
        ctx.save_for_backward(square)
        return square * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (square,) = ctx.saved_tensors
        return 3 * square * grad


class Wave(nn.Module):
    """Backward needs its second result, and the next module's backward needs it too."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().exp()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Wave()
        self.mlp = Wave()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x))


class Net(nn.Module):
    """Two layers, each of them a region: eight ops to run again, two in each `Wave`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, context_fn: Any) -> Tensor:
        for layer in self.layers:
            x = rekindle.checkpoint(layer, x, context_fn=context_fn)
        return x


def replayed_in(net: nn.Module, policy: Any) -> int:
    with rekindle.observe() as seen:
        net(leaf(3), policy).sum().backward()
    return seen.total.ops_replayed


EQUAL = [
    (keep(aten.mm), keep("aten::mm")),
    (keep(aten.mm), keep([aten.mm])),
    (keep(aten.mm, aten.addmm), keep({aten.addmm}, (aten.mm,))),
    (keep(aten.mm.default), keep("aten::mm.default")),
    (keep(flex_attention), keep("higher_order::flex_attention")),
    (keep(Cube), keep([Cube])),
    (of([aten.mm]), keep(aten.mm)),
    (of(keep_products), of(keep_products)),
    (at("mlp", "offload"), at("mlp", offload())),
    (named("a", "b"), named("a", "b", fate="keep")),
    (keep_inputs(aten.mm), keep_inputs(["aten::mm"])),
    (first(2, keep()), first(2, keep())),
    (every(2, [aten.mm]), every(2, keep(aten.mm))),
    (keep() | (offload() | spill()), (keep() | offload()) | spill()),
]

DIFFERENT = [
    keep(),
    keep([]),
    recompute(),
    offload(),
    spill(),
    keep(aten.mm),
    keep(aten.mm.default),
    offload(aten.mm),
    keep_inputs(aten.mm),
    keep(Cube),
    at("mlp", keep()),
    at("attn", keep()),
    named("a"),
    named("a", fate="spill"),
    first(1, keep()),
    first(2, keep()),
    every(1, keep()),
    every(2, keep()),
    keep(aten.mm) | offload(),
    offload() | keep(aten.mm),
    of(keep_products),
    recompute_cheap,
]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=repr)
def test_policies_that_say_the_same_are_equal_and_have_the_same_hash(
    one: Policy, other: Policy
) -> None:
    assert one == other
    assert hash(one) == hash(other)


def test_policies_that_say_different_things_differ() -> None:
    assert len(set(DIFFERENT)) == len(DIFFERENT)


@pytest.mark.parametrize("policy", [*DIFFERENT, policies.keep_matmuls_and_attention], ids=repr)
def test_a_copy_of_a_policy_equals_it(policy: Policy) -> None:
    assert copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    "policy",
    [
        keep(),
        keep("aten::mm"),
        keep(aten.mm.default),
        offload(aten.mm, aten.addmm),
        keep(Cube),
        keep(flex_attention),
        keep_inputs(aten.mm),
        at("layers.*.mlp", "keep"),
        at("mlp", first(2, keep()) | spill()),
        named("a", "b_*", fate="offload"),
        every(3, recompute()),
        at("a", "recompute") | named("b") | keep(),
        recompute_cheap,
        of(keep_products),
    ],
    ids=repr,
)
def test_a_policy_prints_as_the_code_that_makes_it(policy: Policy) -> None:
    assert of(eval(repr(policy))) == policy


def test_an_overload_prints_otherwise_than_all_overloads() -> None:
    assert repr(keep(aten.mm)) != repr(keep(aten.mm.default))


def test_policies_print_in_the_order_in_which_they_are_asked() -> None:
    assert repr(named("a") | keep() | named("b")) == (
        "named('a', fate='keep') | keep() | named('b', fate='keep')"
    )


def test_the_first_policy_to_speak_decides() -> None:
    w = leaf(4, 4)
    assert replayed(product, w, keep(aten.mm) | recompute(aten.mm)) == 2
    assert replayed(product, w, recompute(aten.mm) | keep(aten.mm)) == 3


def test_what_no_policy_speaks_of_is_recomputed() -> None:
    assert replayed(product, leaf(4, 4), keep(aten.mm) | keep(aten.cos)) == 2


@pytest.mark.parametrize(
    "policy",
    [
        keep_products | recompute(),
        recompute(aten.sin) | of(keep_products),
        recompute(aten.sin) | keep_products,
        [aten.mm] | recompute(),
        recompute(aten.sin) | [aten.mm],
        {aten.mm} | recompute(),
        (aten.mm,) | recompute(),
    ],
    ids=repr,
)
def test_functions_and_lists_are_joined_as_policies_are(policy: Policy) -> None:
    assert replayed(product, leaf(4, 4), policy) == 2


def test_a_function_that_returns_none_has_no_opinion() -> None:
    assert replayed(product, leaf(4, 4), keep_products | keep("aten::exp")) == 0


@pytest.mark.parametrize(
    "op",
    [
        aten.mm,
        aten.mm.default,
        "aten::mm",
        "aten.mm",
        "aten::mm.default",
        [aten.mm],
        (aten.cos, aten.mm),
        {"aten::mm"},
        frozenset([aten.mm.default]),
    ],
    ids=repr,
)
def test_an_op_is_named_in_many_ways(op: Any) -> None:
    assert replayed(product, leaf(4, 4), keep(op)) == 2


def test_a_packet_stands_for_all_its_overloads() -> None:
    x = torch.rand(3, requires_grad=True)
    assert replayed(lambda x: (x**x).sin() * (x**2).sin(), x, keep(aten.pow)) == 2  # both `sin`


def test_an_overload_stands_for_itself_alone() -> None:
    x = torch.rand(3, requires_grad=True)
    policy = keep(aten.pow.Tensor_Scalar)
    assert replayed(lambda x: (x**x).sin() * (x**2).sin(), x, policy) == 3


def test_no_op_at_all_stands_for_every_op() -> None:
    assert replayed(product, leaf(4, 4), keep()) == 0
    assert replayed(product, leaf(4, 4), recompute() | keep()) == 3


def test_an_empty_collection_stands_for_no_op() -> None:
    assert replayed(product, leaf(4, 4), keep([])) == 3


@pytest.mark.parametrize(
    ("op", "ops"),
    [(aten.mm, 1), (aten.sin, 0), (aten.exp, 1)],  # of `sin` backward does not need the result
)
def test_all_ops_but_one_can_be_kept(op: Any, ops: int) -> None:
    assert replayed(product, leaf(4, 4), recompute(op) | keep()) == ops


def test_an_autograd_function_stands_for_all_that_its_forward_does() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        return Cube.apply(x.sin()).exp()

    assert replayed(region, x, recompute()) == 5
    assert replayed(region, x, keep(Cube)) == 1  # `exp`


def test_an_autograd_function_stands_for_the_functions_it_calls_too() -> None:
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return product(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * ctx.saved_tensors[0]

    assert replayed(lambda x: Outer.apply(x).exp(), leaf(3, 3), keep(Outer)) == 1


def test_an_autograd_function_is_not_taken_for_another_with_the_same_decorator() -> None:
    """`custom_fwd` puts the same code around every forward."""

    def scaled(by: float) -> Any:
        class Scaled(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda")
            def forward(ctx: Any, x: Tensor) -> Tensor:
                y = x * by
                ctx.save_for_backward(y)
                return y + 1

            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * ctx.saved_tensors[0]

        return Scaled

    two, three = scaled(2.0), scaled(3.0)
    assert replayed(lambda x: two.apply(x).exp(), leaf(3), keep(two)) == 1
    assert replayed(lambda x: two.apply(x).exp(), leaf(3), keep(three)) == 3


def test_a_higher_order_operator_can_be_named() -> None:
    ctx = rekindle.SelectiveCheckpointContext(is_recompute=False, op=flex_attention)
    assert keep(flex_attention).decide(ctx) is keep().decide(ctx)
    assert keep(aten.mm).decide(ctx) is None


@pytest.mark.parametrize(
    ("pattern", "ops"),
    [
        ("layers", 0),
        ("layers.*", 0),
        ("layers.0", 4),
        ("layers.[1-9]", 4),
        ("lay*.0", 4),
        ("0", 4),
        ("mlp", 4),
        ("layers.*.mlp", 4),
        ("*.attn", 4),
        ("layers.1.attn", 6),
        ("1.mlp", 6),
        ("layers.mlp", 8),
        ("layers.2", 8),
        ("ml", 8),
        ("Layers", 8),
        ("attn.mlp", 8),
        ("layers.0.mlp.sin", 8),
    ],
)
def test_a_pattern_names_parts_of_a_modules_path(pattern: str, ops: int) -> None:
    assert replayed_in(Net(), at(pattern, keep())) == ops


def test_paths_begin_at_the_outermost_module_that_is_called() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def forward(self, x: Tensor, context_fn: Any) -> Tensor:
            return self.model(x, context_fn)

    assert replayed_in(Outer(), at("model.layers.0.mlp", keep())) == 6
    assert replayed_in(Outer(), at("layers.0.mlp", keep())) == 6
    assert replayed_in(Net(), at("model.layers.0.mlp", keep())) == 8
    assert replayed(Layer(), leaf(3), at("layers.*.mlp", keep())) == 4
    assert replayed(Layer(), leaf(3), at("mlp", keep())) == 2


@pytest.mark.parametrize("wrap", [functools.partial, lambda layer: lambda x: layer(x).sum()])
def test_a_module_has_its_path_however_the_region_calls_it(wrap: Any) -> None:
    assert replayed(wrap(Layer()), leaf(3), at("mlp", keep())) == 2


def test_a_module_with_hooks_has_its_path() -> None:
    net = Net()
    net.layers[0].mlp.register_forward_hook(lambda *args: None)
    net.layers[0].mlp.register_full_backward_hook(lambda *args: None)
    assert replayed_in(net, at("layers.0.mlp", keep())) == 6


def test_a_module_that_was_moved_has_its_new_path() -> None:
    net = Net()
    assert replayed_in(net, at("layers.0", keep())) == 4
    net.layers = net.layers[1:]
    assert replayed_in(net, at("layers.0", keep())) == 0
    assert replayed_in(net, at("layers.1", keep())) == 4


@pytest.mark.parametrize(
    ("policy", "ops"),
    [
        (at("mlp", "keep"), 2),
        (at("mlp", "recompute") | keep(), 2),
        (at("mlp", keep(aten.sin)), 3),
        (at("mlp", [aten.exp]), 2),
        (at("mlp", lambda ctx, op, x: op is aten.exp.default), 2),
        (at("mlp", recompute(aten.exp)) | keep(), 1),
        (at("*", at("mlp", keep())), 2),
        (at("mlp", at("attn", keep())), 4),
    ],
    ids=repr,
)
def test_a_module_gets_a_decision_or_a_policy_of_its_own(policy: Policy, ops: int) -> None:
    """`exp` of `mlp` can be made again from a `sin` that is kept."""
    assert replayed(Layer(), leaf(3), policy) == ops


def test_a_named_tensor_is_kept() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        return rekindle.name(x.sin().exp(), "wave").cos().exp()

    assert replayed(region, x, named("cave")) == 4
    assert replayed(region, x, named("wave")) == 2
    assert replayed(region, x, named("cave", "w*")) == 2
    assert replayed(region, x, named("wave", fate="recompute")) == 4
    assert replayed(region, x, named("WAVE")) == 4


def test_a_tensor_is_returned_as_it_is_by_name() -> None:
    x = leaf(3)
    assert rekindle.name(x, "x") is x

    def region(x: Tensor) -> Tensor:
        y = x.sin()
        assert rekindle.name(y, "y") is y
        return y

    rekindle.checkpoint(region, x, context_fn=named("y"))


def test_an_input_can_be_named_to_no_effect() -> None:
    x = leaf(3)
    assert_same_step(
        lambda: x.sin().exp(),
        lambda: rekindle.checkpoint(
            lambda x: rekindle.name(x, "x").sin().exp(), x, context_fn=named("x")
        ),
        [x],
    )


def test_a_tensor_changed_after_it_was_named_is_kept_as_it_was() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        y = x.sin()
        rekindle.name(y, "y")
        z = (y + 1).exp()
        y.mul_(2)
        return z * y

    assert_same_step(
        lambda: region(x), lambda: rekindle.checkpoint(region, x, context_fn=named("y")), [x]
    )


def test_a_named_function_has_all_it_does_kept() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        return rekindle.name(Wave().forward, "first")(x).cos().exp()

    assert replayed(region, x, named("second")) == 4
    assert replayed(region, x, named("first")) == 2
    assert replayed(region, x, named("first", fate="recompute") | keep()) == 2


def test_a_function_can_be_named_where_it_is_defined() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        @functools.partial(rekindle.name, name="scaled")
        def scaled(self, x: Tensor, *, by: float) -> Tensor:
            """Scales."""
            return x * self.weight * by

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(x, by=2.0).sin()

    assert (Named.scaled.__name__, Named.scaled.__doc__) == ("scaled", "Scales.")
    assert replayed(Named(), leaf(3), named("scaled")) == 0
    assert replayed(Named(), leaf(3), recompute()) == 2


def test_a_name_ends_with_its_function_also_when_that_fails() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    def region(x: Tensor) -> Tensor:
        with suppress(ZeroDivisionError):
            rekindle.name(fails, "failed")(x)
        return x.sin().exp()

    assert replayed(region, leaf(3), named("failed")) == 2


def test_names_belong_to_a_thread() -> None:
    inside, done = threading.Event(), threading.Event()

    def waits(x: Tensor) -> Tensor:
        inside.set()
        assert done.wait(120)
        return x

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rekindle.name(waits, "named"), leaf(3))
        assert inside.wait(120)
        try:
            assert replayed(product, leaf(3, 3), named("named")) == 3
        finally:
            done.set()
        waiting.result(30)


def test_a_module_that_is_given_a_name_is_still_part_of_its_model() -> None:
    """Or is refused: but its parameters are not left out silently."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = rekindle.name(nn.Linear(3, 3), "up")

    with suppress(TypeError):
        assert len(list(Model().parameters())) == 2


@pytest.mark.parametrize(
    "policy",
    [at("mlp", named("wave")), first(1, named("wave")), every(2, named("wave"))],
    ids=repr,
)
def test_a_named_tensor_is_kept_also_by_a_policy_inside_another(policy: Policy) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return rekindle.name(x.sin().exp(), "wave").cos().exp()

    layer = Layer()
    layer.mlp = Named()
    assert replayed(layer, leaf(3), named("wave")) == 4
    assert replayed(layer, leaf(3), policy) == 4


def test_a_policy_that_spoke_of_an_op_before_decides_over_a_name() -> None:
    x = leaf(64)

    def region(x: Tensor) -> Tensor:
        for _ in range(8):
            x = rekindle.name(x.sin(), "wave")
        return x

    with rekindle.observe() as seen:
        policy = keep(aten.sin) | named("wave", fate="spill")
        rekindle.checkpoint(region, x, context_fn=policy).sum().backward()
    assert seen.spill.tensors_out == 0
    assert seen.total.ops_replayed == 0


@pytest.mark.parametrize(
    ("policy", "ops"),
    [
        (first(1, keep()), 4),
        (first(2, keep(aten.sin)), 3),
        (first(100, keep()), 0),
        (every(1, keep()), 0),
        (every(2, keep(aten.sin)), 2),
        (every(3, keep()), 3),
        (every(100, keep()), 4),
        (every(2, every(2, keep())), 3),
        (first(1, every(2, keep())), 4),
        (first(2, keep()) | every(2, keep()), 1),
        (first(2, keep(aten.cos)), 5),
        (first(2, recompute()) | keep(), 2),
    ],
    ids=repr,
)
def test_counted_policies_speak_for_some_ops_only(policy: Policy, ops: int) -> None:
    assert replayed(waves, leaf(3), policy) == ops


def test_only_ops_that_a_policy_speaks_of_are_counted() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.cos().cos().sin()
        return x

    assert replayed(region, x, recompute()) == 8
    assert replayed(region, x, every(2, keep(aten.sin))) == 7  # the third is not needed


@pytest.mark.parametrize("policy", [first(2, keep()), every(2, keep()), every(4, keep())], ids=repr)
def test_each_call_of_a_region_counts_anew(policy: Policy) -> None:
    x = leaf(3)
    counts = [replayed(waves, x, policy) for _ in range(3)]
    assert counts == [counts[0]] * 3


def test_a_call_that_failed_leaves_no_count_behind() -> None:
    policy, x = first(2, keep()), leaf(3)

    def fails(x: Tensor) -> Tensor:
        x.sin()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rekindle.checkpoint(fails, x, context_fn=policy)
    assert replayed(waves, x, policy) == 3


def test_a_region_inside_another_counts_by_itself() -> None:
    policy, x = first(1, keep(aten.sin)), leaf(3)

    def inner(x: Tensor) -> Tensor:
        return x.sin().exp().sin().exp()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x.sin(), context_fn=policy)

    with rekindle.observe() as seen:
        rekindle.checkpoint(outer, x, context_fn=policy).sum().backward()
    assert seen.regions[inner.__qualname__].ops_replayed == 3
    assert seen.regions[outer.__qualname__].ops_replayed == 1  # the inner region's first `sin`


def test_threads_count_by_themselves() -> None:
    policy, together = first(2, keep()), threading.Barrier(2)

    def in_step(x: Tensor) -> Tensor:
        for _ in range(6):
            together.wait(120)
            x = x.sin()
        return x

    def held(_: int) -> int:
        kept = []

        def noting(ctx: Any, op: Any, *args: Any) -> Any:
            kept.append(policy.decide(ctx) is not None)
            return None

        rekindle.checkpoint(in_step, leaf(3), context_fn=of(noting)).sum().backward()
        return sum(kept)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(held, range(2))) == [2, 2]


def test_equal_policies_in_two_places_count_by_themselves() -> None:
    policy = at("attn", first(1, keep(aten.exp))) | at("mlp", first(1, keep(aten.exp)))
    assert replayed(Layer(), leaf(3), policy) == 0


def sums(w: Tensor) -> Tensor:
    """Backward needs the second result; it is as large as the first, of which it is made."""
    return ((w @ w) + 1) @ w


def test_what_an_op_is_given_is_kept_in_place_of_what_that_was_made_from() -> None:
    found = []
    for policy in (keep(aten.mm), keep(aten.mm) | keep_inputs(aten.mm)):
        with rekindle.observe() as seen:
            rekindle.checkpoint(sums, leaf(4, 4), context_fn=policy).sum().backward()
        found.append((seen.total.ops_replayed, seen.total.activations_held, seen.total.bytes_held))
    assert found == [(1, 2, 128), (0, 2, 128)]


def test_what_an_op_is_given_is_not_kept_if_what_that_was_made_from_is_there_anyway() -> None:
    assert replayed(lambda w: (w + 1) @ w, leaf(4, 4), keep_inputs(aten.mm)) == 1


def test_what_an_op_is_given_is_not_kept_if_it_is_larger_than_what_that_was_made_from() -> None:
    def region(w: Tensor) -> Tensor:
        return torch.cat([w @ w, w]) @ w

    assert replayed(region, leaf(4, 4), keep(aten.mm) | keep_inputs(aten.mm)) == 1


def test_what_an_op_is_given_is_kept_also_by_a_policy_inside_another() -> None:
    class Sums(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return sums(w)

    layer = Layer()
    layer.mlp = Sums()
    policy = keep(aten.exp, aten.mm) | at("mlp", keep_inputs(aten.mm))
    assert replayed(layer, leaf(4, 4), keep(aten.exp, aten.mm) | keep_inputs(aten.mm)) == 0
    assert replayed(layer, leaf(4, 4), policy) == 0


def test_recompute_cheap_runs_no_product_again() -> None:
    w = leaf(4, 4)
    assert replayed(product, w, recompute_cheap) == 2
    assert replayed(lambda w: torch.softmax(w @ w, 0).float().sum(0).exp(), w, recompute_cheap) == 3


def test_recompute_cheap_speaks_of_every_op() -> None:
    assert recompute_cheap | keep(aten.sin) != recompute_cheap
    assert replayed(waves, leaf(3), recompute_cheap | keep(aten.sin)) == 5


class NoCode(torch.autograd.Function):
    """A forward that is no plain function."""

    forward = staticmethod(functools.partial(lambda by, ctx, x: x * by, 2.0))


BAD: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "torch's function": (lambda: keep(torch.mm), TypeError, r"torch\.ops\.aten\.mm\?"),
    "apply": (lambda: keep(Cube.apply), TypeError, "autograd.Function"),
    "module class": (lambda: keep(nn.Linear), TypeError, "Linear"),
    "number": (lambda: keep(3), TypeError, "got 3"),
    "none": (lambda: spill(None), TypeError, "got None"),
    "dict": (lambda: keep({aten.mm: True}), TypeError, "dict"),
    "list in list": (lambda: offload([[aten.mm]]), TypeError, "list"),
    "no namespace": (lambda: keep("mm"), ValueError, "'aten::mm'"),
    "no such op": (lambda: keep("aten::nope"), ValueError, "'aten::nope'"),
    "no such overload": (lambda: keep("aten::mm.nope"), ValueError, "'aten::mm.nope'"),
    "no such namespace": (lambda: keep("nope::mm"), ValueError, "'nope::mm'"),
    "attribute, no op": (lambda: keep("aten::mm.overloads"), ValueError, "'aten::mm.overloads'"),
    "attribute, no packet": (lambda: keep("aten::name"), ValueError, "'aten::name'"),
    "empty name": (lambda: keep(""), ValueError, "names are like"),
    "pattern": (lambda: at("", keep()), ValueError, "layers"),
    "pattern with a hole": (lambda: at("a..b", keep()), ValueError, r"a\.\.b"),
    "pattern of another type": (lambda: at(3, keep()), (TypeError, ValueError), "3"),
    "decision for a module": (lambda: at("mlp", "kept"), ValueError, "'kept'"),
    "no policy for a module": (lambda: at("mlp", None), TypeError, "NoneType"),
    "no names": (named, ValueError, "names"),
    "names in a list": (lambda: named(["a", "b"]), ValueError, "names"),
    "decision for a name": (lambda: named("a", fate="save"), ValueError, "'save'"),
    "zero": (lambda: first(0, keep()), ValueError, "0"),
    "half": (lambda: every(1.5, keep()), ValueError, r"1\.5"),
    "true": (lambda: first(True, keep()), ValueError, "True"),
    "swapped": (lambda: first(keep(), 2), ValueError, "keep"),
    "word for a policy": (lambda: every(2, "keep"), TypeError, "str"),
    "joined with a number": (lambda: keep() | 3, TypeError, "int"),
    "number joined": (lambda: 3 | keep(), TypeError, "int"),
    "joined with an op": (lambda: keep() | aten.mm, TypeError, "mm"),
    "joined with a function class": (lambda: keep() | Cube, TypeError, "Cube"),
    "policy of an op": (lambda: of(aten.mm.default), TypeError, "mm"),
    "policy of a name": (lambda: of("aten::mm"), TypeError, "str"),
    "contexts of an op": (
        lambda: rekindle.create_selective_checkpoint_contexts(aten.mm),
        TypeError,
        "mm",
    ),
    "contexts of a torch function": (
        lambda: rekindle.create_selective_checkpoint_contexts([torch.mm]),
        TypeError,
        r"torch\.ops\.aten\.mm\?",
    ),
    "contexts of nothing": (
        lambda: rekindle.create_selective_checkpoint_contexts(None),
        TypeError,
        "NoneType",
    ),
    "policy called with one argument": (lambda: keep()(aten.mm), TypeError, "op"),
    "list for context_fn": (
        lambda: rekindle.checkpoint(product, leaf(3, 3), context_fn=[aten.mm]),
        TypeError,
        "context_fn",
    ),
    "keep for context_fn": (
        lambda: rekindle.checkpoint(product, leaf(3, 3), context_fn=keep),
        TypeError,
        "context_fn",
    ),
    "name of a number": (lambda: rekindle.name(3, "three"), TypeError, "int"),
    "number for a name": (lambda: rekindle.name(leaf(3), 3), TypeError, "3"),
    "empty name for a tensor": (lambda: rekindle.name(leaf(3), ""), TypeError, "name"),
}


@pytest.mark.parametrize(("make", "error", "text"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_where_it_is_given(
    make: Callable[[], Any], error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        make()


def test_an_autograd_function_whose_forward_is_an_object_can_be_named_or_is_refused() -> None:
    with suppress(TypeError):
        assert repr(keep(NoCode)) == "keep(NoCode)"


TOLD = (TypeError, ValueError, rekindle.RekindleError)


@pytest.mark.parametrize("answer", [1, 0, 2.0, "kept", "", [], torch.tensor(True)], ids=repr)
def test_an_answer_that_is_no_decision_is_told(answer: Any) -> None:
    policy = of(lambda *args, **kwargs: answer)
    with pytest.raises(TOLD, match=r"keep.*returned"):
        rekindle.checkpoint(waves, leaf(3), context_fn=policy)


@pytest.mark.parametrize("region", [product, lambda x: x * 2, lambda x: 1 - x])
def test_an_answer_that_is_no_decision_is_told_from_an_operator_too(region: Any) -> None:
    """Torch turns a `TypeError` inside an operator into "unsupported operand type(s)"."""
    with pytest.raises(TOLD, match=r"keep.*returned"):
        rekindle.checkpoint(region, leaf(3, 3), context_fn=of(lambda *args, **kwargs: "kept"))


def test_a_policy_function_that_takes_too_few_arguments_is_told() -> None:
    def policy(ctx: Any, op: Any) -> bool:
        return True

    with pytest.raises(TOLD, match="policy"):
        rekindle.checkpoint(product, leaf(3, 3), context_fn=of(policy))


def test_a_policy_that_raises_leaves_nothing_changed() -> None:
    def policy(ctx: Any, op: Any, *args: Any) -> bool:
        raise ZeroDivisionError

    def nested(x: Tensor) -> Tensor:
        return rekindle.checkpoint(product, x, context_fn=of(policy))

    for region, outer in [(product, of(policy)), (nested, keep())]:
        with pytest.raises(ZeroDivisionError):
            rekindle.checkpoint(region, leaf(3, 3), context_fn=outer)
        assert not is_recording()
        assert dispatch_modes() == 0
        assert top_hooks(False) is None
    assert replayed(product, leaf(3, 3), keep(aten.mm)) == 2


def test_a_policy_function_is_let_go_with_its_region() -> None:
    """Trainers make a new one for every call of a region, and it may see the whole model."""
    x, seen = leaf(3, 3), []

    def step() -> None:
        def policy(ctx: Any, op: Any, *args: Any) -> bool:
            return False

        seen.append(ref(policy))
        rekindle.checkpoint(product, x, context_fn=of(policy)).sum().backward()

    step()
    gc.collect()
    assert seen[0]() is None


def test_a_policy_function_may_be_an_object_that_cannot_be_hashed() -> None:
    class Mine:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, ctx: Any, op: Any, *args: Any) -> bool:
            return op is aten.mm.default

    x = leaf(3, 3)
    assert replayed(product, x, of(Mine())) == 2
    assert replayed(product, x, first(1, Mine())) == 2


def in_contexts(policy: Any, make: Any = rekindle.create_selective_checkpoint_contexts) -> Any:
    return functools.partial(make, policy)


torchs = torch.utils.checkpoint.create_selective_checkpoint_contexts


@pytest.mark.parametrize(
    "context_fn",
    [
        keep(aten.mm),
        of(keep_products),
        of([aten.mm]),
        in_contexts(keep(aten.mm)),
        in_contexts(keep_products),
        in_contexts([aten.mm]),
        in_contexts([aten.mm.default]),
        in_contexts(first(1, keep(aten.mm))),
        in_contexts(keep(aten.mm), torchs),
        in_contexts([aten.mm.default], torchs),
        in_contexts(first(1, keep(aten.mm)), torchs),
        lambda: rekindle.create_selective_checkpoint_contexts(keep(aten.mm)),
    ],
)
def test_a_policy_is_a_context_fn_or_makes_one(context_fn: Any) -> None:
    w = leaf(4, 4)
    assert replayed(product, w, context_fn) == 2
    run = functools.partial(rekindle.checkpoint, product, w, context_fn=context_fn)
    assert_same_step(lambda: product(w), run, [w])


def test_the_same_two_contexts_may_serve_many_calls() -> None:
    contexts = rekindle.create_selective_checkpoint_contexts(first(2, keep()))
    assert [replayed(waves, leaf(3), lambda: contexts) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize(
    "policy",
    [keep(aten.mm), first(1, keep()), recompute_cheap, keep_products | keep(aten.exp)],
    ids=repr,
)
def test_torchs_own_checkpoint_takes_our_policies(policy: Policy) -> None:
    w = leaf(4, 4)
    for context_fn in (policy, in_contexts(policy)):
        run = functools.partial(torch.utils.checkpoint.checkpoint, product, w, use_reentrant=False)
        assert_same_step(lambda: product(w), functools.partial(run, context_fn=context_fn), [w])


@pytest.mark.parametrize(
    ("policy", "answer"),
    [
        (keep(aten.mm), CheckpointPolicy.MUST_SAVE),
        (recompute(aten.mm), CheckpointPolicy.PREFER_RECOMPUTE),
        (keep(aten.sin), CheckpointPolicy.PREFER_RECOMPUTE),
        (offload(aten.mm), CheckpointPolicy.MUST_CPU_OFFLOAD),
        (spill(aten.mm), CheckpointPolicy.MUST_CPU_OFFLOAD),
        (of(lambda *args: CheckpointPolicy.PREFER_SAVE), CheckpointPolicy.MUST_SAVE),
        (of(lambda ctx, op, a, b: b == 2), CheckpointPolicy.MUST_SAVE),
    ],
    ids=repr,
)
def test_a_policy_answers_as_a_torch_policy_function(
    policy: Policy, answer: CheckpointPolicy
) -> None:
    ctx = TorchContext(is_recompute=False)
    assert policy(ctx, aten.mm.default, 1, 2) is answer


def told(
    function: Callable[..., Any], x: Tensor, what: Callable[[Any], Any]
) -> list[tuple[str, Any]]:
    """What a policy is told of each op of a region."""
    found: list[tuple[str, Any]] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        found.append((op.name().split("::")[1], what(ctx)))

    rekindle.checkpoint(function, x, context_fn=of(policy))
    return found


def test_a_policy_is_told_the_op_and_its_arguments() -> None:
    x, seen = leaf(3), []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        assert ctx.op is op
        assert (ctx.args, ctx.kwargs) == (args, kwargs)
        seen.append((op, args[1:], kwargs))

    rekindle.checkpoint(lambda x: torch.add(x.sum(0), 1, alpha=2), x, context_fn=of(policy))
    assert seen == [(aten.sum.dim_IntList, ([0],), {}), (aten.add.Tensor, (1,), {"alpha": 2})]


def test_a_policy_is_told_what_the_op_made() -> None:
    x = torch.ones(3, requires_grad=True)
    found = told(lambda x: (x + 1).max(0)[0] * 2, x, lambda ctx: ctx.op_output)
    assert torch.equal(found[0][1], torch.full((3,), 2.0))
    assert isinstance(found[1][1], tuple)
    assert [part.item() for part in found[1][1]] == [2.0, 0]
    assert found[2][1] == 4


def test_a_policy_is_told_how_often_the_op_ran_in_this_call() -> None:
    def region(x: Tensor) -> Tensor:
        return x.sin().cos().sin().sin().cos()

    expected = [("sin", 0), ("cos", 0), ("sin", 1), ("sin", 2), ("cos", 1)]
    for _ in range(2):
        assert told(region, leaf(3), lambda ctx: ctx.index) == expected


def test_a_policy_is_told_the_size_of_all_that_an_op_made() -> None:
    found = told(lambda x: x.double().sort()[0], leaf(3), lambda ctx: ctx.nbytes)
    assert [size for _, size in found] == [24, 48]  # values and indices


def test_a_policy_is_told_whether_autograd_follows_the_op() -> None:
    def region(x: Tensor) -> Tensor:
        mask = torch.arange(3).cos()
        with torch.no_grad():
            scale = x.tanh()
        return x.sin() * mask * scale * x.detach().exp()

    found = dict(told(region, leaf(3), lambda ctx: ctx.requires_grad))
    assert found == {
        "arange": False,
        "cos": False,
        "tanh": False,
        "sin": True,
        "mul.Tensor": True,
        "exp": False,
    }


def test_a_policy_is_told_the_names_of_the_functions_that_run() -> None:
    def outer(x: Tensor) -> Tensor:
        return rekindle.name(torch.exp, "inner")(x.sin()).cos()

    found = told(lambda x: rekindle.name(outer, "outer")(x).tanh(), leaf(3), lambda ctx: ctx.names)
    assert found == [
        ("sin", ("outer",)),
        ("exp", ("outer", "inner")),
        ("cos", ("outer",)),
        ("tanh", ()),
    ]


def test_a_policy_is_told_the_path_of_the_module() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"one": Layer()})
            self.unlisted = [Wave()]

        def forward(self, x: Tensor) -> Tensor:
            return self.unlisted[0](self.layers["one"](x)).cos()

    found = told(Around(), leaf(3), lambda ctx: ctx.module_path)
    assert [path for _, path in found] == [
        *["layers.one.attn"] * 2,
        *["layers.one.mlp"] * 2,
        *["Wave"] * 2,
        "",
    ]


def test_a_policy_is_given_a_state_of_its_own_for_each_call() -> None:
    def count(ctx: Any) -> int:
        ctx.state["seen"] = ctx.state.get("seen", 0) + 1
        return ctx.state["seen"]

    for _ in range(2):
        assert [n for _, n in told(waves, leaf(3), count)] == [1, 2, 3, 4, 5, 6]


def test_a_policy_is_asked_in_forward_only() -> None:
    x, asked = leaf(3), []

    def policy(ctx: Any, op: Any, *args: Any) -> bool:
        asked.append(ctx.is_recompute)
        return False

    rekindle.checkpoint(waves, x, context_fn=of(policy)).sum().backward()
    assert asked == [False] * 6


def test_ops_of_a_policy_are_none_of_the_regions() -> None:
    def policy(ctx: Any, op: Any, *args: Any) -> bool:
        return bool(ctx.op_output.abs().max() > 100)

    assert replayed(waves, leaf(3), of(policy)) == 5


def test_a_policy_may_be_a_class_of_the_users_own() -> None:
    class Large(Policy):
        def decide(self, ctx: rekindle.SelectiveCheckpointContext) -> Any:
            return keep().decide(ctx) if ctx.nbytes > 12 else None

    assert replayed(lambda x: torch.stack([x.sin(), x]).exp().sin(), leaf(3), Large()) == 0
    assert replayed(lambda x: x.sin().exp().sin(), leaf(3), Large() | recompute()) == 2


def test_a_class_of_the_users_own_may_use_the_names_of_before() -> None:
    class Large(type(keep())):  # type: ignore[misc]
        def fate(self, ctx: rekindle.SelectiveCheckpointContext) -> Any:
            return super().fate(ctx) if ctx.nbytes > 12 else None

    large = Large(keep().then, None)  # type: ignore[attr-defined]
    assert replayed(lambda x: torch.stack([x.sin(), x]).exp().sin(), leaf(3), large) == 0
    assert replayed(lambda x: x.sin().exp().sin(), leaf(3), large | recompute()) == 2
