"""Plans that spill to disk: on a CPU, where nothing else can be sent away."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rekindle
from benchmarks.decoder import SHAPES, Decoder
from rekindle.offload.device_offloader import DeviceOffloader
from rekindle.offload.owners import owner_of
from rekindle.planner import fit
from rekindle.planner.measure.link import link_bandwidth
from rekindle.planner.measure.measure_step import measure_step
from rekindle.planner.plan_for_budget import plan_by
from rekindle.planner.profile_model import MeasuringDevice, measuring_device
from rekindle.planner.timeline import simulate
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import BlockProfile, Candidate
from rekindle.regions.selective.decisions import Decision
from rekindle.regions.selective.offload_bridge import offloader_of
from rekindle.regions.selective.planned_ops import NumberedOpsPolicy, policy_of
from rekindle.strategy import Keep, NumberedOps, SavedIndices, Selective
from tests.toys import Stack, same_bits

pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(replace(SHAPES["tiny"], layers=6, tokens=64), dtype=torch.float32)


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(1, 64, 32, requires_grad=True)


@pytest.fixture(scope="module")
def profile(decoder: Decoder, x: Tensor) -> rekindle.Profile:
    return rekindle.profile(decoder, x, spill=True)


@pytest.fixture(autouse=True)
def clean(decoder: Decoder) -> Iterator[None]:
    yield
    rekindle.remove(decoder)


def gradients(decoder: Decoder, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(decoder(x).sum(), [x, *decoder.parameters()]))


def test_what_moves_goes_to_disk(profile: rekindle.Profile) -> None:
    moving = [option for option in profile.blocks[0].candidates if option.bytes_moved]
    assert {type(option.strategy) for option in moving} == {SavedIndices, Selective}
    assert {option.tier for option in moving} == {"disk"}
    assert all(" spill " in f" {option.describe()}" for option in moving)
    assert profile.bytes_per_second > 0


def test_without_it_nothing_moves_on_a_cpu(decoder: Decoder, x: Tensor) -> None:
    found = rekindle.profile(decoder, x)
    assert found.bytes_per_second == 0
    assert not any(option.bytes_moved for block in found.blocks for option in block.candidates)


@pytest.mark.parametrize("kind", [SavedIndices, Selective])
def test_candidates_that_spill_give_the_gradients_of_a_plain_step(
    kind: type, decoder: Decoder, x: Tensor, profile: rekindle.Profile
) -> None:
    expected = gradients(decoder, x)
    menu = [o for o in profile.blocks[-1].candidates if type(o.strategy) is kind and o.bytes_moved]
    for option in (menu[0], menu[-1]):
        rekindle.apply(decoder, option.strategy)
        for _ in range(3):  # unknown, seen once, known
            with rekindle.observe() as seen:
                assert all(map(same_bits, gradients(decoder, x), expected))
        assert 0 < seen.spill.bytes_in <= seen.spill.bytes_out  # what is still here stays
        assert seen.offload.bytes_out == 0
        rekindle.remove(decoder)


@pytest.mark.parametrize("share", ["60%", "45%"])
def test_a_step_fits_and_is_the_same(
    share: str, decoder: Decoder, x: Tensor, profile: rekindle.Profile
) -> None:
    expected = gradients(decoder, x)
    plan = rekindle.fit(decoder, x, share, profile=_spilling(profile))
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    with rekindle.observe() as seen:
        assert all(map(same_bits, gradients(decoder, x), expected))
    assert seen.spill.bytes_out > 0


def _spilling(profile: rekindle.Profile) -> rekindle.Profile:
    return replace(profile, blocks=tuple(map(_without_recompute, profile.blocks)))


def _without_recompute(block: BlockProfile) -> BlockProfile:
    """To keep, or to spill: nothing is made again."""
    whole = tuple(
        o
        for o in block.candidates
        if o.tier and isinstance(o.strategy, SavedIndices) and not o.strategy.recomputed
    )
    keep = next(option for option in block.candidates if option.strategy == Keep())
    return replace(block, candidates=(keep, *whole))


def test_a_plan_that_spills_is_the_same_after_it_was_saved(
    profile: rekindle.Profile, tmp_path: Path
) -> None:
    plan = rekindle.solve(_spilling(profile), "60%")
    assert any(option.tier == "disk" for _, _, option in plan.blocks)
    plan.save(tmp_path / "plan.json")
    assert rekindle.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("is_measured", [False, True])
def test_larger_inputs_are_planned_with_disk_too(
    is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = Stack(4, 32), torch.randn(64, 32)
    if is_measured:
        rekindle.fit(model, batch, "90%", profile=rekindle.profile(model, batch, spill=True))
    else:
        rekindle.fit(model, batch, "90%", spill=True)
    asked = []

    def bench(device: torch.device, spill: bool) -> MeasuringDevice:
        asked.append(spill)
        return measuring_device(device, spill)

    monkeypatch.setattr(fit, "measuring_device", bench)
    model(torch.randn(128, 32)).sum().backward()
    assert asked == [True]
    rekindle.remove(model)


def test_a_strategy_is_run_by_its_tier() -> None:
    policy = policy_of(NumberedOps((1,), (2,), tier="disk"))
    assert isinstance(policy, NumberedOpsPolicy)
    assert policy.by_number == {1: Decision.KEEP, 2: Decision.SPILL_AS_PLANNED}
    assert repr(policy) == "<keep ops [1], spill ops [2], recompute the rest>"
    assert str(SavedIndices(offloaded=(2,), tier="disk")) == "<spill saves [2], keep the rest>"


def _offloader(decoder: Decoder, x: Tensor) -> DeviceOffloader:
    found = offloader_of(Decision.SPILL_AS_PLANNED, owner_of(decoder)).by_device[x.device]
    assert found is not None, "something left"
    return found


def test_what_leaves_is_seen_out_before_the_backward_of_a_last_block_that_moves_nothing(
    decoder: Decoder, x: Tensor, profile: rekindle.Profile
) -> None:
    moving = next(
        o
        for o in profile.blocks[0].candidates
        if isinstance(o.strategy, SavedIndices) and o.bytes_moved
    )
    keep = next(o for o in profile.blocks[0].candidates if o.strategy == Keep())
    options = [moving] * 5 + [keep]
    plan = plan_by(profile, 0, options, simulate(profile, options), 0.0)
    rekindle.apply(decoder, plan)
    out = decoder(x)
    offloader = _offloader(decoder, x)
    found = []

    def note(_grad: Tensor) -> None:
        assert offloader._step is not None, "something left"
        found.append(offloader._step.backward_started)

    decoder.blocks[5].mlp.down.weight.register_hook(note)  # the first of the last block's backward
    assert offloader._step is not None, "something left"
    assert not offloader._step.backward_started
    out.sum().backward()
    assert found == [True]


def test_disk_is_given_back_when_the_plan_is_removed(
    decoder: Decoder, x: Tensor, profile: rekindle.Profile
) -> None:
    rekindle.fit(decoder, x, "60%", profile=_spilling(profile))
    gradients(decoder, x)
    with rekindle.observe() as seen:
        gradients(decoder, x)
    assert seen.spill.pool_bytes > 0
    offloader = _offloader(decoder, x)
    rekindle.remove(decoder)
    assert offloader.tier.pool_bytes == 0


def test_a_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(rekindle.OffloadError, match=r"temporary files, .*none, to see how fast"):
        rekindle.profile(Stack(2), torch.randn(4, 8), spill=True)


def test_a_cpu_has_a_link_to_disk_alone() -> None:
    assert link_bandwidth(torch.device("cpu"), "host") == 0
    assert link_bandwidth(torch.device("cpu"), "disk") > 0


def test_a_profile_without_disk_does_not_do(decoder: Decoder, x: Tensor) -> None:
    profile = rekindle.profile(decoder, x)
    with pytest.raises(ValueError, match="the profile was measured without it"):
        rekindle.fit(decoder, x, "60%", profile=profile, spill=True)


def test_where_there_is_no_disk_to_measure_it_is_refused() -> None:
    with pytest.raises(ValueError, match="spill=True is for a real device"):
        rekindle.profile(Stack(2), torch.randn(4, 8), device="meta", like="H100", spill=True)


def test_what_is_no_bool_is_refused() -> None:
    with pytest.raises(TypeError, match="spill should be True or False, but got str"):
        rekindle.profile(Stack(2), torch.randn(4, 8), spill="/tmp")  # type: ignore[arg-type]


# --- The input of a block ------------------------------------------------------------------------


def moving_the_input(profile: rekindle.Profile) -> list[Candidate]:
    """The candidates of the last block that move its input, those that move it alone first."""
    found = [each for each in profile.blocks[-1].candidates if each.moves_input]
    return sorted(found, key=lambda each: each.bytes_moved)


def test_the_input_of_a_block_moves_where_the_block_recomputes_from_it(
    profile: rekindle.Profile, x: Tensor
) -> None:
    candidate = moving_the_input(profile)[0]
    assert (candidate.bytes_moved, candidate.input_freed) == (x.nbytes, x.nbytes)
    assert "spill the input" in candidate.describe()
    assert not any(each.moves_input for each in profile.blocks[-1].candidates[:2])


def test_a_block_whose_input_moves_has_the_gradients_of_a_plain_step(
    decoder: Decoder, x: Tensor, profile: rekindle.Profile
) -> None:
    """The first input is the caller's, and two stay, because backward wants them first."""
    expected = gradients(decoder, x)
    for candidate in (moving_the_input(profile)[0], moving_the_input(profile)[-1]):
        rekindle.apply(decoder, candidate.strategy)
        for _ in range(3):  # unknown, seen once, known
            with rekindle.observe() as seen:
                found = gradients(decoder, x)
            assert all(map(same_bits, found, expected))
            assert seen.spill.bytes_out >= (len(profile.order) - 3) * x.nbytes
        rekindle.remove(decoder)


def test_a_step_whose_inputs_move_peaks_as_predicted_and_lower(
    decoder: Decoder, x: Tensor, profile: rekindle.Profile
) -> None:
    lean = replace(profile, bytes_per_second=1e15)  # nobody waits for the disk in a test
    moving = moving_the_input(profile)[0]
    count = len(profile.order)
    staying = [
        replace(
            moving,
            strategy=replace(
                moving.strategy, policy=replace(moving.strategy.policy, moves_input=False)
            ),
            bytes_moved=0,
            largest_moved=0,
            input_freed=0,
            backward_peak=moving.backward_peak - moving.bytes_moved,
        )
    ] * count
    mixed = [*([moving] * (count - 2)), *staying[:2]]
    step = TrainingStep(decoder, (x,))
    peaks = []
    for options in (staying, mixed):
        plan = plan_by(lean, 0, options, simulate(lean, options), 0.0)
        peaks.append((measure_step(step, plan, lean).peak, plan.predicted_peak))
    assert peaks[0][0] - peaks[1][0] >= x.nbytes
    assert all(abs(measured - predicted) <= x.nbytes for measured, predicted in peaks)
