"""Tensors of every kind, and all that goes on around a region under a policy."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.profiler import profile, record_function
from torch.testing._internal.two_tensor import TwoTensor

import rekindle
from rekindle import policies
from rekindle.torch_private.dispatch_modes import dispatch_modes
from rekindle.torch_private.saved_tensor_hooks import top_hooks
from tests.ranks import one_rank
from tests.regions.selective.test_op_names import POLICIES, check
from tests.toys import Mlp, assert_same_step, same_bits

Run = Callable[..., Any]


@pytest.fixture(params=POLICIES.values(), ids=POLICIES.keys())
def policy(request: pytest.FixtureRequest) -> policies.Policy:
    return request.param


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 6, requires_grad=True)


def plain(region: Run, *args: Any) -> Any:
    return region(*args)


def under(policy: policies.Policy) -> Run:
    return lambda region, *args: rekindle.checkpoint(region, *args, context_fn=policy)


def check_program(
    policy: policies.Policy, program: Callable[[Run], Any], *leaves: Tensor, **options: Any
) -> None:
    """A program that runs its regions by what it is given has the plain outputs and gradients."""
    assert_same_step(lambda: program(plain), lambda: program(under(policy)), leaves, **options)


def _changes_after_use(t: Tensor) -> Tensor:
    y = t.sin()
    z = y * 2
    y.mul_(3)
    y[1:3].mul_(2)
    return z.exp() + y.sin()


@pytest.mark.parametrize("region", [lambda t: (t.sin().exp() * t).cos(), _changes_after_use])
def test_a_subclass_of_two_tensors(policy: policies.Policy, region: Run, x: Tensor) -> None:
    def program(run: Run) -> Any:
        pair = TwoTensor(x.detach(), x.detach() + 1).requires_grad_()
        out = run(region, pair)
        (grad,) = torch.autograd.grad(out.sum(), pair)
        return out.a, out.b, grad.a, grad.b, x + 0

    check_program(policy, program, x)


@pytest.fixture
def mesh() -> Iterator[Any]:
    with one_rank():
        yield init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("region", [lambda t: (t.sin() @ t).exp() * t.sum(0), _changes_after_use])
def test_a_dtensor(policy: policies.Policy, mesh: Any, region: Run, x: Tensor) -> None:
    def program(run: Run) -> Any:
        return run(region, DTensor.from_local(x, mesh, [Replicate()])).to_local()

    check_program(policy, program, x)


def _values_changed(x: Tensor) -> Tensor:
    sparse = x.detach().relu().to_sparse()
    sparse._values().mul_(3)
    return torch.sparse.mm(sparse, x).sin()


def _sparse_changed(x: Tensor) -> Tensor:
    sparse = x.detach().relu().to_sparse()
    before = torch.sparse.mm(sparse, torch.ones(6, 6))
    sparse.mul_(3)
    return (before + x).sin() + torch.sparse.mm(sparse, x).sin()


def _csr_values_changed(x: Tensor) -> Tensor:
    sparse = x.detach().relu().to_sparse_csr()
    sparse.values().mul_(3)
    return (sparse @ x).sin()


def _jagged(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)


def _jagged_values_changed(x: Tensor) -> Tensor:
    jagged = _jagged(x)
    scale = jagged.detach().sin()
    scale.values().mul_(3)
    return (jagged * scale).values()


def _jagged_changed(jagged: Tensor) -> Tensor:
    y = jagged.sin()
    z = y * 2
    y.mul_(3)
    return z.exp() + y.sin()


def _complex_changed(x: Tensor) -> Any:
    c = torch.complex(x, x.sin()).conj()
    d = c * 2
    c.mul_(3)
    c.imag.mul_(2)
    return torch.view_as_real(d.exp()), torch.view_as_real(c.sin().resolve_conj())


def _complex(x: Tensor) -> Any:
    c = torch.complex(x, x.sin())
    product = (c.conj() * c.exp()).conj().resolve_conj()
    return torch.view_as_real(product).sin(), c.imag.neg().exp(), (c.conj() @ c.mH).abs().cos()


def _quantized(x: Tensor) -> Any:
    quantized = torch.fake_quantize_per_tensor_affine(x.sin(), 0.1, 0, -8, 8).exp()
    return quantized, x.to(torch.float8_e4m3fn).float().sin() * x


def _inference_tensor(x: Tensor) -> Any:
    with torch.inference_mode():
        made = x.sin().exp()
        made.mul_(2)
    return (x + made).sin()


def _no_grad(x: Tensor) -> Any:
    with torch.no_grad():
        made = x.sin().exp()
        made.mul_(2)
        more = made * 3
    return (x + more).sin() * made


KINDS: dict[str, Run] = {
    "sparse": lambda x: torch.sparse.mm((x * x.detach().gt(0)).to_sparse(), x).sin(),
    "sparse_values": _values_changed,
    "sparse_changed": _sparse_changed,
    "csr_values": _csr_values_changed,
    "jagged": lambda x: (_jagged(x).sin() * 2).exp().values(),
    "jagged_changed": lambda x: _jagged_changed(_jagged(x)).values(),
    "jagged_values": _jagged_values_changed,
    "complex": _complex,
    "complex_changed": _complex_changed,
    "quantized": _quantized,
    "empty": lambda x: x[:0].sin().exp().sum(),
    "expanded": lambda x: x.sin().expand(2, 6, 6).exp(),
    "as_strided": lambda x: x.sin().as_strided((3, 3), (6, 2), 1).exp(),
    "unfold": lambda x: x.sin().unfold(0, 2, 1).movedim(0, 1).exp(),
    "other_dtype": lambda x: x.sin() * x.detach().view(torch.int32).float(),
    "inference": _inference_tensor,
    "no_grad": _no_grad,
}


@pytest.mark.parametrize("region", KINDS.values(), ids=KINDS.keys())
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested tensors:UserWarning")
def test_a_kind_of_tensor(policy: policies.Policy, region: Run, x: Tensor) -> None:
    check(policy, region, x)


def test_outputs_that_are_inputs_and_views_of_them(policy: policies.Policy, x: Tensor) -> None:
    check(policy, lambda x: {"a": (x, x.t()), "b": [x.view(-1), x.sin(), None, 3]}, x)


def test_fake_tensors(policy: policies.Policy) -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.randn(6, 6, requires_grad=True)
        under(policy)(_changes_after_use, x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (6, 6)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_step_is_traced_by_make_fx(policy: policies.Policy, mode: Any, x: Tensor) -> None:
    def step(run: Run) -> Run:
        return lambda x: torch.autograd.grad(run(_deep, x).sum(), x)

    traced = make_fx(step(under(policy)), tracing_mode=mode)(x)
    other = torch.randn(6, 6, requires_grad=True)
    assert same_bits(traced(other)[0], step(plain)(other)[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_function_inside(policy: policies.Policy, x: Tensor) -> None:
    def changes(t: Tensor, buffer: Tensor) -> Tensor:
        buffer.mul_(2)
        return t.sin() * buffer

    compiled = torch.compile(changes, backend="aot_eager")

    def region(x: Tensor) -> Tensor:
        buffer = x.detach() + 1
        before = buffer.sin()
        return compiled(x.cos(), buffer).exp() + (x * before).exp() + x * buffer

    check(policy, region, x)


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


def _deep(x: Tensor) -> Tensor:
    return (x.sin() @ x.exp()).tanh().exp()


def test_batched_gradients(policy: policies.Policy, x: Tensor) -> None:
    def grads(run: Run) -> Tensor:
        ways = torch.stack([torch.ones(6, 6), torch.eye(6)])
        return torch.autograd.grad(run(_deep, x), x, ways, is_grads_batched=True)[0]

    assert same_bits(grads(under(policy)), grads(plain))


def test_second_derivatives_and_a_retained_graph(policy: policies.Policy, x: Tensor) -> None:
    def grads(run: Run) -> list[Tensor]:
        loss = run(_deep, x).sum()
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
    check(policy, _deep, x)


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
    loss = under(policy)(_deep, x).sum()
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        for _ in range(5):
            (found[number],) = torch.autograd.grad(loss, x, retain_graph=True)

    _in_threads(3, work)
    (expected,) = torch.autograd.grad(_deep(x).sum(), x)
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
