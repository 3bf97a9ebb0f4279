"""Regions under a policy that call code which inductor made.

Note [Compiled code in a recorded region]: nothing inside such code is recorded, since its kernels
reuse memory; what it saves, and what depends on it, comes back by a replay of the region.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import rekindle
from rekindle import policies
from tests.graphs import TORCHS_WARNINGS, fresh_compiler
from tests.toys import assert_same_step, leaf

pytestmark = TORCHS_WARNINGS
aten = torch.ops.aten
Run = Callable[[Tensor], Tensor]

LINEAR = nn.Linear(16, 16)
SHAPE = (8192, 16)
"""Half a megabyte: smaller tensors are copied, as they may be buffers."""


def product(x: Tensor) -> Tensor:
    return LINEAR(dropout(LINEAR(x).sin(), 0.5).exp().cos()).tanh()  # type: ignore[no-any-return]


def sums(x: Tensor) -> Tensor:
    """Inductor leaves these sums to torch, and gives them memory that it uses again."""
    return x.sin().exp().cumsum(-1).cos().cumsum(-1).cos()


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[str, Run]]:
    """Compiled once for all tests."""
    with fresh_compiler():
        yield {
            "product": torch.compile(product),
            "sums": torch.compile(sums),
        }


def mixed(compiled: dict[str, Run], x: Tensor) -> Tensor:
    """Compiled code between ops, each of which saves something."""
    y = compiled["product"](LINEAR(x).sin())
    y = compiled["sums"](dropout(y.exp(), 0.5).sin())
    return LINEAR(y).tanh()  # type: ignore[no-any-return]


POLICIES: dict[str, Any] = {
    "recompute": policies.recompute(),
    "keep_matmuls": policies.keep_matmuls,
    "keep": policies.keep(aten.sin, aten.tanh),
    "spill": policies.spill(aten.sin, aten.addmm),
    "torch's": lambda: create_selective_checkpoint_contexts([aten.addmm.default]),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["product", "sums"])
def test_a_policy_region_around_compiled_code_is_right(
    compiled: dict[str, Run], name: str, policy: str
) -> None:
    x, options = leaf(*SHAPE), {"context_fn": POLICIES[policy]}
    region = compiled[name]
    assert_same_step(
        lambda: region(x),
        lambda: rekindle.checkpoint(region, x, **options),
        [x, *LINEAR.parameters()],
    )


def in_a_region(run: Run, x: Tensor) -> Tensor:
    return rekindle.checkpoint(run, x)  # type: ignore[no-any-return]


def under_a_policy(run: Run, x: Tensor) -> Tensor:
    return rekindle.checkpoint(run, x, context_fn=policies.keep(aten.sin))  # type: ignore[no-any-return]


def offloaded(run: Run, x: Tensor) -> Tensor:
    with rekindle.offload(tier="disk", quota=1.0, min_bytes=16):
        return run(x)


AROUND: dict[str, Callable[[Run, Tensor], Tensor]] = {
    "nothing": lambda run, x: run(x),
    "a region": in_a_region,
    "a policy": under_a_policy,
    "offload": offloaded,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_code_among_ops_in_a_policy_region_is_right(
    compiled: dict[str, Run], policy: str, around: str
) -> None:
    x = leaf(*SHAPE)

    def region(x: Tensor) -> Tensor:
        return rekindle.checkpoint(mixed, compiled, x, context_fn=POLICIES[policy])  # type: ignore[no-any-return]

    leaves = [x, *LINEAR.parameters()]
    assert_same_step(lambda: mixed(compiled, x), lambda: AROUND[around](region, x), leaves)


def test_two_backwards_through_compiled_code_in_a_policy_region(compiled: dict[str, Run]) -> None:
    def backward(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    x = leaf(*SHAPE)
    with torch._functorch.config.patch(donated_buffer=False), fresh_compiler():
        sines = torch.compile(lambda x: x.sin().exp().cos())
        assert_same_step(
            lambda: sines(x).sin(),
            lambda: rekindle.checkpoint(
                lambda x: sines(x).sin(), x, context_fn=policies.recompute()
            ),
            [x],
            backward=backward,
        )


# What is held


def bytes_held(run: Callable[[], Any]) -> int:
    """What stays allocated after a call, its result included, and random states."""
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiled:
        out = run()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    del out
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("name", ["product", "sums"])
def test_a_policy_region_holds_nothing_that_compiled_code_saves_as_torchs(
    compiled: dict[str, Run], name: str
) -> None:
    x, function = leaf(*SHAPE), compiled[name]
    options = {"context_fn": lambda: create_selective_checkpoint_contexts([aten.mm.default])}

    def ours() -> Tensor:
        return rekindle.checkpoint(function, x, **options)  # type: ignore[no-any-return]

    def torchs() -> Tensor:
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False, **options)  # type: ignore[no-any-return]

    ours().sum().backward()  # compiles it
    random_state = torch.get_rng_state().nbytes
    assert bytes_held(ours) == bytes_held(torchs) == x.nbytes + random_state


def test_a_policy_region_in_a_program_that_compiles_holds_no_argument_that_backward_needs_not(
    compiled: dict[str, Run],
) -> None:
    x = leaf(*SHAPE)
    argument = x * 1
    out = rekindle.checkpoint(lambda t: (t + 1).sin(), argument, context_fn=policies.keep(aten.add))
    alive = ref(argument)
    del argument
    assert alive() is None
    out.sum().backward()


def test_a_region_that_first_ran_no_compiled_code_holds_what_it_saves_once(
    compiled: dict[str, Run],
) -> None:
    x = leaf(*SHAPE)

    def region(x: Tensor, compiles: bool) -> Tensor:
        return compiled["sums"](x) if compiles else x * 1

    def run(compiles: bool) -> Tensor:
        return rekindle.checkpoint(region, x, compiles, context_fn=policies.recompute())  # type: ignore[no-any-return]

    compiled["sums"](x)
    run(compiles=False)
    first = bytes_held(lambda: run(compiles=True))
    random_state = torch.get_rng_state().nbytes
    assert bytes_held(lambda: run(compiles=True)) == x.nbytes + random_state < first
    for _ in range(2):
        assert_same_step(lambda: compiled["sums"](x), lambda: run(compiles=True), [x])


def test_observing_counts_the_replay_and_what_compiled_code_would_hold(
    compiled: dict[str, Run],
) -> None:
    x = leaf(*SHAPE)
    with rekindle.observe() as seen:
        rekindle.checkpoint(compiled["sums"], x, context_fn=policies.recompute()).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)
    assert seen.total.bytes_held == x.nbytes
    assert seen.total.activations_dropped > 0


# Errors


def test_a_region_that_fails_after_compiled_code_leaves_nothing(compiled: dict[str, Run]) -> None:
    x = leaf(*SHAPE)

    def region(x: Tensor) -> Tensor:
        compiled["sums"](x)
        raise ValueError("after")

    with pytest.raises(ValueError, match="after"):
        rekindle.checkpoint(region, x, context_fn=policies.recompute())
    rekindle.checkpoint(torch.sin, x, context_fn=policies.recompute()).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_an_argument_that_is_changed_after_compiled_code_used_it_is_an_error_that_names_it(
    compiled: dict[str, Run],
) -> None:
    x = leaf(*SHAPE)
    argument = x * 1
    out = rekindle.checkpoint(compiled["sums"], argument, context_fn=policies.recompute())
    with torch.no_grad():
        argument.mul_(2)
    with pytest.raises(rekindle.CheckpointError, match="changed in place"):
        out.sum().backward()
