"""The host tier, on a GPU: streams that race on purpose, the pinned pool, memory to the byte."""

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import rekindle
from rekindle.offload.device_offloader import DeviceOffloader
from rekindle.offload.owners import forget_shared, shared_offloaders
from rekindle.offload.tiers import host, pinned
from tests.toys import same_bits

pytestmark = pytest.mark.gpu

KIB, MIB = 2**10, 2**20
SLEEP = 200_000
"""Cycles of the device: about a tenth of a millisecond, many times the copies below."""


@pytest.fixture(autouse=True)
def engines_of_its_own() -> Iterator[None]:
    forget_shared()
    yield
    forget_shared()
    gc.collect()


class Slow(torch.autograd.Function):
    """Keeps the device busy in forward and in backward, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        torch.cuda._sleep(ctx.cycles)
        return grads[0].clone(), None


def spoil(*sizes: int) -> None:
    """Fill memory that the allocator hands out just now with NaN, as the next op might."""
    for size in sizes:
        torch.full((size // 4,), torch.nan, device="cuda")


class Layer(nn.Module):
    """Linear, GELU, Linear, and a residual; slow before and after if asked for."""

    def __init__(self, dim: int, cycles: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, device="cuda")
        self.down = nn.Linear(2 * dim, dim, device="cuda")
        self.cycles = cycles

    def forward(self, x: Tensor) -> Tensor:
        if self.cycles:
            x = Slow.apply(x, self.cycles)
        hidden = torch.nn.functional.gelu(self.up(x))
        if self.cycles:
            spoil(hidden.nbytes, x.nbytes)
            hidden = Slow.apply(hidden, self.cycles)
        return x + self.down(hidden).tanh()


def model(depth: int = 6, dim: int = 64, cycles: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(dim, cycles) for _ in range(depth)])


def grads_of(run: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(run().square().sum(), leaves))


def assert_steps_agree(
    net: nn.Module, x: Tensor, steps: int, around: Callable[[], Any], between: Any = None
) -> None:
    leaves = [x, *net.parameters()]
    expected = grads_of(lambda: net(x), leaves)

    def run() -> Tensor:
        with around():
            out: Tensor = net(x)
        return out

    for step in range(steps):
        found = grads_of(run, leaves)
        assert all(map(same_bits, found, expected)), f"step {step}"
        if between is not None:
            between()


def only_offloader() -> DeviceOffloader:
    (found,) = [each for one in shared_offloaders() for each in one.by_device.values() if each]
    return found


@pytest.mark.parametrize("quota", ["auto", 0.4, 1.0, 100_000])
def test_hundreds_of_steps_agree_while_long_kernels_race_with_the_copies(quota: Any) -> None:
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    net = model(cycles=SLEEP)
    assert_steps_agree(net, x, 200, lambda: rekindle.offload(quota=quota, min_bytes=KIB))


@pytest.mark.parametrize("quota", ["auto", 0.4, 1.0])
def test_hundreds_of_steps_agree_while_copies_are_late(
    quota: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = host._copy

    def late(source: Tensor, target: Tensor, stream: torch.cuda.Stream, timing: Any) -> Any:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
        done = copy(source, target, stream, timing)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
        return done

    monkeypatch.setattr(host, "_copy", late)
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    assert_steps_agree(
        model(), x, 200, lambda: rekindle.offload(quota=quota, min_bytes=KIB), lambda: spoil(MIB)
    )


def test_without_waiting_for_late_copies_gradients_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tests above can fail: with the waits taken out, late copies show."""
    copy = host._copy

    def late(source: Tensor, target: Tensor, stream: torch.cuda.Stream, timing: Any) -> Any:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20 * SLEEP)
        copy(source, target, stream, timing)
        return torch.cuda.Event()  # has never been recorded: nobody waits

    monkeypatch.setattr(host, "_copy", late)
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    with pytest.raises(AssertionError, match="step"):
        assert_steps_agree(model(), x, 4, lambda: rekindle.offload(quota=1.0, min_bytes=KIB))


def test_activations_made_on_other_streams_agree() -> None:
    side = torch.cuda.Stream()
    net = model(4)
    x = torch.randn(256, 64, device="cuda", requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        for i, layer in enumerate(net):
            stream = side if i % 2 else torch.cuda.default_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP)
                x = layer(x)
            torch.cuda.current_stream().wait_stream(stream)
            spoil(x.nbytes, 2 * x.nbytes)
        return x

    leaves = [x, *net.parameters()]
    expected = grads_of(lambda: forward(x), leaves)
    for _ in range(50):
        with rekindle.offload(quota=1.0, min_bytes=KIB):
            out = forward(x)
        spoil(x.nbytes, 2 * x.nbytes)
        assert all(map(same_bits, torch.autograd.grad(out.square().sum(), leaves), expected))


def test_branches_on_two_streams_that_share_an_activation_agree() -> None:
    """Joined only at the end: a copy has to wait for the stream on which its activation was saved,
    and what came back for one branch is not there yet for the other."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    weights = [torch.randn(256, 256, device="cuda", requires_grad=True) for _ in range(6)]

    def forward() -> Tensor:
        shared = x.sin()
        outs = []
        for stream, own in zip(streams, (weights[:3], weights[3:]), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y = shared
                for weight in own:
                    torch.cuda._sleep(SLEEP)
                    y = (y @ weight).tanh()
                outs.append(y * shared)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return outs[0] + outs[1]

    leaves = [x, *weights]
    expected = grads_of(forward, leaves)
    for _ in range(50):
        with rekindle.offload(quota=1.0, min_bytes=KIB):
            out = forward()
        spoil(x.nbytes, x.nbytes, x.nbytes)
        assert all(map(same_bits, torch.autograd.grad(out.square().sum(), leaves), expected))


@pytest.mark.parametrize("quota", [1.0, "auto"])
def test_the_pool_does_not_grow_after_the_second_step(quota: Any) -> None:
    offload = rekindle.offload(quota=quota, min_bytes=KIB)
    for rows in (4096, 30_000):  # another model, so to speak, on the same engine
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


def test_a_spilled_graph_is_right_after_another_was_thrown_away() -> None:
    """A room of pinned memory is not handed on while the device has still to write to it."""
    x = torch.randn(MIB // 4, device="cuda", requires_grad=True)
    offload = rekindle.offload(tier="disk", quota=1.0, derive=False, max_host_bytes=8 * MIB)
    (expected,) = torch.autograd.grad(chain(x, 12).sum(), x)
    for _ in range(30):
        with offload:
            out = chain(x, 12)
        torch.cuda._sleep(20 * SLEEP)
        with offload:
            chain(torch.full_like(x, 7.0).requires_grad_(), 12)
        assert same_bits(torch.autograd.grad(out.sum(), x)[0], expected)


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


def chain(x: Tensor, length: int) -> Tensor:
    """Each `exp` saves its output; nothing else is saved."""
    for _ in range(length):
        x = x.neg().exp()
    return x


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


def finish_backward() -> None:
    """Wait until autograd's thread for the device has let go of the last backward.

    It may do so a moment after the backward has returned, and of the results and the error only
    after what was queued for the end of the backward, for which it needs Python's lock. It has done
    all that before it begins with another backward.
    """
    (torch.zeros((), device="cuda", requires_grad=True) * 1.0).backward()
    torch.cuda.synchronize()


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


def fail_after(_: Tensor) -> None:
    raise ZeroDivisionError


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


def test_spilled_activations_agree() -> None:
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    net = model(cycles=SLEEP)
    with rekindle.observe() as seen:
        assert_steps_agree(
            net, x, 30, lambda: rekindle.offload(tier="disk", quota=1.0, min_bytes=KIB)
        )
    assert seen.spill.bytes_in == seen.spill.bytes_out > 0
    assert seen.offload.bytes_out == 0


def test_spilled_activations_agree_with_a_small_stage() -> None:
    x = torch.randn(4096, 64, device="cuda", requires_grad=True)
    net = model()
    offload = rekindle.offload(tier="disk", quota=1.0, max_host_bytes=3 * MIB, min_bytes=KIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_steps_agree(net, x, 10, lambda: offload)


def test_a_checkpointed_region_has_its_input_offloaded() -> None:
    net, x = model(), torch.randn(4096, 64, device="cuda", requires_grad=True)

    def run() -> Tensor:
        y = x * 2
        with rekindle.offload(quota=1.0, derive=False):
            for layer in net:
                y = rekindle.checkpoint(layer, y)
        return y

    leaves = [x, *net.parameters()]
    expected = grads_of(lambda: net(x * 2), leaves)
    with rekindle.observe() as seen:
        for _ in range(4):
            assert all(map(same_bits, grads_of(run, leaves), expected))
    assert seen.offload.tensors_out == 4 * 4  # six inputs, of which the last two are wanted first


def test_what_a_captured_graph_saves_stays() -> None:
    net, x = model(2), torch.randn(256, 64, device="cuda", requires_grad=True)
    leaves = [x, *net.parameters()]
    expected = grads_of(lambda: net(x), leaves)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            grads_of(lambda: net(x), leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    def run() -> Tensor:
        with rekindle.offload(quota=1.0, min_bytes=KIB):
            out: Tensor = net(x)
        return out

    with rekindle.observe() as seen, torch.cuda.graph(graph):
        found = grads_of(run, leaves)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(same_bits, found, expected))
    assert seen.offload.tensors_out == 0


def test_observe_reports_the_time_the_device_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = host._copy

    def late(source: Tensor, target: Tensor, stream: torch.cuda.Stream, timing: Any) -> Any:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100 * SLEEP)
        return copy(source, target, stream, timing)

    monkeypatch.setattr(host, "_copy", late)
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    with rekindle.observe() as seen:
        with rekindle.offload(quota=1.0, derive=False):
            out = chain(x, 6)
        out.sum().backward()
    assert seen.offload.tensors_out == 4
    assert seen.offload.seconds_waited > 0.01  # four sleeps out and four in, of over 5 ms each
    assert "seconds waited" in str(seen)
