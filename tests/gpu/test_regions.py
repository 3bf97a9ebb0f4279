"""On a GPU: random numbers, autocast, attention kernels, streams, graph capture, memory."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention

import rekindle
from tests.toys import Block, Stack, assert_same_step, same_bits, total

pytestmark = pytest.mark.gpu

Run = Callable[..., Any]


def plain(function: Run, *args: Any) -> Any:
    return function(*args)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, 64, device="cuda", requires_grad=True)


def assert_same_with(program: Callable[[Run], Any], leaves: list[Tensor], **options: Any) -> None:
    """The same step, plain and checkpointed, and the same CUDA random state after it."""
    states: list[Tensor] = []

    def run(region: Run) -> Callable[[], Any]:
        return lambda: program(region)

    def backward(loss: Tensor) -> None:
        loss.backward()
        states.append(torch.cuda.get_rng_state())

    options = {"backward": backward, **options}
    assert_same_step(run(plain), run(rekindle.checkpoint), leaves, **options)
    if states:
        assert torch.equal(*states), "the step left another CUDA random state"


def assert_runs_alone(program: str) -> None:
    """A program in a process of its own, where nothing has been used before."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# Random numbers


def test_dropout_mask_is_the_same_in_replay(x: Tensor) -> None:
    y = rekindle.checkpoint(dropout, x, 0.5)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)


def test_a_stack_with_dropout_has_the_plain_step_and_random_state(x: Tensor) -> None:
    model = Stack(depth=3, dim=64, drop=0.3).cuda()
    assert_same_with(lambda run: model(x, run), [x, *model.parameters()])


def test_a_reseed_between_forward_and_backward_does_not_reach_the_replay(x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        y = run(lambda x: dropout(x.exp(), 0.5).sin(), x)
        torch.cuda.manual_seed(99)
        return y

    assert_same_with(program, [x])


def test_numbers_drawn_between_forward_and_backward_do_not_reach_the_replay(x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        y = run(lambda x: dropout(x.exp(), 0.5).sin(), x)
        torch.rand(1000, device="cuda")
        return y

    assert_same_with(program, [x])


def test_numbers_of_both_generators_are_replayed(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        host = torch.rand(64).to("cuda")
        return dropout(x.exp() * host, 0.5).sin()

    assert_same_with(lambda run: run(region, x), [x])


def test_a_cuda_generator_argument_is_replayed_from_where_it_was(x: Tensor) -> None:
    generator = torch.Generator("cuda")

    def region(x: Tensor, generator: torch.Generator) -> Tensor:
        return (x * torch.rand(64, device="cuda", generator=generator)).exp()

    def program(run: Run) -> Tensor:
        generator.manual_seed(5)
        return run(region, x, generator)

    assert_same_with(program, [x])


def test_a_cuda_generator_argument_ends_where_the_plain_run_leaves_it(x: Tensor) -> None:
    generator = torch.Generator("cuda")

    def region(x: Tensor, generator: torch.Generator) -> Tensor:
        return (x * torch.rand(64, device="cuda", generator=generator)).exp()

    generator.manual_seed(5)
    torch.rand(64, device="cuda", generator=generator)
    after = generator.get_state()
    generator.manual_seed(5)
    rekindle.checkpoint(region, x, generator).sum().backward()
    assert torch.equal(generator.get_state(), after)


def test_the_random_state_is_as_before_after_an_exception_in_replay(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        y = dropout(x.exp(), 0.5)
        if rekindle.is_recomputing():
            raise KeyError("in replay")
        return y.exp()

    y = rekindle.checkpoint(region, x).sum()
    torch.cuda.manual_seed(7)
    before = torch.cuda.get_rng_state()
    with pytest.raises(KeyError):
        y.backward()
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_without_preserve_rng_state_the_replay_draws_on(x: Tensor) -> None:
    torch.manual_seed(0)
    rekindle.checkpoint(dropout, x, 0.5, preserve_rng_state=False).sum().backward()
    after = torch.cuda.get_rng_state()
    torch.manual_seed(0)
    dropout(x, 0.5)
    dropout(x, 0.5)
    assert torch.equal(torch.cuda.get_rng_state(), after)


def test_get_device_states_are_torchs(x: Tensor) -> None:
    ours = rekindle.get_device_states(x, torch.ones(2))
    theirs = torch.utils.checkpoint.get_device_states(x, torch.ones(2))
    assert ours[0] == theirs[0] == [x.get_device()]
    assert all(map(torch.equal, ours[1], theirs[1]))


def test_set_device_states_puts_the_random_state_back(x: Tensor) -> None:
    states = rekindle.get_device_states(x)
    first = torch.rand(8, device="cuda")
    rekindle.set_device_states(*states, device_type="cuda")
    assert torch.equal(torch.rand(8, device="cuda"), first)


def test_cpu_arguments_with_parameters_on_the_device() -> None:
    """No argument says that the region draws from the device's generator."""
    layer, x = nn.Linear(64, 64).cuda(), torch.randn(8, 64, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return dropout(layer(x.cuda()), 0.5).exp()

    assert_same_with(lambda run: run(region, x), [x, *layer.parameters()])


def test_no_tensor_argument_at_all() -> None:
    weight = torch.randn(64, device="cuda", requires_grad=True)
    assert_same_with(lambda run: run(lambda: dropout(weight.exp(), 0.5).sin()), [weight])


def test_arguments_on_both_devices(x: Tensor) -> None:
    host = torch.randn(64, requires_grad=True)

    def region(x: Tensor, host: Tensor) -> Tensor:
        return dropout(x.exp(), 0.5) * dropout(host.exp(), 0.5).cuda()

    assert_same_with(lambda run: run(region, x, host), [x, host])


def test_a_region_that_is_the_first_to_use_the_device_replays_its_mask() -> None:
    """In a process of its own: here the device is in use already."""
    program = """
        import torch, rekindle
        from torch.nn.functional import dropout

        torch.manual_seed(3)
        assert not torch.cuda.is_initialized()
        x = torch.ones(256, requires_grad=True)
        y = rekindle.checkpoint(lambda x: dropout(x.to("cuda"), 0.5), x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, (y != 0).cpu())
        after = torch.cuda.get_rng_state()
        torch.manual_seed(3)
        dropout(torch.ones(256, device="cuda"), 0.5)
        assert torch.equal(torch.cuda.get_rng_state(), after)
    """
    assert_runs_alone(program)


def test_a_region_on_the_cpu_does_not_start_the_device() -> None:
    program = """
        import torch, rekindle

        x = torch.ones(4, requires_grad=True)
        rekindle.checkpoint(lambda x: x.exp().sin(), x).sum().backward()
        rekindle.checkpoint(lambda x: x.exp().sin(), x, use_reentrant=True).sum().backward()
        assert not torch.cuda.is_initialized()
    """
    assert_runs_alone(program)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_both_variants_replay_their_masks(x: Tensor, reentrant: bool) -> None:
    block = Block(64, drop=0.5).cuda()
    assert_same_step(
        lambda: block(x),
        lambda: rekindle.checkpoint(block, x, use_reentrant=reentrant),
        [x, *block.parameters()],
    )


def test_rrelu_has_the_plain_gradient(x: Tensor) -> None:
    assert_same_with(
        lambda run: run(lambda x: nn.functional.rrelu(x * 2, 0.1, 0.9, training=True), x), [x]
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_regions_on_two_devices_replay_the_masks_of_each() -> None:
    x = torch.randn(64, device="cuda:0", requires_grad=True)
    z = torch.randn(64, device="cuda:1", requires_grad=True)

    def region(x: Tensor, z: Tensor) -> Tensor:
        return dropout(x.exp(), 0.5) + dropout(z.exp(), 0.5).to("cuda:0")

    assert_same_with(lambda run: run(region, x, z), [x, z])


# What surrounds a region. Backward runs on a thread of autograd's own.


def test_is_recomputing_is_true_in_a_replay_on_autograds_thread(x: Tensor) -> None:
    said = []

    def region(x: Tensor) -> Tensor:
        said.append(rekindle.is_recomputing())
        return x.exp().sin()

    rekindle.checkpoint(region, x).sum().backward()
    assert said == [False, True]


def test_a_device_context_around_the_forward_is_there_in_replay(x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        with torch.device("cuda"):
            return run(lambda x: (x * torch.rand(64)).exp(), x)

    assert_same_with(program, [x])


def test_the_default_dtype_of_the_forward_is_there_in_replay(x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return run(lambda x: (x * torch.full((64,), 1 / 3, device="cuda")).exp(), x)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same_with(program, [x])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_autocast_around_a_region(x: Tensor, dtype: torch.dtype, cache: bool) -> None:
    model = Stack(depth=2, dim=64, drop=0.3).cuda()

    def program(run: Run) -> Tensor:
        with torch.autocast("cuda", dtype=dtype, cache_enabled=cache):
            return model(x, run)

    assert_same_with(program, [x, *model.parameters()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_inside_a_region(x: Tensor, dtype: torch.dtype) -> None:
    block = Block(64).cuda()

    def region(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            x = block(x)
        with torch.autocast("cuda", enabled=False):
            return block(x.float())

    assert_same_with(lambda run: run(region, x), [x, *block.parameters()])


def test_backward_inside_the_autocast_of_its_forward(x: Tensor) -> None:
    block = Block(64).cuda()
    found = []
    for run in (plain, rekindle.checkpoint):
        x.grad = None
        block.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                block(x)
            run(block, x).float().sum().backward()
        found.append([x.grad, *(p.grad for p in block.parameters())])
    assert all(map(same_bits, *found))


def test_autocast_of_both_devices_is_there_in_replay(x: Tensor) -> None:
    host = torch.randn(8, 8, requires_grad=True)

    def region(x: Tensor, host: Tensor) -> Tensor:
        return (x @ x.t()).exp().float().mean() + (host @ host.t()).tanh().float().sum().cuda()

    def program(run: Run) -> Tensor:
        with (
            torch.autocast("cuda", dtype=torch.float16),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            return run(region, x * 0.01, host)

    assert_same_with(program, [x, host])


# Attention. Sequences of one tile: longer ones sum gradients in any order, plain or not.


@pytest.fixture
def q() -> Tensor:
    return torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)


def _attend(q: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, q * 2, q + 1, dropout_p=0.3).sin()


KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_attention_with_dropout_has_the_plain_step(q: Tensor, kernel: SDPBackend) -> None:
    def program(run: Run) -> Tensor:
        with sdpa_kernel(kernel):
            return run(_attend, q)

    assert_same_with(program, [q])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_attention_with_dropout_raises_no_alarm_of_the_values_check(
    q: Tensor, kernel: SDPBackend
) -> None:
    with sdpa_kernel(kernel):
        y = rekindle.checkpoint(_attend, q, determinism_check="values")
    y.sum().backward()
    assert q.grad is not None


def test_the_order_of_attention_kernels_around_the_forward_is_there_in_replay(q: Tensor) -> None:
    def program(run: Run) -> Tensor:
        order = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(order, set_priority=True):
            return run(_attend, q)

    assert_same_with(program, [q])


def test_the_first_attention_of_a_process_may_be_in_a_region() -> None:
    assert_runs_alone("""
        import torch, rekindle
        from torch.nn.functional import scaled_dot_product_attention

        def attend(q):
            return scaled_dot_product_attention(q.sin(), q, q, is_causal=True)

        def gradient(run):
            q = torch.linspace(-1, 1, 8 * 128 * 64, device="cuda", dtype=torch.bfloat16)
            q = q.view(1, 8, 128, 64).requires_grad_()
            run(attend, q).sum().backward()
            return q.grad

        found = gradient(rekindle.checkpoint)  # raised: other kernels save other tensors
        assert torch.allclose(found, gradient(lambda function, q: function(q)), rtol=0.02)
    """)


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


# Graph capture (field note 28)


def _warmed_up(step: Callable[[], Any], leaves: list[Tensor]) -> None:
    """What capture asks for: a few steps on a side stream, and no gradients left."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            for leaf in leaves:
                leaf.grad = None
    torch.cuda.current_stream().wait_stream(side)


def test_a_captured_step_draws_one_mask_for_forward_and_replay() -> None:
    x = torch.ones(4096, device="cuda", requires_grad=True)

    def step() -> Tensor:
        y = rekindle.checkpoint(dropout, x, 0.5)
        y.sum().backward()
        return y

    _warmed_up(step, [x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(3):
        graph.replay()
        assert x.grad is not None
        assert torch.equal(x.grad != 0, y != 0)


def test_a_captured_step_draws_a_new_mask_each_time_it_runs() -> None:
    x = torch.ones(4096, device="cuda", requires_grad=True)

    def step() -> Tensor:
        y = rekindle.checkpoint(dropout, x, 0.5)
        y.sum().backward()
        return y

    _warmed_up(step, [x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append((y != 0).clone())
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_a_captured_stack_with_dropout_draws_what_the_captured_plain_one_draws() -> None:
    model = Stack(depth=3, dim=64, drop=0.3).cuda()
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    leaves = [x, *model.parameters()]
    found: list[list[Tensor]] = []
    for run in (plain, rekindle.checkpoint):

        def step(run: Run = run) -> Tensor:
            y = model(x, run)
            total(y).backward()
            return y

        for leaf in leaves:
            leaf.grad = None
        _warmed_up(step, leaves)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        torch.manual_seed(11)
        seen = []
        for _ in range(2):
            graph.replay()
            seen += [t.detach().clone() for t in (y, *(leaf.grad for leaf in leaves))]
        found.append(seen)
        del graph
    for a, b in zip(*found, strict=True):
        assert same_bits(a, b)


def test_a_captured_forward_and_backward_of_two_regions_in_nested_form() -> None:
    x = torch.ones(4096, device="cuda", requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return dropout(x, 0.5)

    def step() -> Tensor:
        y = rekindle.checkpoint(lambda x: rekindle.checkpoint(inner, dropout(x, 0.5)), x)
        y.sum().backward()
        return y

    _warmed_up(step, [x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(2):
        graph.replay()
        assert x.grad is not None
        assert torch.equal(x.grad != 0, y != 0)


def test_numbers_after_a_capture_are_as_after_a_plain_one(x: Tensor) -> None:
    """A capture moves the generator no further than the plain step's would."""
    states = []
    for run in (plain, rekindle.checkpoint):

        def step(run: Run = run) -> None:
            run(dropout, x, 0.5).sum().backward()

        _warmed_up(step, [x])
        graph = torch.cuda.CUDAGraph()
        torch.manual_seed(0)
        with torch.cuda.graph(graph):
            step()
        torch.manual_seed(0)
        graph.replay()
        states.append(torch.cuda.get_rng_state())
        x.grad = None
        del graph
    assert torch.equal(*states)


# Memory


def test_after_forward_a_region_holds_its_input_and_output_alone() -> None:
    block = Block(512).cuda()
    x = torch.randn(1024, 512, device="cuda", requires_grad=True)
    rekindle.checkpoint(block, x).sum().backward()  # workspaces and gradients are there from now on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = rekindle.checkpoint(block, x)
    assert torch.cuda.memory_allocated() - before == y.nbytes


def test_after_backward_a_region_holds_nothing() -> None:
    block = Block(512, drop=0.1).cuda()
    x = torch.randn(1024, 512, device="cuda", requires_grad=True)
    rekindle.checkpoint(block, x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    rekindle.checkpoint(block, x).sum().backward()
    assert torch.cuda.memory_allocated() == before


def test_a_stack_of_regions_holds_one_tensor_each() -> None:
    depth, model = 4, Stack(depth=4, dim=512).cuda()
    x = torch.randn(1024, 512, device="cuda", requires_grad=True)
    model(x, rekindle.checkpoint).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = model(x, rekindle.checkpoint)
    assert torch.cuda.memory_allocated() - before == depth * y.nbytes


def test_an_exception_in_forward_holds_no_memory(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        x.exp().sin()
        raise KeyError("in forward")

    before = torch.cuda.memory_allocated()
    with pytest.raises(KeyError):
        rekindle.checkpoint(region, x)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("policy", [None, rekindle.policies.recompute()])
def test_a_region_that_differentiates_twice_saves_in_a_thread_of_autograds(
    x: Tensor, policy: Any
) -> None:
    """That thread runs no Python but the hook: there is no call to take down."""

    def region(x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return slope * x

    options = {} if policy is None else {"context_fn": policy}
    assert_same_step(
        lambda: region(x), lambda: rekindle.checkpoint(region, x, **options), leaves=[x]
    )
