"""A region in compiled code gives what the same code gives without it, on every backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor

import rekindle
from rekindle import policies
from tests.graphs import TORCHS_WARNINGS, graphs_of
from tests.toys import Block, assert_same_step, leaf, same_bits

pytestmark = TORCHS_WARNINGS


BACKENDS = ["eager", "aot_eager", "aot_eager_decomp_partition", "inductor"]
POLICIES = [None, policies.keep_matmuls]


def region(function: Callable[..., Any], policy: Any = None) -> Callable[..., Any]:
    """The function as a region; compiled, it is one graph."""
    if policy is None:
        return lambda *args: rekindle.checkpoint(function, *args)
    return lambda *args: rekindle.checkpoint(function, *args, context_fn=policy)


def assert_same_compiled(
    function: Callable[..., Any], leaves: list[Tensor], *args: Tensor, **options: Any
) -> None:
    """Compiled with and without a region, a function takes the same step, bit for bit."""
    policy = options.pop("policy", None)
    options = {"backend": "aot_eager", "fullgraph": True} | options
    plain = torch.compile(function, **options)
    other = torch.compile(region(function, policy), **options)
    assert_same_step(lambda: plain(*args), lambda: other(*args), leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES, ids=["full", "selective"])
def test_dropout_is_the_same_in_the_replay(backend: str, policy: Any) -> None:
    block, x = Block(drop=0.5), leaf(4, 8)
    assert_same_compiled(block, [x, *block.parameters()], x, backend=backend, policy=policy)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: (x.sin() * torch.rand_like(x)).exp(),
        lambda x: functional.rrelu(x.sin(), training=True).exp(),
    ],
    ids=["rand_like", "rrelu"],
)
def test_random_numbers_are_the_same_in_the_replay(
    backend: str, draw: Callable[[Tensor], Tensor]
) -> None:
    x = leaf(4, 8)
    assert_same_compiled(draw, [x], x, backend=backend)


def test_without_preserved_random_state_a_region_compiles() -> None:
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(torch.sin, x, preserve_rng_state=False)  # type: ignore[no-any-return]

    assert graphs_of(run, leaf(3)).count == 1


@pytest.mark.parametrize("policy", [None, policies.keep_matmuls_and_attention])
def test_attention_is_the_same(policy: Any) -> None:
    q = leaf(1, 2, 16, 8)

    def attend(q: Tensor) -> Tensor:
        out = functional.scaled_dot_product_attention(q.sin(), q.cos(), q, is_causal=True)
        return out.exp()

    assert_same_compiled(attend, [q], q, policy=policy)


def test_flex_attention_compiles_inside_a_region() -> None:
    """On a CPU, flex attention has a forward only."""
    q = torch.randn(1, 2, 16, 8)

    def attend(q: Tensor) -> Tensor:
        return flex_attention(q.sin(), q.cos(), q).exp()  # type: ignore[union-attr]

    compiled = torch.compile(
        region(attend, policies.keep_attention), backend="aot_eager", fullgraph=True
    )
    plain = functional.scaled_dot_product_attention(q.sin(), q.cos(), q).exp()
    torch.testing.assert_close(compiled(q), plain)


@torch.library.custom_op("rekindle_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda _, grad: grad * 2)


def test_a_custom_op_is_the_same() -> None:
    x = leaf(3)
    assert_same_compiled(lambda x: twice(x.sin()).exp(), [x], x)


def test_a_custom_op_is_kept_by_its_name() -> None:
    def run(x: Tensor) -> Tensor:
        return twice(x.sin()).exp()

    assert graphs_of(region(run), leaf(3)).times("twice") == (1, 1)
    kept = region(run, policies.keep("rekindle_tests::twice"))
    assert graphs_of(kept, leaf(3)).times("twice") == (1, 0)


def test_a_tensor_subclass_goes_through_a_region() -> None:
    pair = TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_()
    grads = []
    for run in (lambda x: x.sin().exp(), region(lambda x: x.sin().exp())):
        pair.grad = None
        torch.compile(run, backend="aot_eager", fullgraph=True)(pair).sum().backward()
        grads.append(pair.grad)
    assert same_bits(grads[0].a, grads[1].a)
    assert same_bits(grads[0].b, grads[1].b)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("policy", POLICIES, ids=["full", "selective"])
def test_other_shapes_do_not_compile_anew_for_ever(dynamic: bool | None, policy: Any) -> None:
    block, counter = Block(), CompileCounterWithBackend("aot_eager")
    run = torch.compile(region(block, policy), backend=counter, dynamic=dynamic, fullgraph=True)
    for batch in (2, 3):
        run(leaf(batch, 8)).sum().backward()
    compiled = counter.frame_count
    for batch in (5, 7, 9):
        x = leaf(batch, 8)
        assert_same_step(lambda x=x: block(x), lambda x=x: run(x), [x])
    assert counter.frame_count == compiled


def test_a_region_under_autocast_is_the_same() -> None:
    block, x = Block(), leaf(4, 8)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)  # type: ignore[no-any-return]

    assert_same_compiled(run, [x, *block.parameters()], x)


def test_two_backwards_of_one_forward_are_the_same() -> None:
    x = leaf(4, 8)
    run = torch.compile(region(lambda x: x.sin().exp()), backend="aot_eager")
    out = run(x).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    assert same_bits(first, second)


def test_a_region_in_a_step_under_compiled_autograd_is_right() -> None:
    x = leaf(4, 8)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)

    @torch.compile(backend="aot_eager")
    def step() -> None:
        region(lambda x: x.sin().exp())(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        step()
    assert same_bits(x.grad, expected)


def test_a_region_without_gradients_compiles() -> None:
    block, x = Block(), torch.randn(4, 8)
    run = torch.compile(region(block), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert same_bits(run(x), block(x))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("policy", POLICIES, ids=["full", "selective"])
def test_on_a_gpu_steps_are_those_of_the_compiled_model_without_regions(
    mode: str, policy: Any
) -> None:
    block, x = Block(dim=64, drop=0.5).cuda(), leaf(32, 64, device="cuda")
    plain = torch.compile(block, mode=mode, fullgraph=True)
    other = torch.compile(region(block, policy), mode=mode, fullgraph=True)
    leaves, losses = [x, *block.parameters()], list[list[Tensor]]()
    for run in (plain, other):
        torch.manual_seed(0)
        grads = []
        for _ in range(4):
            for one in leaves:  # a graph that is captured writes its results over those before
                one.grad = None
            torch.compiler.cudagraph_mark_step_begin()
            run(x).sum().backward()
            grads += [one.grad.clone() for one in leaves]  # type: ignore[union-attr]
        losses.append(grads)
    for a, b in zip(*losses, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("policy", [None, policies.keep_attention], ids=["full", "selective"])
def test_on_a_gpu_flex_attention_has_the_same_gradients(policy: Any) -> None:
    q = leaf(1, 2, 128, 64, device="cuda")

    def attend(q: Tensor) -> Tensor:
        return flex_attention(q.sin(), q.cos(), q).exp()  # type: ignore[union-attr]

    grads = []
    for run in (attend, region(attend, policy)):
        q.grad = None
        torch.compile(run, fullgraph=True)(q).sum().backward()
        grads.append(q.grad)
    torch.testing.assert_close(*grads)
