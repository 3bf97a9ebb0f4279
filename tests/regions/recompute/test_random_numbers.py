"""Random numbers: a replay draws what its forward drew, and nobody else notices."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import dropout

import rekindle
from tests.toys import Block, Stack, assert_same_step


def test_dropout_mask_is_the_same_in_replay(x: Tensor) -> None:
    y = rekindle.checkpoint(dropout, x, 0.5)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)


def test_a_step_leaves_the_random_state_of_the_plain_step(x: Tensor) -> None:
    block = Block(drop=0.5)
    assert_same_step(lambda: block(x), lambda: rekindle.checkpoint(block, x), [x])


def test_random_numbers_drawn_between_forward_and_backward_do_not_reach_the_replay(
    x: Tensor,
) -> None:
    def region(x: Tensor) -> Tensor:
        return (x * torch.rand_like(x)).exp()

    def later(y: Tensor) -> Tensor:
        torch.rand(17)
        return y

    assert_same_step(lambda: later(region(x)), lambda: later(rekindle.checkpoint(region, x)), [x])


def test_a_reseed_between_forward_and_backward_does_not_reach_the_replay(x: Tensor) -> None:
    def reseeded(y: Tensor) -> Tensor:
        torch.manual_seed(99)
        return y

    assert_same_step(
        lambda: reseeded(dropout(x, 0.5)),
        lambda: reseeded(rekindle.checkpoint(dropout, x, 0.5)),
        [x],
    )


def test_a_region_that_seeds_itself_leaves_the_random_state_of_the_plain_step(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return dropout(x, 0.5).exp()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_region_that_forks_the_random_state_replays_it(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            x = dropout(x, 0.5)
        return dropout(x.exp(), 0.5)

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_regions_in_a_row_each_replay_their_own_masks(x: Tensor) -> None:
    model = Stack(depth=4, drop=0.5)
    assert_same_step(
        lambda: model(x), lambda: model(x, rekindle.checkpoint), [x, *model.parameters()]
    )


def test_nested_regions_replay_their_masks(x: Tensor) -> None:
    def inner(x: Tensor) -> Tensor:
        return dropout(x.sin(), 0.5).exp()

    def outer(x: Tensor, run: object) -> Tensor:
        x = dropout(x, 0.5)
        x = rekindle.checkpoint(inner, x) if run else inner(x)
        return dropout(x.cos(), 0.5)

    assert_same_step(
        lambda: outer(x, None), lambda: rekindle.checkpoint(outer, x, "checkpointed"), [x]
    )


def test_a_second_backward_replays_the_same_mask(x: Tensor) -> None:
    y = rekindle.checkpoint(lambda x: dropout(x.exp(), 0.5), x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_rrelu_gradient_is_that_of_the_plain_run() -> None:  # field note 3
    x = torch.randn(64, requires_grad=True)
    layer = nn.RReLU(0.1, 0.9)
    assert_same_step(lambda: layer(x), lambda: rekindle.checkpoint(layer, x), [x])


def test_rrelu_after_other_ops_has_the_gradient_of_the_plain_run(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RReLU(0.1, 0.9))
    assert_same_step(
        lambda: model(x), lambda: rekindle.checkpoint(model, x), [x, *model.parameters()]
    )


def test_in_place_rrelu_has_the_gradient_of_the_plain_run(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RReLU(0.1, 0.9, inplace=True))
    assert_same_step(
        lambda: model(x), lambda: rekindle.checkpoint(model, x), [x, *model.parameters()]
    )


def test_without_preserve_rng_state_the_replay_draws_on(x: Tensor) -> None:
    torch.manual_seed(0)
    rekindle.checkpoint(dropout, x, 0.5, preserve_rng_state=False).sum().backward()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    dropout(x, 0.5)
    assert not torch.equal(torch.get_rng_state(), after)
    dropout(x, 0.5)
    assert torch.equal(torch.get_rng_state(), after)


def test_without_preserve_rng_state_a_region_that_draws_nothing_is_still_right(x: Tensor) -> None:
    block = Block()
    assert_same_step(
        lambda: block(x),
        lambda: rekindle.checkpoint(block, x, preserve_rng_state=False),
        [x, *block.parameters()],
    )


def _with_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    return (x * torch.rand(x.shape, generator=generator)).exp()


def test_a_generator_argument_is_replayed_from_where_it_was(x: Tensor) -> None:
    generator = torch.Generator()

    def seeded(run: object) -> Tensor:
        generator.manual_seed(5)
        return rekindle.checkpoint(_with_noise, x, generator) if run else _with_noise(x, generator)

    assert_same_step(lambda: seeded(None), lambda: seeded("checkpointed"), [x])


def test_a_generator_argument_ends_where_the_plain_run_leaves_it(x: Tensor) -> None:
    plain, ours = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    _with_noise(x, plain)
    rekindle.checkpoint(_with_noise, x, ours).sum().backward()
    assert torch.equal(plain.get_state(), ours.get_state())


def test_a_generator_keyword_argument_is_replayed_from_where_it_was(x: Tensor) -> None:
    generator = torch.Generator()

    def seeded(run: object) -> Tensor:
        generator.manual_seed(5)
        if run:
            return rekindle.checkpoint(_with_noise, x, generator=generator)
        return _with_noise(x, generator)

    assert_same_step(lambda: seeded(None), lambda: seeded("checkpointed"), [x])


def test_a_generator_in_a_container_is_replayed_from_where_it_was(x: Tensor) -> None:
    def region(x: Tensor, options: dict[str, list[torch.Generator]]) -> Tensor:
        return _with_noise(x, options["generators"][0])

    generator = torch.Generator()

    def seeded(run: object) -> Tensor:
        generator.manual_seed(5)
        options = {"generators": [generator]}
        return rekindle.checkpoint(region, x, options) if run else region(x, options)

    assert_same_step(lambda: seeded(None), lambda: seeded("checkpointed"), [x])


def test_the_random_state_is_as_before_after_an_exception_in_replay(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        x = dropout(x.exp(), 0.5)
        if rekindle.is_recomputing():
            raise KeyError("in replay")
        return x.exp()

    y = rekindle.checkpoint(region, x).sum()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="in replay"):
        y.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_argument_is_as_before_after_an_exception_in_replay(x: Tensor) -> None:
    def region(x: Tensor, generator: torch.Generator) -> Tensor:
        x = _with_noise(x, generator)
        if rekindle.is_recomputing():
            raise KeyError("in replay")
        return x.exp()

    generator = torch.Generator().manual_seed(5)
    y = rekindle.checkpoint(region, x, generator).sum()
    before = generator.get_state()
    with pytest.raises(KeyError, match="in replay"):
        y.backward()
    assert torch.equal(generator.get_state(), before)


def test_an_exception_in_forward_leaves_the_random_state_of_the_plain_run(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        dropout(x, 0.5)
        raise KeyError("in forward")

    states = []
    for run in (region, lambda x: rekindle.checkpoint(region, x)):
        torch.manual_seed(0)
        with pytest.raises(KeyError, match="in forward"):
            run(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_the_reentrant_variant_replays_its_mask(x: Tensor) -> None:
    block = Block(drop=0.5)
    assert_same_step(
        lambda: block(x),
        lambda: rekindle.checkpoint(block, x, use_reentrant=True),
        [x, *block.parameters()],
    )


def test_the_reentrant_variant_replays_a_generator_argument(x: Tensor) -> None:
    generator = torch.Generator()

    def seeded(run: object) -> Tensor:
        generator.manual_seed(5)
        if run:
            return rekindle.checkpoint(_with_noise, x, generator, use_reentrant=True)
        return _with_noise(x, generator)

    assert_same_step(lambda: seeded(None), lambda: seeded("checkpointed"), [x])


@pytest.fixture
def device_type() -> Iterator[None]:
    """Puts the default device types back, torch's and ours."""
    ours, theirs = rekindle.DefaultDeviceType, torch.utils.checkpoint.DefaultDeviceType
    before = ours._default_device_type, theirs._default_device_type
    yield
    ours._default_device_type, theirs._default_device_type = before


def test_the_default_device_type_is_torchs(device_type: None) -> None:
    assert (
        rekindle.DefaultDeviceType.get_device_type()
        == torch.utils.checkpoint.DefaultDeviceType.get_device_type()
    )


def test_the_default_device_type_is_the_one_that_was_set(device_type: None) -> None:
    rekindle.DefaultDeviceType.set_device_type("meta")
    assert rekindle.DefaultDeviceType.get_device_type() == "meta"


def test_a_region_runs_whatever_default_device_type_is_set(device_type: None, x: Tensor) -> None:
    rekindle.DefaultDeviceType.set_device_type("cpu")
    assert_same_step(lambda: dropout(x, 0.5), lambda: rekindle.checkpoint(dropout, x, 0.5), [x])


@pytest.mark.parametrize(
    "args",
    [
        (),
        (1, "text", None),
        (torch.ones(2),),
        (torch.ones(2), {"a": [torch.ones(2)]}),
        (torch.ones(2, device="meta"),),
    ],
    ids=["nothing", "no tensors", "cpu", "nested cpu", "meta"],
)
def test_get_device_states_gives_what_torch_gives(args: tuple[object, ...]) -> None:
    assert rekindle.get_device_states(*args) == torch.utils.checkpoint.get_device_states(*args)


def test_set_device_states_changes_nothing_on_cpu() -> None:
    before = torch.get_rng_state()
    rekindle.set_device_states([], [], device_type="cpu")
    rekindle.set_device_states(*rekindle.get_device_states(torch.ones(2)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_in_the_closure_is_replayed_from_where_it_was() -> None:
    x = torch.ones(8, requires_grad=True)

    def seeded(run: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return run(lambda x: (x * torch.rand(8, generator=generator)).sin(), x)

    assert_same_step(
        lambda: seeded(lambda f, *args: f(*args)), lambda: seeded(rekindle.checkpoint), [x]
    )
