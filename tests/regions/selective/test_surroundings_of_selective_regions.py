"""A region under a policy, and all that goes on around it: modes, transforms, hooks, threads."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.profiler import profile, record_function

from rekindle import policies
from rekindle.torch_private.dispatch_modes import dispatch_modes
from rekindle.torch_private.saved_tensor_hooks import top_hooks
from tests.regions.selective.toy_regions import Run, check, check_program, deep, plain, under
from tests.toys import Mlp, same_bits


@pytest.mark.filterwarnings("ignore:.*profiler:UserWarning")
def test_a_profiled_step(policy: policies.Policy, x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        with record_function("part"):
            return x.sin().exp().sin()

    def program(run: Run) -> Any:
        with profile():
            out = run(region, x)
            torch.autograd.grad(out.sum(), x, retain_graph=True)
        return out

    check_program(policy, program, x)


def test_autocast_around_two_regions_that_share_a_weight(policy: policies.Policy) -> None:
    linear, x = nn.Linear(6, 6), torch.randn(6, 6, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return linear(linear(x.sin())).float().sin()

    def program(run: Run) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(region, run(region, x))

    check_program(policy, program, x, *linear.parameters())


def test_the_default_dtype_of_the_forward_counts(policy: policies.Policy, x: Tensor) -> None:
    def program(run: Run) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return run(lambda x: x * (torch.ones(6) * 1.1).sin(), x)
        finally:
            torch.set_default_dtype(torch.float32)

    check_program(policy, program, x)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_a_backend_switched_off_inside_stays_off(policy: policies.Policy) -> None:
    conv, image = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 20, 20, requires_grad=True)

    def region(image: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return conv(image.sin()).sin()

    def backward_too(loss: Tensor) -> None:
        with torch.backends.mkldnn.flags(enabled=True):
            loss.backward()

    leaves = [image, *conv.parameters()]
    check_program(policy, lambda run: run(region, image), *leaves, backward=backward_too)


def test_a_batch_norm_run_again_before_backward(policy: policies.Policy, x: Tensor) -> None:
    norm = nn.BatchNorm1d(6)

    def program(run: Run) -> Any:
        norm.reset_running_stats()
        out = run(lambda x: (x + norm.running_var.sin()).sin(), x)
        norm(x.detach() * 3)
        return out

    check_program(policy, program, x)


def test_a_parameter_changed_before_backward_is_refused(policy: policies.Policy) -> None:
    mlp, x = Mlp(), torch.randn(4, 8, requires_grad=True)
    optimizer = torch.optim.SGD(mlp.parameters(), 0.1)
    mlp(x).sum().backward()
    loss = under(policy)(mlp, x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="in place"):
        loss.backward()


TRANSFORMS: dict[str, Run] = {
    "vmap": torch.vmap(lambda row: row.sin().exp()),
    "random": torch.vmap(lambda row: (row * torch.rand_like(row)).sin(), randomness="different"),
    "jvp": lambda x: torch.func.jvp(lambda t: t.sin() * t, (x,), (x.cos(),)),
    "hvp": lambda x: torch.autograd.functional.hvp(
        lambda t: (t**3).sum(), x, torch.ones(6, 6), create_graph=True
    )[1],
}


@pytest.mark.parametrize("region", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_a_transform_inside(policy: policies.Policy, region: Run, x: Tensor) -> None:
    check(policy, lambda x: region(x.sin()), x)


def test_a_transform_around(policy: policies.Policy, x: Tensor) -> None:
    def program(run: Run) -> Any:
        return torch.func.jacrev(lambda t: run(lambda t: t.sin().exp(), t).sum(0))(x)

    check_program(policy, program, x)


def test_forward_mode_around(policy: policies.Policy, x: Tensor) -> None:
    def program(run: Run) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones(6, 6))
            return tuple(forward_ad.unpack_dual(run(lambda t: (t.sin() * t).exp(), dual)))

    check_program(policy, program, x)


def test_batched_gradients(policy: policies.Policy, x: Tensor) -> None:
    def grads(run: Run) -> Tensor:
        ways = torch.stack([torch.ones(6, 6), torch.eye(6)])
        return torch.autograd.grad(run(deep, x), x, ways, is_grads_batched=True)[0]

    assert same_bits(grads(under(policy)), grads(plain))


def test_second_derivatives_and_a_retained_graph(policy: policies.Policy, x: Tensor) -> None:
    def grads(run: Run) -> list[Tensor]:
        loss = run(deep, x).sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        return [first, again, *torch.autograd.grad(again.sin().sum(), x)]

    for found, expected in zip(grads(under(policy)), grads(plain), strict=True):
        assert same_bits(found, expected)


def test_the_parts_of_a_region_may_go_backward_one_by_one(
    policy: policies.Policy, x: Tensor
) -> None:
    def grads(run: Run) -> list[Tensor]:
        shared = run(lambda x: [((x + 1).sin() * 2).exp(), ((x + 1) * 3).cos()], x)
        return [torch.autograd.grad(part.sum(), x)[0] for part in shared]

    for found, expected in zip(grads(under(policy)), grads(plain), strict=True):
        assert same_bits(found, expected)


def test_hooks_of_tensors_and_modules_inside_run_once(policy: policies.Policy) -> None:
    mlp, x = Mlp(), torch.randn(4, 8, requires_grad=True)
    seen: list[str] = []

    def region(x: Tensor) -> Tensor:
        y = mlp(x.sin())
        y.register_hook(lambda grad: seen.append("tensor") or grad * 2)
        return y.exp()

    mlp.up.register_forward_hook(lambda *args: seen.append("forward"))
    mlp.up.register_full_backward_hook(lambda *args: seen.append("backward"))
    check(policy, region, x, module=mlp)
    assert seen == ["forward", "tensor", "backward"] * 2


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_leaves_everything_as_it_was(
    policy: policies.Policy, when: str, x: Tensor
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("on purpose")

    def region(x: Tensor) -> Tensor:
        y = (x.sin() * torch.rand_like(x)).exp()
        y.register_hook(fail)
        return fail() if when == "forward" else y.sin()

    with pytest.raises(KeyError, match="on purpose"):
        under(policy)(region, x).sum().backward()
    assert dispatch_modes() == 0
    assert top_hooks(False) is None
    check(policy, deep, x)


def test_a_failed_backward_leaves_the_random_state_as_it_was(policy: policies.Policy) -> None:
    x = torch.randn(6, requires_grad=True)
    loss = under(policy)(lambda x: (x * torch.rand_like(x)).sin(), x).sum()
    x.data = torch.randn(5)
    before = torch.get_rng_state()
    with suppress(RuntimeError):
        loss.backward()
    assert torch.equal(before, torch.get_rng_state())


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[Exception] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception as error:  # noqa: BLE001  (shown below)
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_threads_record_at_the_same_time(policy: policies.Policy) -> None:
    mlp = Mlp()
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        for _ in range(5):
            out = under(policy)(lambda x: mlp(x.sin()).exp(), inputs[number])
            (found[number],) = torch.autograd.grad(out.sum(), inputs[number])

    _in_threads(3, work)
    for number, x in enumerate(inputs):
        assert same_bits(found[number], torch.autograd.grad(mlp(x.sin()).exp().sum(), x)[0])


def test_threads_go_backward_through_one_region(policy: policies.Policy, x: Tensor) -> None:
    loss = under(policy)(deep, x).sum()
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        for _ in range(5):
            (found[number],) = torch.autograd.grad(loss, x, retain_graph=True)

    _in_threads(3, work)
    (expected,) = torch.autograd.grad(deep(x).sum(), x)
    assert all(same_bits(grad, expected) for grad in found.values())


def test_activations_die_with_the_graph_without_the_collector(
    policy: policies.Policy, x: Tensor
) -> None:
    made: list[Any] = []

    def region(x: Tensor) -> Tensor:
        y = functional.dropout(x.sin(), 0.5) @ x
        made.extend(map(ref, (y, y.untyped_storage())))
        return y.exp().sin()

    gc.disable()
    try:
        for retain in (True, False):
            loss = under(policy)(region, x).sum()
            loss.backward(retain_graph=retain)
            del loss
            assert [weak() for weak in made] == [None] * len(made)
    finally:
        gc.enable()


def test_a_policy_is_copied_and_pickled(policy: policies.Policy) -> None:
    assert copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_lazy_module_gets_its_parameters_inside(policy: policies.Policy, x: Tensor) -> None:
    def program(run: Run) -> Any:
        lazy = nn.LazyLinear(3)
        return run(lambda x: lazy(x.sin()).exp(), x)

    check_program(policy, program, x)
