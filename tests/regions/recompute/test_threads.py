"""Regions in several threads at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import rekindle
from tests.toys import Block, same_bits

THREADS = 4


def _in_threads(work: Callable[[int], None]) -> None:
    """Run `work(i)` in several threads, all let go at the same time; raises what they raise."""
    together = threading.Barrier(THREADS)

    def run(i: int) -> None:
        together.wait(timeout=120)
        work(i)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, i) for i in range(THREADS)]:
            done.result(timeout=120)


def _leaf(i: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).requires_grad_()


def _plain_gradient(block: nn.Module, i: int) -> Tensor:
    x = _leaf(i)
    (found,) = torch.autograd.grad(block(x).sum(), x)
    return found


def test_threads_with_regions_of_their_own_get_the_plain_gradients() -> None:
    block = Block()
    expected = [_plain_gradient(block, i) for i in range(THREADS)]

    def work(i: int) -> None:
        for _ in range(20):
            x = _leaf(i)
            (found,) = torch.autograd.grad(rekindle.checkpoint(block, x).sum(), x)
            assert same_bits(found, expected[i])

    _in_threads(work)


def test_threads_with_nested_regions_of_their_own_get_the_plain_gradients() -> None:
    block = Block()
    expected = [_plain_gradient(nn.Sequential(block, block), i) for i in range(THREADS)]

    def nested(x: Tensor) -> Tensor:
        return rekindle.checkpoint(block, rekindle.checkpoint(block, x))

    def work(i: int) -> None:
        for _ in range(10):
            x = _leaf(i)
            rekindle.checkpoint(nested, x).sum().backward()
            assert same_bits(x.grad, expected[i])

    _in_threads(work)


def test_threads_with_generators_of_their_own_get_their_own_masks() -> None:
    def region(x: Tensor, generator: torch.Generator) -> Tensor:
        return x.exp() * torch.rand(x.shape, generator=generator)

    def work(i: int) -> None:
        for _ in range(20):
            x, generator = _leaf(i), torch.Generator().manual_seed(i)
            y = rekindle.checkpoint(region, x, generator)
            y.sum().backward()
            assert same_bits(x.grad, y)

    _in_threads(work)


def test_threads_share_one_frame_with_retain_graph() -> None:
    x = _leaf(0)
    w = torch.randn(8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return ((x * w).exp().sin() * x).cos()

    (expected,) = torch.autograd.grad(region(x).sum(), x)
    y = rekindle.checkpoint(region, x).sum()

    def work(i: int) -> None:
        for _ in range(20):
            (found,) = torch.autograd.grad(y, x, retain_graph=True)
            assert same_bits(found, expected)

    _in_threads(work)


def test_threads_share_nested_frames_with_retain_graph() -> None:
    x = _leaf(0)

    def inner(x: Tensor) -> Tensor:
        return (x.exp().sin() * x).cos()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, rekindle.checkpoint(inner, x).sin())

    (expected,) = torch.autograd.grad(inner(inner(x).sin()).sum(), x)
    y = rekindle.checkpoint(outer, x).sum()

    def work(i: int) -> None:
        for _ in range(10):
            (found,) = torch.autograd.grad(y, x, retain_graph=True)
            assert same_bits(found, expected)

    _in_threads(work)


def test_threads_go_back_through_disjoint_parts_of_one_region() -> None:
    leaves = [_leaf(i) for i in range(THREADS)]

    def region(*xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.exp().sin() for x in xs)

    outs = rekindle.checkpoint(region, *leaves)
    _in_threads(lambda i: outs[i].sum().backward())
    for x in leaves:
        (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
        assert same_bits(x.grad, expected)


def test_forward_in_one_thread_and_backward_in_another() -> None:
    block, x = Block(), _leaf(0)
    expected = _plain_gradient(block, 0)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        y = one.submit(lambda: rekindle.checkpoint(block, x).sum()).result(timeout=120)
        other.submit(y.backward).result(timeout=120)
    assert same_bits(x.grad, expected)


def test_autocast_of_the_forwards_thread_is_there_in_the_replay_of_another() -> None:
    layer, x = nn.Linear(8, 8), _leaf(0)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rekindle.checkpoint(lambda x: layer(x).exp(), x).float().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        (expected,) = torch.autograd.grad(layer(x).exp().float().sum(), x)
    with ThreadPoolExecutor(1) as other:
        other.submit(forward).result(timeout=120).backward()
    assert same_bits(x.grad, expected)


def test_is_recomputing_is_of_one_thread() -> None:
    in_replay, looked = threading.Event(), threading.Event()

    def region(x: Tensor) -> Tensor:
        if rekindle.is_recomputing():
            in_replay.set()
            assert looked.wait(timeout=120)
        return x.exp().sin()

    y = rekindle.checkpoint(region, _leaf(0)).sum()
    with ThreadPoolExecutor(1) as other:
        done = other.submit(y.backward)
        assert in_replay.wait(timeout=120)
        said = rekindle.is_recomputing()
        looked.set()
        done.result(timeout=120)
    assert not said


def test_an_exception_in_one_threads_replay_does_not_block_another() -> None:
    x, failing = _leaf(0), threading.local()

    def region(x: Tensor) -> Tensor:
        y = x.exp()
        if rekindle.is_recomputing() and getattr(failing, "now", False):
            raise KeyError("in replay")
        return y.sin()

    y = rekindle.checkpoint(region, x).sum()
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)

    def fails() -> bool:
        failing.now = True
        try:
            torch.autograd.grad(y, x, retain_graph=True)
        except KeyError:
            return True
        return False

    with ThreadPoolExecutor(1) as other:
        assert other.submit(fails).result(timeout=120)
    (found,) = torch.autograd.grad(y, x, retain_graph=True)
    assert same_bits(found, expected)


def test_threads_train_one_model_with_batch_norm_in_turn() -> None:
    """One at a time, as data loaders that train do: the statistics end as in the plain run."""
    torch.manual_seed(0)
    plain, ours = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    turn = threading.Lock()

    for _ in range(THREADS):
        plain(_leaf(0)).sum().backward()

    def work(i: int) -> None:
        with turn:
            rekindle.checkpoint(ours, _leaf(0)).sum().backward()

    _in_threads(work)
    assert ours.num_batches_tracked == THREADS
    assert same_bits(ours.running_mean, plain.running_mean)
