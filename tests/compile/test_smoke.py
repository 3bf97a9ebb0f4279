"""A few regions under `torch.compile`, and compiled modules inside regions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import rekindle
from tests.toys import Block, Mlp, assert_same_step, leaf


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled as one graph, or an error."""
    return torch.compile(function, backend="aot_eager", fullgraph=True)  # type: ignore[no-any-return]


def wave(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


def test_a_region_compiles_and_gives_eager_gradients() -> None:
    x = leaf(3, 3)

    @whole
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(wave, x) * 2

    assert_same_step(lambda: wave(x) * 2, lambda: run(x), [x])


def test_a_region_around_a_module_compiles_and_gives_eager_gradients() -> None:
    block, x = Block(), leaf(2, 8)

    @whole
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(block, x)

    assert_same_step(lambda: block(x), lambda: run(x), [x, *block.parameters()])


def test_a_region_with_keywords_and_options_compiles() -> None:
    x = leaf(3, 3)

    def scaled(x: Tensor, by: float) -> Tensor:
        return (x * by).sin().exp()

    @whole
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(
            scaled, x, by=3.0, use_reentrant=False, early_stop=False, preserve_rng_state=False
        )

    assert_same_step(lambda: scaled(x, 3.0), lambda: run(x), [x])


def test_a_region_inside_a_region_compiles() -> None:
    x = leaf(3, 3)

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(wave, x.tanh()).sigmoid()

    @whole
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(outer, x)

    assert_same_step(lambda: wave(x.tanh()).sigmoid(), lambda: run(x), [x])


def test_the_decorator_form_compiles_and_gives_eager_gradients() -> None:
    x = leaf(3, 3)
    region = rekindle.checkpoint(use_reentrant=False)(wave)

    @whole
    def run(x: Tensor) -> Tensor:
        return region(x) * 2

    assert_same_step(lambda: wave(x) * 2, lambda: run(x), [x])


def test_torchs_selective_contexts_compile() -> None:
    x = leaf(4, 4)

    def product(x: Tensor) -> Tensor:
        return (x @ x).sin().exp()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    @whole
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(product, x, context_fn=contexts)

    assert_same_step(lambda: product(x), lambda: run(x), [x])


def test_a_compiled_region_is_recomputed_in_the_backward_graph() -> None:
    """The forward graph gives the region's input to the backward, and none of its activations."""
    saved: list[Tensor] = []

    @whole
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(wave, x)

    x = leaf(3, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


def test_torchs_checkpoint_compiles_under_the_patch() -> None:
    block, x = Mlp(), leaf(2, 8)

    @whole
    def run(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    with rekindle.patch_torch():
        assert_same_step(lambda: block(x), lambda: run(x), [x, *block.parameters()])


def test_our_own_checkpoint_compiles_under_the_patch() -> None:
    block, x = Mlp(), leaf(2, 8)

    @whole
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(block, x)

    with rekindle.patch_torch():
        assert_same_step(lambda: block(x), lambda: run(x), [x, *block.parameters()])
    assert_same_step(lambda: block(x), lambda: run(x), [x, *block.parameters()])


def test_what_was_compiled_before_the_patch_is_right_under_it_and_after() -> None:
    block, x = Mlp(), leaf(2, 8)

    @whole
    def run(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    leaves = [x, *block.parameters()]
    assert_same_step(lambda: block(x), lambda: run(x), leaves)
    with rekindle.patch_torch():
        assert_same_step(lambda: block(x), lambda: run(x), leaves)
    assert_same_step(lambda: block(x), lambda: run(x), leaves)


def test_a_compiled_region_is_not_seen_by_observe() -> None:
    @whole
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(wave, x)

    with rekindle.observe() as seen:
        run(leaf(3)).sum().backward()
    assert seen.total.forwards == 0


# Eager regions around compiled code


def test_an_eager_region_around_a_compiled_module_gives_eager_gradients() -> None:
    block, x = Block(), leaf(2, 8)
    compiled = torch.compile(block, backend="aot_eager")
    assert_same_step(
        lambda: block(x), lambda: rekindle.checkpoint(compiled, x), [x, *block.parameters()]
    )


def test_an_eager_region_around_a_compiled_module_is_replayed_once() -> None:
    compiled = torch.compile(Block(), backend="aot_eager")
    with rekindle.observe() as seen:
        rekindle.checkpoint(compiled, leaf(2, 8)).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)


def test_eager_regions_around_compiled_modules_train_as_eager_ones() -> None:
    blocks = nn.ModuleList(Block() for _ in range(2))
    compiled = [torch.compile(block, backend="aot_eager", fullgraph=True) for block in blocks]
    x = leaf(2, 8)

    def plain() -> Tensor:
        return blocks[1](blocks[0](x))  # type: ignore[no-any-return]

    def regions() -> Tensor:
        return rekindle.checkpoint(compiled[1], rekindle.checkpoint(compiled[0], x))  # type: ignore[no-any-return]

    assert_same_step(plain, regions, [x, *blocks.parameters()])


def test_a_region_may_ask_whether_it_is_a_replay() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return rekindle.checkpoint(lambda x: x if rekindle.is_recomputing() else x.sin().exp(), x)

    x = torch.ones(3, requires_grad=True)
    assert torch.equal(compiled(x), x.sin().exp())
