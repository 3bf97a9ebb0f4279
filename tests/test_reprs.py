"""`repr` of public values: one line, whatever is in them."""

import torch

import rekindle
from rekindle import Counts, Device, Observation, Traffic
from rekindle.planner.devices import DEVICES
from rekindle.planner.types import BlockProfile, Candidate, Profile
from rekindle.strategy import Keep
from tests.planner.random_profiles import layers
from tests.planner.test_frontier import FRONTIER, POINTS


def test_a_plan_names_its_model_peak_time_and_what_blocks_do() -> None:
    assert repr(POINTS[1].plan) == (
        "<Plan for Toy: 3 GiB of 3 GiB, 1.04x the time; 1 keep, 2 keep+offload>"
    )


def test_a_profile_names_its_model_and_blocks() -> None:
    assert repr(layers(128, 2)) == "<Profile of Llama on none: 128 blocks, 2 distinct>"


def test_a_frontier_names_both_its_ends() -> None:
    assert repr(FRONTIER) == (
        "<Frontier of Toy: 3 points, 4 GiB to 1 GiB, 1.00x to 1.50x the time>"
    )


def test_a_point_is_its_peak_and_time() -> None:
    assert repr(POINTS[2]) == "<Point: 1 GiB, 150.0 ms, 1.50x the time>"


def test_a_candidate_is_its_description_and_costs() -> None:
    assert repr(Candidate(Keep(), 2**20, forward_seconds=1e-3)) == (
        "<Candidate: keep: 1 MiB held, 1.00 ms>"
    )


def test_the_profile_of_a_block_names_its_class() -> None:
    block = BlockProfile("Block", "signature", (Candidate(Keep()),))
    assert repr(block) == "<BlockProfile of Block: 1 candidate>"


def test_a_device_names_its_speed_and_memory() -> None:
    assert repr(DEVICES["H100"]) == ("<Device H100: 989 TFLOP/s in bfloat16, 80 GiB at 3350 GB/s>")


def test_counts_are_code_without_zeros() -> None:
    assert repr(Counts(forwards=2, bytes_held=5)) == "Counts(forwards=2, bytes_held=5)"
    assert eval(repr(Counts(replays=1))) == Counts(replays=1)
    assert repr(Traffic(bytes_in=3)) == "Traffic(bytes_in=3)"


def test_an_observation_sums_up_what_it_saw() -> None:
    x = torch.ones(256, requires_grad=True)
    with rekindle.observe() as seen:
        rekindle.checkpoint(torch.sin, x).sum().backward()
    assert repr(seen) == "<Observation: 1 region, 1 forward, 1 replay, 1 KiB held>"
    assert repr(Observation()) == "<Observation: 0 regions, 0 forwards, 0 replays>"


def test_every_class_of_values_has_a_repr_of_its_own() -> None:
    for kind in (rekindle.Plan, Profile, rekindle.Frontier, rekindle.Point, Device):
        assert "__repr__" in vars(kind)
