"""Who owns an offloader, its file and its threads, and when they are freed."""

import copy
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import Offload
from rekindle.offload.owners import _MAX_RECENT, shared_offloaders
from rekindle.offload.tiers.workers import workers
from rekindle.strategy import SavedIndices
from tests.spilling import SECONDS, chain, leaf, open_files, outcome, plain_gradient
from tests.toys import same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders")


def disk(directory: Path, quota: float = 1.0) -> Offload:
    return rekindle.offload(tier="disk", quota=quota, min_bytes=1, directory=directory)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def settle() -> None:
    workers.wait_until_idle(SECONDS)
    assert workers.count == 0


def test_a_new_quota_each_step_leaves_four_files_open_and_no_thread(tmp_path: Path) -> None:
    x = leaf()
    expected = plain_gradient(x)
    settle()
    before = threads()
    for quota in range(100_000, 100_040):
        with disk(tmp_path, quota):
            loss = chain(x)
        (found,) = torch.autograd.grad(loss, x)
        del loss
        assert same_bits(found, expected)
        assert threads() <= before + 4
    settle()
    assert _MAX_RECENT == 4
    assert len(shared_offloaders()) == 4
    assert len(open_files(os.getpid(), tmp_path)) == 4
    assert threads() == before


def test_an_offloader_dies_with_the_context_that_holds_it_once_others_were_used(
    tmp_path: Path,
) -> None:
    x = leaf()
    held = disk(tmp_path, 0.99)
    for offload in [held, *(disk(tmp_path, 0.1 * i) for i in range(1, 6))]:
        with offload:
            loss = chain(x)
        loss.backward()
        del loss
    assert len(shared_offloaders()) == 5  # `held` is not among the four used last
    held.trim()
    del offload, held
    assert len(shared_offloaders()) == 4


def test_what_an_offloader_holds_stays_readable_when_its_owner_is_gone(
    tmp_path: Path,
) -> None:
    x = leaf()
    with disk(tmp_path, 0.99):
        loss = chain(x)
    for i in range(1, 6):
        with disk(tmp_path, 0.1 * i):
            chain(x)
    assert len(shared_offloaders()) == 5  # the graph has it, and nothing else
    settle()
    (found,) = torch.autograd.grad(loss, x)
    assert same_bits(found, plain_gradient(x))
    del loss
    assert len(shared_offloaders()) == 4


def test_a_loop_that_makes_its_context_every_step_goes_on_learning(tmp_path: Path) -> None:
    x = leaf()
    for _ in range(3):
        with disk(tmp_path):
            loss = chain(x)
        loss.backward()
        del loss
    (offloader,) = shared_offloaders()
    (found,) = offloader.by_device.values()
    assert found is not None
    assert [known.is_timed for known in found._learned.known] == [True]


def test_a_model_that_spills_gives_its_file_back_when_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    rekindle.apply(model, {"": "spill"})
    model(torch.randn(1024, 512)).sum().backward()
    settle()
    assert len(open_files(os.getpid(), tmp_path)) == 1
    rekindle.remove(model)
    assert open_files(os.getpid(), tmp_path) == []


class Chain(nn.Module):
    """A model that saves `depth` activations of `width` numbers, beside its input."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.depth = depth

    def forward(self) -> Tensor:
        return chain(self.scale, self.depth)


def chains() -> list[nn.Module]:
    """Three models: the last two begin as the first one does, and have more or wider layers."""
    return [Chain(1024, 6), Chain(1024, 11), Chain(2048, 6)]


def steps_of(*models: nn.Module, count: int = 4) -> list[list[tuple[int, ...]]]:
    """Train models in turns, all forwards before all backwards; what each model's steps counted."""
    found: list[list[tuple[int, ...]]] = [[] for _ in models]
    for _ in range(count):
        forwards, losses = [], []
        for model in models:
            with rekindle.observe() as seen:
                losses.append(model())
            forwards.append(seen.spill)
        for counts, out in zip(found, forwards, strict=True):
            with rekindle.observe() as seen:
                losses.pop(0).backward()
            back = seen.spill
            counts.append((out.tensors_out, out.bytes_out, back.prefetch_hits, back.tensors_in))
    return found


STRATEGIES: list[Any] = [
    rekindle.offload(tier="disk", quota=1.0, min_bytes=1),
    rekindle.offload(tier="disk", quota=16_384, min_bytes=1),
    rekindle.policies.spill(),
    SavedIndices(offloaded=tuple(range(20)), tier="disk"),
]


@pytest.mark.usefixtures("written_at_once")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_models_in_turns_with_equal_strategies_each_learn_their_own_steps(strategy: Any) -> None:
    alone = []
    for model in chains():
        rekindle.apply(model, {"": strategy})
        alone += steps_of(model)
    assert all(counts[-1][0] for counts in alone), "something leaves"
    models = chains()
    for model in models:
        rekindle.apply(model, {"": strategy})
    assert steps_of(*models) == alone


@pytest.mark.usefixtures("written_at_once")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_learns_its_own_steps(strategy: Any, copied: Any) -> None:
    model = nn.Sequential(Chain(1024, 6))
    rekindle.apply(model, {"0": strategy})
    alone = steps_of(model[0])
    assert steps_of(model[0], copied(model)[0]) == [*alone, *alone]


@pytest.mark.usefixtures("written_at_once")
def test_a_model_that_is_given_the_same_strategy_again_goes_on_with_what_it_learnt() -> None:
    model = Chain(1024, 11)
    strategy = rekindle.offload(tier="disk", quota=0.3, min_bytes=1)
    rekindle.apply(model, {"": strategy})
    first, *_, last = steps_of(model)[0]
    assert (first[0], last[0]) == (2, 3)
    rekindle.apply(model, {"": strategy})
    assert steps_of(model, count=1) == [[last]]


def spilling_models(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Two models that have each spilled a step into a folder."""
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    models = [nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))) for _ in range(2)]
    for model in models:
        rekindle.apply(model, {"": "spill"})
        model(torch.randn(1024, 512)).sum().backward()
    settle()
    return models


def test_each_model_has_a_file_and_gives_it_back_when_its_strategies_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for model in spilling_models(tmp_path, monkeypatch):
        files.append(len(open_files(os.getpid(), tmp_path)))
        rekindle.remove(model)
    files.append(len(open_files(os.getpid(), tmp_path)))
    assert files == [2, 1, 0]


def test_a_model_that_dies_takes_its_file_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = spilling_models(tmp_path, monkeypatch)
    del models[0]
    gc.collect()
    assert len(open_files(os.getpid(), tmp_path)) == 1


def test_another_strategy_frees_the_file_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = spilling_models(tmp_path, monkeypatch)
    rekindle.apply(model, {"": "recompute"})
    assert len(open_files(os.getpid(), tmp_path)) == 1


def test_trim_of_a_context_gives_back_what_models_set_aside_by_equal_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = spilling_models(tmp_path, monkeypatch)
    rekindle.offload(tier="disk", quota=0.5).trim()
    assert len(open_files(os.getpid(), tmp_path)) == 2
    rekindle.offload(tier="disk", quota=1.0).trim()
    assert open_files(os.getpid(), tmp_path) == []
    del models


_FORKED = """
    loss = spill.forward(x)
    spill.settle()
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(tell)
        os.read(told, 1)  # as a worker of a DataLoader: alive until its parent ends
        os._exit(0)
    torch.autograd.grad(loss, x)
    del loss
    spill.settle()
    sizes = [file.st_size for file in open_files(child, sys.argv[1])]
    {gives_back}
    sizes += [file.st_size for file in open_files(child, sys.argv[1])]
    os.close(tell)
    print(sizes, os.wait()[1])
"""


@pytest.mark.parametrize("gives_back", ["spill.offload.trim()", "del spill; _recent.clear()"])
def test_disk_is_given_back_although_a_forked_process_has_the_file_open(
    tmp_path: Path, gives_back: str
) -> None:
    text = "    from rekindle.offload.owners import _recent" + _FORKED.format(gives_back=gives_back)
    assert outcome(text, tmp_path) == (0, "[24576, 0] 0", "")


def test_a_forked_process_that_lets_go_of_the_file_leaves_its_bytes_alone(tmp_path: Path) -> None:
    text = """
        import gc
        from rekindle.offload.owners import _recent
        expected = plain_gradient(x)
        loss = spill.forward(x)
        spill.settle()
        if not os.fork():
            spill.offload.trim()
            del spill, loss
            _recent.clear()
            gc.collect()
            os._exit(len(open_files(os.getpid(), sys.argv[1])))
        print(os.wait()[1], torch.equal(torch.autograd.grad(loss, x)[0], expected))
    """
    assert outcome(text, tmp_path) == (0, "0 True", "")
