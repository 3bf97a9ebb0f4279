"""Default device and dtype, attention kernels, modes: in replay as in forward."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from tests.toys import assert_same_step


@pytest.fixture(autouse=True)
def defaults_put_back() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def assert_same(region: Callable[[Tensor], Any], x: Tensor, around: Callable[[], Any]) -> None:
    def program(run: bool) -> Any:
        with around():
            return rekindle.checkpoint(region, x) if run else region(x)

    assert_same_step(lambda: program(False), lambda: program(True), [x])


def _scaled_by_new_tensor(x: Tensor) -> Tensor:
    """Makes a tensor on the default device, saves it on the CPU, and saves its dtype."""
    scale = torch.ones(8)
    return (x * torch.full((8,), 2.0 if scale.is_meta else 3.0, device="cpu")).exp()


def test_a_device_context_around_the_forward_is_there_in_replay(x: Tensor) -> None:
    assert_same(_scaled_by_new_tensor, x, lambda: torch.device("meta"))


def test_a_tensor_made_on_the_default_device_of_the_forward_is_made_there_in_replay() -> None:
    x = torch.randn(3, device="meta", requires_grad=True)
    with torch.device("meta"):
        y = rekindle.checkpoint(lambda x: (x * torch.ones(3)).exp(), x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.is_meta


def test_a_device_context_around_backward_does_not_reach_the_replay(x: Tensor) -> None:
    y = rekindle.checkpoint(lambda x: (x * torch.ones(8)).exp(), x)
    with torch.device("meta"):
        y.backward(torch.ones(4, 8, device="cpu"))
    assert torch.equal(x.grad, y)


def test_a_device_context_inside_the_region_is_there_in_replay(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        with torch.device("meta"):
            return _scaled_by_new_tensor(x)

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_set_default_device_at_forward_only_is_there_in_replay(x: Tensor) -> None:
    torch.set_default_device("meta")
    y = rekindle.checkpoint(_scaled_by_new_tensor, x)
    torch.set_default_device(None)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * y)


def test_set_default_device_at_backward_only_does_not_reach_the_replay(x: Tensor) -> None:
    y = rekindle.checkpoint(_scaled_by_new_tensor, x)
    torch.set_default_device("meta")
    y.backward(torch.ones(4, 8, device="cpu"))
    assert torch.get_default_device().type == "meta"
    torch.set_default_device(None)
    assert torch.equal(x.grad, 3 * y)


def test_the_default_device_is_as_before_after_a_replay(x: Tensor) -> None:
    with torch.device("meta"):
        y = rekindle.checkpoint(_scaled_by_new_tensor, x)
    y.sum().backward()
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.ones(1).is_cpu
    assert torch._C._len_torch_function_stack() == 0


def test_device_contexts_around_backward_are_still_there_after_a_replay(x: Tensor) -> None:
    y = rekindle.checkpoint(_scaled_by_new_tensor, x)
    with torch.device("meta"):
        y.backward(torch.ones(4, 8, device="cpu"))
        assert torch.ones(1).is_meta
    assert torch.ones(1).is_cpu


def test_another_torch_function_mode_around_both_is_no_trouble(x: Tensor) -> None:
    class Quiet(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert_same(lambda x: (x * torch.ones(8)).exp(), x, Quiet)


def test_the_default_dtype_of_the_forward_is_there_in_replay(x: Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    y = rekindle.checkpoint(lambda x: (x * torch.full((8,), 1 / 3)).exp(), x)
    torch.set_default_dtype(torch.float32)
    assert y.dtype is torch.float64
    y.sum().backward()
    third = torch.full((8,), 1 / 3, dtype=torch.float64)
    assert torch.equal(x.grad, (y * third).float())
    assert torch.get_default_dtype() is torch.float32


def test_the_default_dtype_is_as_before_after_an_exception_in_replay(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        x = x.exp()
        if rekindle.is_recomputing():
            raise KeyError("in replay")
        return x.exp()

    torch.set_default_dtype(torch.float64)
    y = rekindle.checkpoint(region, x)
    torch.set_default_dtype(torch.float16)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert torch.get_default_dtype() is torch.float16


def test_the_default_device_is_as_before_after_an_exception_in_replay(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        x = x.exp()
        if rekindle.is_recomputing():
            raise KeyError("in replay")
        return x.exp()

    with torch.device("meta"):
        y = rekindle.checkpoint(region, x)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert torch.ones(1).is_cpu
    assert torch._C._len_torch_function_stack() == 0


class AttentionOps(TorchDispatchMode):
    """The attention kernels that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func) and "backward" not in str(func):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _attend(q: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, q, q).exp()


@pytest.fixture
def q() -> Tensor:
    return torch.randn(1, 2, 4, 8, requires_grad=True)


def test_sdpa_kernel_around_the_forward_is_there_in_replay(q: Tensor) -> None:
    assert_same(_attend, q, lambda: sdpa_kernel(SDPBackend.MATH))


def test_the_replay_runs_the_attention_kernel_of_the_forward(q: Tensor) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        y = rekindle.checkpoint(_attend, q)
    with AttentionOps() as ops:
        y.sum().backward()
    assert [name for name in ops.seen if "flash" in name] == []


def test_sdpa_kernel_around_backward_does_not_reach_the_replay(q: Tensor) -> None:
    def backward(loss: Tensor) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            loss.backward()

    assert_same_step(
        lambda: _attend(q), lambda: rekindle.checkpoint(_attend, q), [q], backward=backward
    )


def _allowed() -> tuple[bool, ...]:
    kinds = torch.backends.cuda
    return (
        kinds.flash_sdp_enabled(),
        kinds.mem_efficient_sdp_enabled(),
        kinds.math_sdp_enabled(),
        kinds.cudnn_sdp_enabled(),
    )


def test_allowed_attention_kernels_are_as_before_after_a_replay(q: Tensor) -> None:
    before = _allowed()
    with sdpa_kernel(SDPBackend.MATH):
        y = rekindle.checkpoint(_attend, q)
    y.sum().backward()
    assert _allowed() == before


def test_allowed_attention_kernels_are_as_before_after_an_exception_in_replay(q: Tensor) -> None:
    def region(q: Tensor) -> Tensor:
        y = _attend(q)
        if rekindle.is_recomputing():
            raise KeyError("in replay")
        return y.exp()

    before = _allowed()
    with sdpa_kernel(SDPBackend.MATH):
        y = rekindle.checkpoint(region, q)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert _allowed() == before


def test_grad_mode_is_as_before_after_a_replay(x: Tensor) -> None:
    y = rekindle.checkpoint(lambda x: x.exp().exp(), x).sum()
    with torch.no_grad():
        y.backward()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_a_region_with_no_grad_inside_replays_it(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.exp().sum()
        return (x * scale).exp()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_inference_mode_runs_the_function_alone(x: Tensor) -> None:
    with torch.inference_mode(), rekindle.observe() as seen:
        y = rekindle.checkpoint(torch.exp, x)
    assert y.is_inference()
    assert seen.total.forwards == 0


def test_anomaly_mode_around_a_step_is_no_trouble(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        return x.exp().sin()

    with pytest.warns(UserWarning, match="Anomaly"):
        context = torch.autograd.detect_anomaly()
    with context:
        assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])
