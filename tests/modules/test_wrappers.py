"""`checkpoint_wrapper` and `offload_wrapper`: a module in a wrapper runs as the module does."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import CheckpointImpl, checkpoint_wrapper, offload_wrapper
from tests.toys import Block, Mlp, Stack, assert_same_step, leaf, same_bits

every_impl = pytest.mark.parametrize("impl", list(CheckpointImpl), ids=lambda impl: impl.name)
spill_wrapper = functools.partial(offload_wrapper, tier="disk", min_bytes=1)
WRAPPERS = {
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "no_reentrant": checkpoint_wrapper,
    "offload": offload_wrapper,
    "spill": spill_wrapper,
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


class Scaled(nn.Module):
    """Takes what it multiplies by, and what it adds, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
        y = (self.linear(x) * scale).sin().exp()
        return y if bias is None else y + bias.tanh()


def counts(run: Callable[[], Tensor]) -> dict[str, tuple[int, int, int]]:
    """Forwards, replays and ops replayed of each region in a step."""
    with rekindle.observe() as seen:
        run().sum().backward()
    return {name: (c.forwards, c.replays, c.ops_replayed) for name, c in seen.regions.items()}


# Steps


@every_wrapper
def test_a_wrapped_block_trains_as_plain(wrap: Any) -> None:
    block, x = Block(drop=0.3), leaf(4, 8)
    wrapper = wrap(block)
    assert_same_step(lambda: block(x), lambda: wrapper(x), [x, *block.parameters()])


@every_wrapper
def test_wrapped_blocks_in_a_row_train_as_plain(wrap: Any) -> None:
    blocks, x = Stack(3, drop=0.3).blocks, leaf(4, 8)
    plain, model = nn.Sequential(*blocks), nn.Sequential(*map(wrap, blocks))
    assert_same_step(lambda: plain(x), lambda: model(x), [x, *blocks.parameters()])


@every_wrapper
def test_keyword_arguments_reach_the_module_and_get_their_gradients(wrap: Any) -> None:
    module, x, bias = Scaled(), leaf(4, 8), leaf(8)
    wrapper = wrap(module)
    assert_same_step(
        lambda: module(x, scale=2.0, bias=bias),
        lambda: wrapper(x, scale=2.0, bias=bias),
        [x, bias, *module.parameters()],
    )


@every_wrapper
def test_a_module_may_be_called_with_keyword_arguments_alone(wrap: Any) -> None:
    module, x = Scaled(), leaf(4, 8)
    wrapper = wrap(module)
    assert_same_step(
        lambda: module(x=x), lambda: wrapper(bias=None, x=x), [x, *module.parameters()]
    )


@every_wrapper
def test_arguments_and_outputs_that_are_no_tensors_come_through(wrap: Any) -> None:
    class Echo(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    x = leaf(2)
    args, kwargs = wrap(Echo())(x, 1, None, a=x, b="b")
    assert args[1:] == (1, None)
    assert kwargs["b"] == "b"
    assert same_bits(args[0], x)
    assert same_bits(kwargs["a"], x)


@every_wrapper
def test_under_no_grad_a_wrapper_is_the_plain_call(wrap: Any) -> None:
    block, x = Block(), leaf(4, 8)
    with torch.no_grad(), rekindle.observe() as seen:
        out = wrap(block)(x)
    assert same_bits(out, block(x))
    assert seen.total == rekindle.Counts()
    assert seen.spill == rekindle.Traffic()


@every_wrapper
def test_hooks_of_the_wrapped_module_run(wrap: Any) -> None:
    block, calls = Block(), []
    block.register_forward_hook(lambda *_: calls.append("forward"))
    wrap(block)(leaf(4, 8))
    assert calls == ["forward"]


@every_wrapper
def test_training_mode_reaches_the_wrapped_module(wrap: Any) -> None:
    block = Block()
    assert wrap(block).eval().training is False
    assert block.mlp.training is False


# Regions, counted


@pytest.mark.parametrize(
    ("impl", "ops"), [(CheckpointImpl.REENTRANT, 10), (CheckpointImpl.NO_REENTRANT, 8)]
)
def test_each_call_is_a_region_with_the_modules_name(impl: CheckpointImpl, ops: int) -> None:
    """Of transpose, addmm, gelu, transpose, addmm; the last is not needed."""
    wrapper = checkpoint_wrapper(Mlp(), impl)
    assert counts(lambda: wrapper(wrapper(leaf(2, 8)))) == {"Mlp": (2, 2, ops)}


def test_a_reentrant_region_with_keyword_arguments_has_the_modules_name() -> None:
    wrapper = checkpoint_wrapper(Mlp(), CheckpointImpl.REENTRANT)
    assert counts(lambda: wrapper(x=leaf(2, 8))) == {"Mlp": (1, 1, 5)}


@every_impl
def test_a_wrapped_block_in_a_wrapped_block_is_a_region_in_a_region(impl: CheckpointImpl) -> None:
    block = Block()
    block.mlp = checkpoint_wrapper(block.mlp, impl)  # type: ignore[assignment]
    wrapper = checkpoint_wrapper(block, impl)
    regions = counts(lambda: wrapper(leaf(2, 8)))
    assert {name: c[:2] for name, c in regions.items()}["Block"] == (1, 1)
    assert set(regions) == {"Block", "Mlp"}


def test_a_wrapper_in_a_wrapper_is_a_region_in_a_region() -> None:
    inner = checkpoint_wrapper(Mlp())
    outer = checkpoint_wrapper(inner)
    x = leaf(2, 8)
    assert set(counts(lambda: outer(x))) == {"CheckpointWrapper", "Mlp"}
    assert_same_step(lambda: inner(x), lambda: outer(x), [x, *inner.parameters()])


def test_only_the_input_is_held() -> None:
    wrapper, x = checkpoint_wrapper(Mlp()), leaf(4, 8)
    with rekindle.observe() as seen:
        wrapper(x * 1)
    assert (seen.total.activations_held, seen.total.bytes_held) == (1, 4 * 8 * 4)


# Options


def test_options_of_checkpoint_are_given_to_the_wrapper() -> None:
    wrapper = checkpoint_wrapper(Mlp(), early_stop=False)
    assert counts(lambda: wrapper(leaf(2, 8))) == {"Mlp": (1, 1, 5)}


def test_a_policy_is_given_to_the_wrapper() -> None:
    block, x = Block(), leaf(2, 8)
    wrapper = checkpoint_wrapper(block, context_fn=rekindle.policies.keep_matmuls)
    assert_same_step(lambda: block(x), lambda: wrapper(x), [x, *block.parameters()])


def test_torchs_selective_contexts_are_given_to_the_wrapper() -> None:
    contexts = functools.partial(
        rekindle.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
    )
    block, x = Block(), leaf(2, 8)
    wrapper = checkpoint_wrapper(block, context_fn=contexts)
    assert_same_step(lambda: block(x), lambda: wrapper(x), [x, *block.parameters()])


def test_a_function_of_the_users_is_called_with_the_module_its_arguments_and_options() -> None:
    calls: list[Any] = []

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((function, len(args), kwargs))
        return function(*args)

    module = Mlp()
    checkpoint_wrapper(module, checkpoint_fn=run, depth=3)(leaf(2, 8), flag=True)
    assert calls == [(module, 1, {"depth": 3, "flag": True})]


def test_a_function_of_the_users_gets_keyword_arguments_by_position_if_reentrant() -> None:
    """As torch's wrapper: `checkpoint_impl` says how the function likes them."""

    def run(function: Any, *args: Any) -> Any:
        return function(*args)

    module, x = Scaled(), leaf(2, 8)
    wrapper = checkpoint_wrapper(module, CheckpointImpl.REENTRANT, run)
    assert same_bits(wrapper(x, scale=3.0), module(x, scale=3.0))


def test_the_function_of_a_wrapper_can_be_replaced() -> None:
    """As libraries do that assign to `checkpoint_fn`."""
    wrapper = checkpoint_wrapper(Mlp())
    wrapper.checkpoint_fn = lambda function, *args: function(*args)
    assert counts(lambda: wrapper(leaf(2, 8))) == {}


def test_the_function_of_a_wrapper_tells_the_variant() -> None:
    assert {
        impl.name: checkpoint_wrapper(Mlp(), impl).checkpoint_fn.keywords for impl in CheckpointImpl
    } == {"REENTRANT": {"use_reentrant": True}, "NO_REENTRANT": {"use_reentrant": False}}


# Offload


@pytest.fixture
def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_activations_are_offloaded_and_no_parameter_is(layers: nn.Sequential) -> None:
    """Field note 20. Of the inputs of eight layers, the batch stays and what is wanted first."""
    model = spill_wrapper(layers)
    with rekindle.observe() as seen:
        model(torch.randn(16, 64)).sum().backward()
    assert (seen.spill.tensors_out, seen.spill.bytes_out) == (5, 5 * 16 * 64 * 4)
    assert (seen.spill.tensors_in, seen.spill.bytes_in) == (5, 5 * 16 * 64 * 4)


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_wrapped_layers_offload_what_one_wrapper_around_them_does(layers: nn.Sequential) -> None:
    """They are one step of one engine."""
    model = nn.Sequential(*map(spill_wrapper, layers))
    with rekindle.observe() as seen:
        model(torch.randn(16, 64)).sum().backward()
    assert seen.spill.tensors_out == 5


@pytest.mark.usefixtures("new_offloaders")
def test_a_region_in_an_offloaded_module_trains_as_plain() -> None:
    block, x = Block(dim=64, drop=0.2), leaf(16, 64)
    both = spill_wrapper(nn.Sequential(nn.Tanh(), checkpoint_wrapper(block), nn.Tanh(), nn.Tanh()))
    plain = nn.Sequential(nn.Tanh(), block, nn.Tanh(), nn.Tanh())
    assert_same_step(lambda: plain(x), lambda: both(x), [x, *block.parameters()])


@pytest.mark.usefixtures("new_offloaders")
def test_an_offloaded_module_in_a_region_trains_as_plain() -> None:
    block, x = Block(dim=64, drop=0.2), leaf(16, 64)
    both = checkpoint_wrapper(spill_wrapper(block))
    assert_same_step(lambda: block(x), lambda: both(x), [x, *block.parameters()])


def test_everything_that_can_go_goes_unless_a_quota_is_given() -> None:
    assert offload_wrapper(Mlp())._offload == rekindle.offload(quota=1.0)
    assert spill_wrapper(Mlp())._offload == rekindle.offload(tier="disk", min_bytes=1, quota=1.0)
    assert offload_wrapper(Mlp(), quota="auto")._offload == rekindle.offload(quota="auto")


# What is refused


@every_wrapper
@pytest.mark.parametrize("thing", [torch.sin, None, Mlp], ids=["function", "None", "class"])
def test_what_is_no_module_is_refused(wrap: Any, thing: Any) -> None:
    with pytest.raises(TypeError, match=r"wraps a module, but got .*rekindle.checkpoint"):
        wrap(thing)


@pytest.mark.parametrize("impl", [None, "reentrant", True])
def test_an_unknown_variant_is_refused(impl: Any) -> None:
    with pytest.raises(TypeError, match=f"checkpoint_impl should be .* but got {impl!r}"):
        checkpoint_wrapper(Mlp(), impl)


def test_a_variant_that_is_given_twice_is_refused() -> None:
    with pytest.raises(TypeError, match="use_reentrant"):
        checkpoint_wrapper(Mlp(), use_reentrant=True)


def test_an_unknown_option_of_offload_is_refused() -> None:
    with pytest.raises(TypeError, match="quotum"):
        offload_wrapper(Mlp(), quotum=1)


def test_the_base_class_is_for_subclasses() -> None:
    with pytest.raises(TypeError, match="abstract"):
        rekindle.ActivationWrapper(Mlp())  # type: ignore[abstract]


# Compiled


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_wrapper
def test_a_wrapped_module_compiles(wrap: Any, backend: str) -> None:
    module, x, bias = Scaled(), leaf(4, 8), leaf(8)
    wrapped = wrap(module)
    is_whole = isinstance(wrapped, rekindle.CheckpointWrapper)  # offload breaks the graph
    compiled = torch.compile(wrapped, backend=backend, fullgraph=is_whole)
    assert_same_step(
        lambda: module(x, scale=2.0, bias=bias),
        lambda: compiled(x, scale=2.0, bias=bias),
        [x, bias, *module.parameters()],
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_wrapper_is_recomputed_in_the_backward_graph() -> None:
    """The input is saved, and the parameters; no activation."""
    module, x, saved = Mlp(), leaf(4, 8), []
    compiled = torch.compile(checkpoint_wrapper(module), backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compiled(x)
    known = {t.data_ptr() for t in (x, *module.parameters())}
    assert [t.shape for t in saved if t.data_ptr() not in known] == []


@pytest.mark.usefixtures("fresh_compiler", "new_offloaders", "written_at_once")
def test_a_compiled_module_in_an_offload_wrapper_is_offloaded(layers: nn.Sequential) -> None:
    model = spill_wrapper(torch.compile(layers, backend="aot_eager"))
    with rekindle.observe() as seen:
        model(torch.randn(16, 64)).sum().backward()
    assert seen.spill.tensors_out == 7
