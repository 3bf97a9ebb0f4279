"""Offload on a GPU, to host memory and disk: streams that race on purpose agree with plain."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.offload.tiers import host
from tests.gpu.slow_models import KIB, MIB, SLEEP, assert_steps_agree, chain, grads_of, model, spoil
from tests.toys import same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_offloaders")]


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
