"""Memory of offload on a GPU: the pinned pool, the peak to the byte, caps and failures."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import rekindle
from rekindle.offload.tiers import pinned
from tests.gpu.slow_models import (
    KIB,
    MIB,
    SLEEP,
    assert_steps_agree,
    chain,
    fail_after,
    finish_backward,
    model,
    only_offloader,
)
from tests.toys import same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_offloaders")]


@pytest.mark.parametrize("quota", [1.0, "auto"])
def test_the_pool_does_not_grow_after_the_second_step(quota: Any) -> None:
    offload = rekindle.offload(quota=quota, min_bytes=KIB)
    for rows in (4096, 30_000):  # another model, so to speak, on the same offloader
        net, x = model(), torch.randn(rows, 64, device="cuda", requires_grad=True)
        sizes: list[int] = []
        assert_steps_agree(
            net,
            x,
            8,
            lambda: offload,
            lambda sizes=sizes: sizes.append(only_offloader().tier.pool_bytes),
        )
        assert sizes[2:] == sorted(sizes[2:], reverse=True)
        assert max(sizes) == max(sizes[:2])


def test_the_pool_does_not_grow_after_the_first_step() -> None:
    net, x = model(), torch.randn(4096, 64, device="cuda", requires_grad=True)
    sizes = []
    assert_steps_agree(
        net,
        x,
        6,
        lambda: rekindle.offload(quota=1.0, min_bytes=KIB),
        lambda: sizes.append(only_offloader().tier.pool_bytes),
    )
    assert sizes == [sizes[0]] * 6


def test_varying_batches_share_the_pool_of_the_largest() -> None:
    net = model()
    offload = rekindle.offload(quota=1.0, min_bytes=KIB)
    sizes = []
    for rows in (40_000, 30_000, 12_345, 40_000, 777, 39_999):
        x = torch.randn(rows, 64, device="cuda", requires_grad=True)
        assert_steps_agree(net, x, 1, lambda: offload)
        sizes.append(only_offloader().tier.pool_bytes)
    assert sizes == [sizes[0]] * 6


def test_trim_gives_the_pool_back() -> None:
    net, x = model(), torch.randn(4096, 64, device="cuda", requires_grad=True)
    offload = rekindle.offload(quota=1.0, min_bytes=KIB)
    assert_steps_agree(net, x, 3, lambda: offload)
    offload.trim()
    assert only_offloader().tier.pool_bytes == 0
    assert_steps_agree(net, x, 2, lambda: offload)


@pytest.mark.parametrize("quota", [1.0, 0.5])
def test_after_the_forward_the_device_holds_what_was_not_moved_to_the_byte(quota: float) -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    offload = rekindle.offload(quota=quota, derive=False)
    for _ in range(4):
        before = torch.cuda.memory_allocated()
        with rekindle.observe() as seen, offload:
            out = chain(x, 16)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        out.sum().backward()
        x.grad = out = None
    moved = {1.0: 14, 0.5: 8}[quota]  # the last two are wanted first
    assert seen.offload.tensors_out == moved
    assert held == (16 - moved) * x.nbytes


def test_the_peak_of_a_step_is_the_plain_one_less_what_was_moved() -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)

    def peak(around: Any) -> int:
        x.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with around:
            out = chain(x, 32)
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    plain = peak(saved_tensors_hooks(lambda t: t.detach(), lambda t: t))
    offload = rekindle.offload(quota=0.5, derive=False)
    peaks = [peak(offload) for _ in range(6)]
    assert peaks[3:] == [plain - 16 * x.nbytes] * 3


def test_no_activation_is_held_after_backward() -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    offload = rekindle.offload(quota=1.0)
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        for _ in range(3):
            with offload:
                out = chain(x, 8)
            torch.autograd.grad(out.sum(), x)
            del out
            finish_backward()
            assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_with_retain_graph_what_was_fetched_is_let_go_after_each_backward() -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    with rekindle.offload(quota=1.0, derive=False):
        out = chain(x, 8)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    grads = []
    for _ in range(3):
        grads += torch.autograd.grad(out.sum(), x, retain_graph=True)
        finish_backward()
        assert torch.cuda.memory_allocated() == held + len(grads) * x.nbytes
    (expected,) = torch.autograd.grad(chain(x, 8).sum(), x)
    assert all(same_bits(grad, expected) for grad in grads)


def test_above_the_cap_activations_stay_with_one_warning() -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad(chain(x, 16).sum(), x)
    offload = rekindle.offload(quota=1.0, max_host_bytes=5 * x.nbytes, derive=False)

    def steps() -> None:
        for _ in range(4):
            with offload:
                out = chain(x, 16)
            assert same_bits(torch.autograd.grad(out.sum(), x)[0], expected)

    with rekindle.observe() as seen, pytest.warns(UserWarning, match="no room") as caught:
        steps()
    assert len(caught) == 1
    assert seen.offload.pool_bytes == 5 * x.nbytes
    assert seen.offload.tensors_out == 4 * 5


def test_above_the_cap_an_error_says_so_if_asked_for() -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    offload = rekindle.offload(quota=1.0, max_host_bytes=x.nbytes, on_full="raise", derive=False)
    before = torch.cuda.memory_allocated()
    with pytest.raises(rekindle.OffloadError, match="max_host_bytes"), offload:
        chain(x, 8)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_a_warning() -> None:
    device = torch.device("cuda", 0)
    slab = pinned._Slab(MIB, device)
    with pytest.warns(UserWarning, match="could not be pinned"):
        assert not pinned.pin(slab.memory, device)  # it is pinned already, which is an error
    torch.ones(4, device="cuda").sum().item()  # and the device has forgotten it


def test_gradients_agree_in_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "pin", lambda memory, device: False)
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    assert_steps_agree(
        model(cycles=SLEEP), x, 20, lambda: rekindle.offload(quota=1.0, min_bytes=KIB)
    )


def test_an_exception_in_forward_leaves_nothing_on_the_device() -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    offload = rekindle.offload(quota=1.0)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), offload:
            fail_after(chain(x, 8))
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


def test_an_exception_in_backward_leaves_nothing_on_the_device() -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    offload = rekindle.offload(quota=1.0, derive=False)
    before = torch.cuda.memory_allocated()

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    for _ in range(3):
        with offload:
            middle = chain(x, 8)
            middle.register_hook(fail)
            out = chain(middle, 8)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        del middle, out
        finish_backward()
        assert torch.cuda.memory_allocated() == before
