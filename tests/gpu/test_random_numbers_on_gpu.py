"""Random numbers of regions on a GPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import rekindle
from tests.gpu.plain_steps import Run, assert_runs_alone, assert_same_with
from tests.toys import Block, Stack, assert_same_step

pytestmark = pytest.mark.gpu


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
