"""Streams, and that regions do not wait for the device."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import rekindle
from tests.gpu.plain_steps import Run, assert_same_with
from tests.toys import Block

pytestmark = pytest.mark.gpu


# Streams


def test_a_forward_on_a_side_stream_has_the_plain_step(x: Tensor) -> None:
    block = Block(64, drop=0.3).cuda()
    side = torch.cuda.Stream()

    def program(run: Run) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = run(block, x)
        torch.cuda.current_stream().wait_stream(side)
        return y

    assert_same_with(program, [x, *block.parameters()])


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_regions_on_streams_of_their_own_have_the_plain_step(x: Tensor) -> None:
    blocks = [Block(64, drop=0.3).cuda() for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in blocks]

    def program(run: Run) -> list[Tensor]:
        outs = []
        for block, stream in zip(blocks, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outs.append(run(block, x))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return outs

    leaves = [x, *(p for block in blocks for p in block.parameters())]
    assert_same_with(program, leaves)


def test_a_replay_runs_on_the_stream_of_its_forward(x: Tensor) -> None:
    side, seen = torch.cuda.Stream(), []

    def region(x: Tensor) -> Tensor:
        seen.append(torch.cuda.current_stream())
        return x.exp().sin()

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = rekindle.checkpoint(region, x)
    torch.cuda.current_stream().wait_stream(side)
    y.sum().backward()
    assert seen == [side, side]


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_region_does_not_wait_for_the_device(x: Tensor, waiting_is_an_error: None) -> None:
    rekindle.checkpoint(lambda x: dropout(x.exp(), 0.5).sin(), x).sum().backward()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_forward_with_the_values_check_does_not_wait_for_the_device(
    x: Tensor, waiting_is_an_error: None
) -> None:
    rekindle.checkpoint(lambda x: x.exp().sin(), x, determinism_check="values")


# The values check


def test_the_values_check_catches_a_drift_on_the_device(x: Tensor) -> None:
    scale = [2.0]
    y = rekindle.checkpoint(lambda x: (x * scale[0]).sin(), x, determinism_check="values").sum()
    scale[0] = 2.5
    with pytest.raises(rekindle.CheckpointError, match=r"float32\[64, 64\] cuda:0"):
        y.backward()


def test_the_values_check_compares_tensors_of_both_devices(x: Tensor) -> None:
    host, scale = torch.randn(64, requires_grad=True), [2.0]

    def region(x: Tensor, host: Tensor) -> Tensor:
        return x.exp().sin() * (host * scale[0]).sin().cuda()

    y = rekindle.checkpoint(region, x, host, determinism_check="values").sum()
    y.backward(retain_graph=True)
    scale[0] = 2.5
    with pytest.raises(rekindle.CheckpointError, match="other values"):
        y.backward()


def test_an_activation_that_comes_back_on_another_device_is_explained(x: Tensor) -> None:
    device = ["cuda"]
    y = rekindle.checkpoint(lambda x: x.to(device[0]).sin().sum().to("cuda"), x)
    device[0] = "cpu"
    with pytest.raises(rekindle.CheckpointError, match="a device that the region takes"):
        y.backward()
