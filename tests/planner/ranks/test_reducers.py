"""`fit` where gradients are reduced or sharded: training goes on as if it had not been called."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rekindle
from rekindle.torch_private import fsdp
from tests.ranks import RankResults, results_of_worker
from tests.toys import same_bits

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)
pytest.importorskip("scipy")

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parallel import DistributedDataParallel

from rekindle.planner.placement import compute_device
from tests.planner.ranks import reducers_worker as worker


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """The results of both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return results_of_worker("tests.planner.ranks.reducers_worker", folder)


@pytest.mark.parametrize("how", ["wrapper", "module", "function", "replicate"])
def test_ranks_stay_together_after_fit_with_a_static_graph(results: RankResults, how: str) -> None:
    """The backwards of planning are not the first iteration, by which DDP counts its hooks."""
    assert results.of(f"static graph, {how}") == [True, True]


def test_ranks_stay_together_after_a_trainer_has_planned_with_a_static_graph(
    results: RankResults,
) -> None:
    if not worker.has_trainer():
        pytest.skip("needs transformers and accelerate")
    assert results.of("trainer") == [True, True]


@pytest.mark.parametrize("case", ["static graph between steps", "bucket views"])
def test_gradients_of_the_last_step_are_kept_by_fit(results: RankResults, case: str) -> None:
    assert results.of(case) == [True, True]


@pytest.mark.parametrize(
    "case",
    [
        "accumulation in bucket views",
        "accumulation in a static graph",
        "sharded accumulation",
        "sharded accumulation, gathered",
        "sharded accumulation, one unit",
        "sharded accumulation, mixed precision",
        "hybrid accumulation",
        "tensor-parallel accumulation",
    ],
)
def test_fit_in_the_middle_of_accumulation_keeps_every_gradient(
    results: RankResults, case: str
) -> None:
    assert results.of(case) == [True, True]


@pytest.mark.parametrize("case", ["PowerSGD, first", "PowerSGD, later", "all-reduce hook"])
def test_comm_hooks_with_state_are_not_advanced_by_planning(
    results: RankResults, case: str
) -> None:
    assert results.of(case) == [True, True]


@pytest.mark.parametrize("kind", ["sharded", "tensor parallel"])
def test_what_is_always_there_counts_by_local_bytes(results: RankResults, kind: str) -> None:
    for found in results.of(f"static, {kind}"):
        assert found["bare"] == 2 * found["own"] + found["batch"]
        assert found["first"] == found["later"] == 4 * found["own"] + found["batch"]


def test_a_sharded_step_that_fits_is_left_as_it_is(results: RankResults) -> None:
    """Gathered parameters count while they are gathered: not all units' at a time."""
    for found in results.of("peaks"):
        assert found["options"] == ["Keep"] * worker.BLOCKS
        assert abs(found["measured"] - found["step"]) <= found["unit"]


def test_the_worst_rank_decides_on_a_budget_that_is_a_share(results: RankResults) -> None:
    first, second = results.of("shares")
    assert first == second
    assert first["measured"] <= first["budget"] == first["of the largest"]


# On one rank


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def wrapped(kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(worker.net(), gradient_as_bucket_view=True)
    return worker.sharded()


@pytest.mark.parametrize("inside", [False, True], ids=["wrapper", "module"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_planning_again_in_the_middle_of_accumulation_keeps_every_gradient(
    kind: str, inside: bool, one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Under FSDP2 it is refused, as parameters are gathered for the call that is running."""

    def gradients(fit: bool) -> list[Tensor]:
        model: Any = wrapped(kind)
        inner = model.module if inside and kind == "ddp" else model
        if fit:
            rekindle.fit(inner, torch.randn(8, worker.DIM), "1GiB", loss=worker.loss)
        worker.train(model, 2)
        if kind == "fsdp":
            model.set_requires_gradient_sync(False)
        with caplog.at_level("WARNING", "rekindle"):
            worker.backward(model, 7)  # larger than what was planned for
        if kind == "fsdp":
            model.set_requires_gradient_sync(True)
        worker.backward(model, 8)
        return worker.values_of(model)

    assert all(map(same_bits, gradients(False), gradients(True)))
    told = [record.getMessage() for record in caplog.records if record.name == "rekindle"]
    assert len(told) == 1
    assert ("planned again. A step" in told[0]) == (kind == "ddp")
    assert ("its parameters are sharded" in told[0]) == (kind == "fsdp")


def test_a_wrapper_and_its_parameters_end_as_they_were(one_rank: None) -> None:
    model = DistributedDataParallel(worker.net(), static_graph=True)
    parameters, attributes = list(model.parameters()), dict(vars(model))
    with pytest.raises(ZeroDivisionError):
        rekindle.fit(model, torch.randn(8, worker.DIM), "80%", loss=lambda _: 1 / 0)
    rekindle.profile(model, torch.randn(8, worker.DIM), loss=worker.loss)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert vars(model) == attributes


def test_a_sharded_model_ends_as_it_was(one_rank: None) -> None:
    model = worker.sharded()
    model.set_requires_gradient_sync(False)
    parameters = list(model.parameters())
    groups = fsdp.sharded_groups(model)

    def settings() -> list[Any]:
        return [(group.reduce_grads, group.all_reduce_grads, group.is_sharded) for group in groups]

    before = settings()
    rekindle.profile(model, torch.randn(8, worker.DIM), loss=worker.loss)
    assert settings() == before == [(False, False, True)] * (worker.BLOCKS + 1)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [p.grad for p in parameters] == [None] * len(parameters)


class Tied(nn.Module):
    """Two blocks with one weight, which is held outside of `parameters()` too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.rnn = nn.GRU(8, 8)
        vars(self)["shortcut"] = self.blocks[0][0].weight
        self.listed = [self.blocks[0][0].weight]
        self.named = {"bias": self.blocks[0][0].bias}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.rnn(x @ self.shortcut @ self.listed[0] + self.named["bias"])[0]


def test_a_weight_that_is_held_in_several_places_reaches_no_reducer(one_rank: None) -> None:
    model = DistributedDataParallel(Tied())
    counts: list[int] = []
    for parameter in model.parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: counts.append(1))  # as those of libraries that reduce
    rekindle.fit(model, torch.randn(4, 8), "1GiB", loss=worker.loss)
    assert counts == []
    model(torch.randn(4, 8)).sum().backward()
    assert len(counts) == len(list(model.parameters()))


# Where a model computes


def test_the_device_is_where_the_mesh_of_a_parameter_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FSDP2's `CPUOffloadPolicy`, shards rest in host memory and are gathered on a GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    mesh = DeviceMesh("cuda", torch.tensor([0]), _init_backend=False, _rank=0)
    model = nn.Linear(2, 2, bias=False)
    assert compute_device(model) == torch.device("cpu")
    meta = TensorMeta(torch.Size((2, 2)), (2, 1), torch.float32)
    spec = DTensorSpec(mesh, (Replicate(),), meta)
    model.weight = nn.Parameter(DTensor(torch.ones(2, 2), spec, requires_grad=False))
    assert compute_device(model) == torch.device("cuda", 3)


@pytest.mark.gpu
def test_the_device_is_the_accelerator_of_a_model_that_is_partly_on_the_host() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2, device="cuda:0"))
    assert compute_device(model) == torch.device("cuda", 0)


@pytest.fixture
def one_gpu_rank() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_a_model_whose_shards_rest_on_the_host_is_planned_for_the_gpu(one_gpu_rank: None) -> None:
    def train(fits: bool) -> tuple[list[Tensor], rekindle.Plan | None]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
                for _ in range(6)
            ]
        )
        for block in model:
            fully_shard(block, offload_policy=CPUOffloadPolicy())
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        x, plan = torch.randn(4096, 256, device="cuda"), None
        optimizer = torch.optim.AdamW(model.parameters())
        if fits:
            plan = rekindle.fit(model, x, "70%", loss=worker.loss, optimizer=optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            worker.loss(model(x)).backward()
            optimizer.step()
        return worker.values_of(model), plan

    expected, _ = train(False)
    found, plan = train(True)
    assert all(map(same_bits, expected, found))
    assert plan is not None
    assert plan.device == torch.cuda.get_device_name()
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak
