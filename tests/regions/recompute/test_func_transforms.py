"""`torch.func` over regions and forward-mode AD: as over the plain function (field note 26)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

import rekindle
from tests.toys import Stack, assert_same_step


def plain(x: Tensor) -> Tensor:
    return (x.exp().sin() * x).cos()


def region(x: Tensor) -> Tensor:
    return rekindle.checkpoint(plain, x)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4)


def _sum(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x).sum()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: grad(_sum(f))(x),
    "grad_and_value": lambda f, x: grad_and_value(_sum(f))(x),
    "grad of grad": lambda f, x: grad(_sum(grad(_sum(f))))(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones_like(x)),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),)),
    "vmap": lambda f, x: vmap(f)(x[:, None]),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(_sum(f))(x),
    "vmap of grad": lambda f, x: vmap(grad(_sum(f)))(x[:, None]),
    "jvp of grad": lambda f, x: jvp(grad(_sum(f)), (x,), (torch.ones_like(x),)),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS, ids=lambda name: name.replace(" ", "_"))
def test_a_transform_of_a_region_is_that_of_the_plain_function(name: str, x: Tensor) -> None:
    transform = TRANSFORMS[name]
    for a, b in zip(
        torch.utils._pytree.tree_leaves(transform(plain, x)),
        torch.utils._pytree.tree_leaves(transform(region, x)),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", TRANSFORMS, ids=lambda name: name.replace(" ", "_"))
def test_a_transform_of_a_region_works_on_a_tensor_that_wants_a_gradient(
    name: str, x: Tensor
) -> None:
    """Regular autograd goes on through the transform's result."""
    grads = []
    for function in (plain, region):
        leaf = x.clone().requires_grad_()
        out = torch.utils._pytree.tree_leaves(TRANSFORMS[name](function, leaf))
        sum(o.sum() for o in out).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


# Inside a region, torch allows vmap and forward mode under saved-tensor hooks, reverse mode not.

INSIDE = [
    pytest.param(lambda f, x: vmap(f)(x[:, None]), id="vmap"),
    pytest.param(lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1], id="jvp"),
    pytest.param(lambda f, x: jacfwd(f)(x), id="jacfwd"),
]


@pytest.mark.parametrize("transform", INSIDE)
def test_a_transform_inside_a_region_gives_the_gradient_of_the_plain_run(
    transform: Callable[..., Tensor], x: Tensor
) -> None:
    leaf = x.clone().requires_grad_()

    def body(x: Tensor) -> Tensor:
        return transform(plain, x.sin()).exp()

    assert_same_step(lambda: body(leaf), lambda: rekindle.checkpoint(body, leaf), [leaf])


def test_a_reverse_mode_transform_inside_a_region_is_refused_in_words(x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        rekindle.checkpoint(lambda x: grad(_sum(plain))(x.sin()), leaf)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_functional_call_of_a_model_with_regions_has_the_plain_gradients(x: Tensor) -> None:
    model, data = Stack(depth=2), torch.randn(3, 8)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], *args: Any) -> Tensor:
        return functional_call(model, parameters, (data, *args)).square().sum()

    a, b = grad(loss)(parameters), grad(loss)(parameters, rekindle.checkpoint)
    assert all(torch.equal(a[name], b[name]) for name in parameters)


def test_per_sample_gradients_of_a_model_with_regions_are_the_plain_ones() -> None:
    model, data = Stack(depth=2), torch.randn(3, 8)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], sample: Tensor, *args: Any) -> Tensor:
        return functional_call(model, parameters, (sample, *args)).square().sum()

    a = vmap(grad(loss), (None, 0))(parameters, data)
    b = vmap(grad(lambda p, sample: loss(p, sample, rekindle.checkpoint)), (None, 0))(
        parameters, data
    )
    assert all(torch.equal(a[name], b[name]) for name in parameters)


def test_a_functional_call_without_a_transform_replays_with_the_given_parameters() -> None:
    """When backward replays, the module has its own parameters back; the replay wants the given."""
    model, data = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
    given = {name: torch.randn_like(p, requires_grad=True) for name, p in model.named_parameters()}

    def region(x: Tensor) -> Tensor:
        return functional_call(model, given, (x,)).exp()

    assert_same_step(
        lambda: region(data), lambda: rekindle.checkpoint(region, data), [data, *given.values()]
    )


def test_dropout_in_a_region_under_grad_is_the_plain_one(x: Tensor) -> None:
    def body(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x.exp(), 0.5)

    found = []
    for function in (body, lambda x: rekindle.checkpoint(body, x)):
        torch.manual_seed(0)
        found.append(grad(_sum(function))(x))
    assert torch.equal(*found)


def test_a_region_with_the_reentrant_variant_under_grad_is_the_plain_one(x: Tensor) -> None:
    def reentrant(x: Tensor) -> Tensor:
        return rekindle.checkpoint(plain, x, use_reentrant=True)

    assert torch.equal(grad(_sum(plain))(x), grad(_sum(reentrant))(x))


def test_a_region_with_every_option_under_grad_is_the_plain_one(x: Tensor) -> None:
    def careful(x: Tensor) -> Tensor:
        return rekindle.checkpoint(
            plain, x, determinism_check="values", debug=True, early_stop=False
        )

    assert torch.equal(grad(_sum(plain))(x), grad(_sum(careful))(x))


def test_forward_mode_tangents_are_the_plain_ones(x: Tensor) -> None:
    def tangent(function: Callable[[Tensor], Tensor]) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(function(dual)).tangent

    assert torch.equal(tangent(plain), tangent(region))


def test_forward_over_reverse_is_the_plain_one(x: Tensor) -> None:
    """The gradient of a dual number carries a tangent: a Hessian-vector product."""

    def product(function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(leaf, torch.ones_like(x))
            (g,) = torch.autograd.grad(function(dual).sum(), dual)
            return forward_ad.unpack_dual(g).tangent

    assert torch.equal(product(plain), product(region))


def test_autograd_functional_jacobian_is_the_plain_one(x: Tensor) -> None:
    jacobian = torch.autograd.functional.jacobian
    assert torch.equal(jacobian(plain, x), jacobian(region, x))


def test_batched_gradients_of_a_region_are_the_plain_ones(x: Tensor) -> None:
    """`is_grads_batched` runs backward, and so the replay, under vmap."""

    def rows(function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf), leaf, torch.eye(4), is_grads_batched=True)
        return found

    assert torch.equal(rows(plain), rows(region))


def test_batched_gradients_of_a_region_with_dropout_are_the_plain_ones(x: Tensor) -> None:
    """The replay draws random numbers while vmap runs; it must not ask how."""

    def body(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x.exp(), 0.5).sin()

    def rows(function: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf), leaf, torch.eye(4), is_grads_batched=True)
        return found

    assert torch.equal(rows(body), rows(lambda x: rekindle.checkpoint(body, x)))


def test_batched_gradients_of_nested_regions_are_the_plain_ones(x: Tensor) -> None:
    def nested(x: Tensor) -> Tensor:
        return rekindle.checkpoint(plain, x.exp()).sin()

    def rows(function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf), leaf, torch.eye(4), is_grads_batched=True)
        return found

    assert torch.equal(
        rows(lambda x: plain(x.exp()).sin()), rows(lambda x: rekindle.checkpoint(nested, x))
    )


def test_vectorized_jacobian_of_a_region_is_the_plain_one(x: Tensor) -> None:
    jacobian = torch.autograd.functional.jacobian
    assert torch.equal(jacobian(plain, x, vectorize=True), jacobian(region, x, vectorize=True))


def _rows_by_vmap(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Jacobian, by a vmap over backward: the forward is outside of it, the replay inside."""
    torch.manual_seed(0)
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return vmap(lambda v: torch.autograd.grad(y, leaf, v, retain_graph=True)[0])(torch.eye(4))


def test_vmap_over_backward_of_a_region_is_the_plain_one(x: Tensor) -> None:
    assert torch.equal(_rows_by_vmap(plain, x), _rows_by_vmap(region, x))


def test_vmap_over_backward_of_a_region_with_dropout_is_the_plain_one(x: Tensor) -> None:
    def body(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x.exp(), 0.5).sin()

    assert torch.equal(
        _rows_by_vmap(body, x), _rows_by_vmap(lambda x: rekindle.checkpoint(body, x), x)
    )


def test_vmap_over_backward_of_nested_regions_is_the_plain_one(x: Tensor) -> None:
    def nested(x: Tensor) -> Tensor:
        return rekindle.checkpoint(plain, x.exp()).sin()

    assert torch.equal(
        _rows_by_vmap(lambda x: plain(x.exp()).sin(), x),
        _rows_by_vmap(lambda x: rekindle.checkpoint(nested, x), x),
    )
