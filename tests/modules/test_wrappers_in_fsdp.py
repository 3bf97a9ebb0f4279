"""Wrappers around and inside FSDP, whose hooks on state dicts know the names."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from rekindle import checkpoint_wrapper
from tests.ranks import one_rank
from tests.toys import Block, Stack, same_bits, same_state


@pytest.fixture(scope="module")
def fsdp() -> Iterator[None]:
    """FSDP works: this process is a group of one rank."""
    with one_rank():
        yield


def sharded(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), use_orig_params=True, sync_module_states=False
    )


inside_and_outside = pytest.mark.parametrize(
    "wrap",
    [
        lambda layer: sharded(checkpoint_wrapper(layer)),
        lambda layer: checkpoint_wrapper(sharded(layer)),
    ],
    ids=["inside", "outside"],
)


@pytest.mark.usefixtures("fsdp")
@pytest.mark.filterwarnings("ignore")
@inside_and_outside
def test_state_goes_through_fully_sharded_data_parallel_both_ways(wrap: Any) -> None:
    plain = Stack(2)
    model = Stack(2)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(block)
    whole = sharded(model)
    assert list(whole.state_dict()) == list(plain.state_dict())
    assert str(whole.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert same_state(plain, whole)
    assert same_state(model, plain)
    other = Stack(2)
    other.load_state_dict(whole.state_dict())
    assert same_state(other, plain)


@pytest.mark.usefixtures("fsdp")
@pytest.mark.filterwarnings("ignore")
def test_fully_sharded_data_parallel_looks_into_our_wrapper() -> None:
    block = Block()
    assert sharded(checkpoint_wrapper(block)).module is block  # type: ignore[comparison-overlap]


@pytest.mark.usefixtures("fsdp")
@pytest.mark.filterwarnings("ignore")
@inside_and_outside
def test_a_step_under_fully_sharded_data_parallel_is_as_plain(wrap: Any) -> None:
    plain, x = Block(drop=0.2), torch.randn(4, 8)
    model = wrap(copy.deepcopy(plain))
    for each in (plain, model):
        torch.manual_seed(3)
        each(x).sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(a.grad, b.grad)


@pytest.mark.usefixtures("fsdp")
def test_state_goes_through_fully_shard_both_ways() -> None:
    plain, model, x = Stack(2), Stack(2), torch.randn(4, 8)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
        fully_shard(model.blocks[i])
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    state = get_model_state_dict(model, options=options)
    assert list(state) == list(plain.state_dict())
    assert all(same_bits(state[key], value) for key, value in plain.state_dict().items())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).sum().backward()
    optimizer.step()
    names = [name for name, _ in plain.named_parameters()]
    assert list(get_optimizer_state_dict(model, optimizer)["state"]) == names
