"""`rekindle.offload` around, and inside, compiled code: what a graph saves is offloaded."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import policies
from tests.graphs import BOTH_BACKENDS, TORCHS_WARNINGS, WEIGHT, product
from tests.toys import Stack, assert_same_step, leaf

pytestmark = [*TORCHS_WARNINGS, pytest.mark.usefixtures("new_offloaders")]


SPILLED = policies.spill("aten::mm")


def to_disk() -> Any:
    return rekindle.offload(tier="disk", quota=1.0, min_bytes=1)


@BOTH_BACKENDS
def test_what_a_compiled_module_saves_is_offloaded(backend: str, written_at_once: None) -> None:
    stack, x = Stack(3), leaf(16, 8)
    compiled = torch.compile(stack, backend=backend, fullgraph=True)

    def offloaded() -> Any:
        with to_disk():
            return compiled(x)

    assert_same_step(lambda: compiled(x), offloaded, [x, *stack.parameters()])
    with rekindle.observe() as seen:
        offloaded().sum().backward()
    assert seen.spill.tensors_out > 0
    assert seen.spill.bytes_in == seen.spill.bytes_out


def test_compiled_blocks_are_offloaded_one_by_one(written_at_once: None) -> None:
    stack, x = Stack(3), leaf(16, 8)
    for block in stack.blocks:
        block.compile(backend="aot_eager", fullgraph=True)

    def offloaded() -> Any:
        with to_disk():
            return stack(x)

    assert_same_step(lambda: stack(x), offloaded, [x, *stack.parameters()])
    with rekindle.observe() as seen:
        offloaded().sum().backward()
    assert seen.spill.tensors_out > 0


@BOTH_BACKENDS
def test_offload_inside_a_compiled_function_works(backend: str, written_at_once: None) -> None:
    layers, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), leaf(4, 8)
    away = to_disk()

    @torch.compile(backend=backend)
    def run(x: Tensor) -> Any:
        y = x.sin()
        with away:
            return layers(y)

    with rekindle.observe() as seen:
        run(x).sum().backward()
    assert seen.spill.tensors_out > 0
    assert_same_step(lambda: layers(x.sin()), lambda: run(x), [x, *layers.parameters()])


def test_offload_that_is_made_inside_a_compiled_function_works(written_at_once: None) -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Any:
        with rekindle.offload(tier="disk", quota=1.0, min_bytes=1):
            return layers(x)

    with rekindle.observe() as seen:
        run(leaf(4, 8)).sum().backward()
    assert seen.spill.tensors_out > 0


@pytest.mark.parametrize("how", ["apply", "wrapper"])
def test_modules_that_are_offloaded_begin_graphs_of_their_own(
    how: str, written_at_once: None
) -> None:
    stack, x = Stack(3), leaf(16, 8)
    plain = Stack(3)
    plain.load_state_dict(stack.state_dict())
    if how == "apply":
        rekindle.apply(stack, to_disk())
    else:
        for i, block in enumerate(stack.blocks):
            options = {"tier": "disk", "min_bytes": 1}
            stack.blocks[i] = rekindle.offload_wrapper(block, **options)  # type: ignore[arg-type]
    compiled = torch.compile(stack, backend="aot_eager")
    with rekindle.observe() as seen:
        compiled(x).sum().backward()
    assert seen.spill.tensors_out > 0
    got, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(got, x.grad)  # type: ignore[arg-type]


def test_a_module_that_is_offloaded_is_a_clear_error_in_a_full_graph() -> None:
    stack = Stack(1)
    rekindle.apply(stack, "offload")
    with pytest.raises(Exception, match="begins a graph of its own"):
        torch.compile(stack, backend="aot_eager", fullgraph=True)(leaf(4, 8))


def test_offload_around_leaves_the_tickets_of_a_graph(written_at_once: None) -> None:
    x = leaf(4, 8)
    run = torch.compile(
        lambda x: rekindle.checkpoint(product, x, context_fn=SPILLED),
        backend="aot_eager",
        fullgraph=True,
    )

    def around() -> Any:
        with to_disk():
            return run(x)

    assert_same_step(lambda: run(x), around, [x, WEIGHT])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_on_a_gpu_what_compiled_blocks_save_is_offloaded() -> None:
    stack = Stack(4, dim=512).cuda()
    x = leaf(4096, 512, device="cuda")
    for block in stack.blocks:
        block.compile(fullgraph=True)
    stack(x).sum().backward()
    expected, x.grad = x.grad, None
    with rekindle.observe() as seen:
        with rekindle.offload(quota=1.0):
            out = stack(x).sum()
        out.backward()
    assert seen.offload.tensors_out > 0
    torch.testing.assert_close(x.grad, expected)
