"""Strategies of modules inside other modules. Note [A strategy inside another]."""

import pytest
from torch import Tensor, nn

import rekindle
from rekindle import policies
from rekindle.modules.strategy_spelling import Spelling
from tests.modules.applying import (
    BLOCKS,
    HIDDEN,
    NORM,
    PER_BLOCK,
    SPILL_ONLY,
    X,
    managed,
    seen_with,
    step,
    times,
    total_with,
)
from tests.toys import Mlp, Stack, leaf


def test_what_is_kept_inside_a_recomputed_block_is_not_run_again() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.*.mlp": "keep"})
    assert counts == times(PER_BLOCK["the Mlp kept"])


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
@pytest.mark.parametrize("what", ["spill", SPILL_ONLY, policies.spill()], ids=str)
def test_what_is_spilled_inside_a_recomputed_block_goes_and_comes_back(what: Spelling) -> None:
    """The Mlp's two of each block go, but for the last two of the step."""
    seen = seen_with({"blocks.*": "recompute", "blocks.*.mlp": what})
    sent = (2 * BLOCKS - 2, (2 * BLOCKS - 2) * HIDDEN)
    assert seen.total == times(PER_BLOCK["the Mlp spilled"])
    assert (seen.spill.tensors_out, seen.spill.bytes_out) == sent
    assert (seen.spill.tensors_in, seen.spill.bytes_in) == sent


def test_what_is_offloaded_inside_a_recomputed_block_is_not_run_again() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.*.mlp": "offload"})
    assert counts.ops_replayed == times(PER_BLOCK["the Mlp kept"]).ops_replayed


def test_a_policy_inside_a_recomputed_block_decides_for_its_part() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.*.mlp": policies.keep_matmuls})
    assert counts == times(PER_BLOCK["matmuls kept"])


def test_a_part_of_one_block_only_has_its_own_strategy() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.1.mlp": "keep"})
    assert counts == times(PER_BLOCK["recompute"], 2) + PER_BLOCK["the Mlp kept"]


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_what_is_recomputed_inside_a_spilled_block_is_dropped_and_not_spilled() -> None:
    seen = seen_with({"blocks.*": SPILL_ONLY, "blocks.*.mlp": "recompute"})
    assert seen.total.replays == BLOCKS
    assert seen.total.bytes_dropped == BLOCKS * 2 * HIDDEN
    held = BLOCKS * (X + NORM)
    assert 0 < seen.spill.bytes_out < held
    assert seen.spill.bytes_in == seen.spill.bytes_out


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_what_is_kept_inside_a_spilled_block_is_not_spilled() -> None:
    """The Mlp's are 2 * HIDDEN in each block, and its input is the norm's result."""
    what = {"blocks.*": SPILL_ONLY, "blocks.*.mlp": "keep"}
    assert seen_with(what).spill.bytes_out <= BLOCKS * (X + NORM)


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_nothing_is_spilled_where_all_parts_of_a_spilled_model_are_kept() -> None:
    model = nn.Sequential(*[Mlp() for _ in range(4)])
    assert seen_with({"": SPILL_ONLY, "*": "keep"}, model).spill.tensors_out == 0


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_what_is_spilled_inside_a_kept_block_is_spilled() -> None:
    model = nn.Sequential(*[nn.Sequential(Mlp(), Mlp(), Mlp()) for _ in range(2)])
    assert seen_with({"*": "keep", "*.*": SPILL_ONLY}, model).spill.tensors_out > 0


def test_what_is_recomputed_inside_a_kept_block_is_recomputed() -> None:
    model = Stack(BLOCKS)
    counts = total_with({"blocks.*": "keep", "blocks.*.mlp": "recompute"}, model)
    assert (counts.replays, counts.bytes_dropped) == (BLOCKS, BLOCKS * 2 * HIDDEN)
    assert managed(model) == [f"blocks.{i}.mlp" for i in range(BLOCKS)]


@pytest.mark.parametrize("around", ["recompute", policies.keep()], ids=str)
def test_what_is_recomputed_inside_what_is_kept_inside_a_region_is_recomputed(
    around: Spelling,
) -> None:
    counts = total_with({"": around, "blocks.*": "keep", "blocks.*.mlp": "recompute"})
    assert counts.bytes_dropped == BLOCKS * 2 * HIDDEN
    assert counts.bytes_held < BLOCKS * (X + NORM) + 1


def test_what_is_kept_inside_two_recomputed_modules_is_kept() -> None:
    counts = total_with({"": "recompute", "blocks.*": "recompute", "blocks.*.mlp": "keep"})
    assert counts.bytes_held >= BLOCKS * 2 * HIDDEN


def test_recompute_inside_recompute_nests() -> None:
    counts = total_with({"": "recompute", "blocks.*": "recompute"})
    assert (counts.forwards, counts.replays) == (1 + BLOCKS, 1 + BLOCKS)
    assert (counts.activations_held, counts.bytes_held) == (1, X)


def test_what_a_parts_policy_does_not_speak_of_is_recomputed_whatever_is_around() -> None:
    """The most specific pattern decides, and that policy alone would recompute GELU."""
    counts = total_with({"": policies.keep(), "blocks.*.mlp": policies.keep_matmuls})
    other = total_with({"": policies.keep()})
    assert other.bytes_held - counts.bytes_held == BLOCKS * HIDDEN


class Named(nn.Module):
    """Has a norm, and so has its part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Mlp()
        self.part = nn.ModuleDict({"norm": Mlp()})

    def forward(self, x: Tensor) -> Tensor:
        return self.part["norm"](self.norm(x))  # type: ignore[no-any-return]


def test_a_part_is_not_taken_for_another_whose_path_ends_alike() -> None:
    counts = total_with({"": "recompute", "norm": "keep"}, Named())
    other = total_with({"": "recompute", "norm": "keep", "part.norm": "keep"}, Named())
    assert other.bytes_held - counts.bytes_held == 2 * HIDDEN


class Methods(nn.Module):
    """Its training step does not go through its forward, as with Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(BLOCKS)

    def training_step(self, x: Tensor) -> Tensor:
        out = x
        for block in self.stack.blocks:
            out = block(out)
        return out.sum()


def test_a_part_has_its_strategy_however_the_block_around_it_is_called() -> None:
    model = Methods()
    rekindle.apply(model, {"stack.blocks.*": "recompute", "stack.blocks.*.mlp": "keep"})
    with rekindle.observe() as seen:
        model.training_step(leaf()).backward()
    assert seen.total == times(PER_BLOCK["the Mlp kept"])


def test_a_part_has_its_strategy_where_the_model_is_a_part_of_another() -> None:
    model = nn.Sequential(Stack(BLOCKS))
    rekindle.apply(model[0], {"blocks.*": "recompute", "blocks.*.mlp": "keep"})
    assert step(model).total == times(PER_BLOCK["the Mlp kept"])


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_options_of_offload_inside_a_recomputed_block_count_or_are_refused() -> None:
    what: dict[str, Spelling] = {
        "blocks.*": "recompute",
        "blocks.*.mlp": rekindle.offload(tier="disk", min_bytes=2**30),
    }
    model = Stack(BLOCKS)
    try:
        rekindle.apply(model, what)
    except ValueError:
        return
    assert step(model).spill.tensors_out == 0
