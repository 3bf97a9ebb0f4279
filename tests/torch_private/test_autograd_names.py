"""Private names of autograd do what they say: where a new version of torch would show first."""

import pytest
import torch
from torch import Tensor

from rekindle.torch_private.autograd_graph import (
    current_node,
    function_class,
    grad_fn_of,
    graph_task_id,
    has_accumulation_hooks,
    is_view,
    keep_graph,
    nodes_so_far,
    runs_whole_graph,
    saved_by,
    sequence_number,
    tensor_hooks,
    when_backward_ends,
)
from rekindle.torch_private.func_transforms import LeftTransforms, func_transform, old_vmap_level
from rekindle.torch_private.grad_mode import (
    below_autograd,
    grad_enabled,
    outside_inference_mode,
    without_grad,
)
from rekindle.torch_private.saved_tensor_hooks import (
    StandInHook,
    pop_hooks,
    pop_hooks_to,
    push_hooks,
    top_hooks,
)
from tests.toys import leaf


def same(x: Tensor) -> Tensor:
    return x


def test_hooks_are_popped_down_to_those_from_before() -> None:
    push_hooks(same, same)
    before = top_hooks(False)
    push_hooks(same, lambda x: x)
    push_hooks(same, lambda x: x)
    pop_hooks_to(before)
    assert top_hooks(False) == before
    pop_hooks()
    assert top_hooks(False) is None


def test_hooks_are_popped_down_to_a_stand_in_for_those_from_before() -> None:
    push_hooks(same, same)
    before = top_hooks(False)
    hook = StandInHook()
    pop_hooks()
    push_hooks(hook, hook)
    push_hooks(same, lambda x: x)
    pop_hooks_to(before)
    assert top_hooks(False)[0] is hook
    pop_hooks()


def test_a_backward_tells_its_number_its_node_and_how_it_was_called() -> None:
    x, seen = leaf(3), []
    y = x.sin()
    y.register_hook(
        lambda _: seen.append((graph_task_id(), keep_graph(), runs_whole_graph(), current_node()))
    )
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y.sum(), x)
    (first, kept, whole, node), (second, kept_again, whole_again, _) = seen
    assert (first != second, kept, kept_again, whole, whole_again) == (
        True,
        True,
        False,
        True,
        False,
    )
    assert node is y.grad_fn
    assert graph_task_id() == -1


def test_a_callback_runs_when_the_backward_has_ended() -> None:
    x, order = leaf(3), []
    y = x.sin()
    y.register_hook(lambda _: when_backward_ends(lambda: order.append("end")))
    x.register_hook(lambda _: order.append("gradient"))
    y.sum().backward()
    assert order == ["gradient", "end"]


def test_nodes_are_numbered_in_the_order_in_which_ops_ran() -> None:
    before = nodes_so_far()
    y = leaf(3).sin()
    assert sequence_number(y.grad_fn) >= before
    assert nodes_so_far() == before + 1


def test_what_hooks_packed_is_read_without_unpacking_it() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda _: "packed", lambda _: torch.ones(3)):
        y = leaf(3).sin()
    assert saved_by(y.grad_fn, "self") == "packed"


def test_the_node_of_a_view_that_autograd_refuses_to_read_is_none() -> None:
    base = leaf(4).clone()
    first, _ = base.split(2)
    base.mul_(2)
    assert is_view(first)
    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = first.grad_fn
    assert grad_fn_of(first) is None


def test_hooks_on_tensors_are_found() -> None:
    x = leaf(3)
    assert not tensor_hooks(x)
    assert not has_accumulation_hooks(x)
    x.register_hook(lambda grad: grad)
    x.register_post_accumulate_grad_hook(lambda _: None)
    assert len(tensor_hooks(x)) == 1
    assert has_accumulation_hooks(x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_the_class_of_a_custom_function_is_known_by_its_node() -> None:
    assert function_class(Double.apply(leaf(3)).grad_fn) is Double
    assert function_class(leaf(3).sin().grad_fn) is None


def test_grad_mode_is_off_for_one_call_and_inference_mode_is_left() -> None:
    assert without_grad(grad_enabled) is False
    assert grad_enabled()
    with torch.inference_mode():
        with outside_inference_mode():
            assert not torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()
    with below_autograd():
        assert leaf(3).sin().grad_fn is None


def test_transforms_are_left_and_entered_again() -> None:
    seen = []

    def inside(x: Tensor) -> Tensor:
        transforms = LeftTransforms()
        transforms.leave()
        seen.append(func_transform())
        transforms.enter_again()
        seen.append(func_transform() is not None)
        return x.sin()

    torch.func.vmap(inside)(torch.ones(2, 3))
    assert seen == [None, True]
    assert func_transform() is None


def test_a_batched_backward_runs_in_the_old_vmap() -> None:
    levels = []
    x = leaf(3)
    y = x.sin()
    y.register_hook(lambda _: levels.append(old_vmap_level()))
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    assert levels == [1]
    assert old_vmap_level() == 0
