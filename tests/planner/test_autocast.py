"""Plans under autocast: what is kept is what the plan names, and casts of weights are counted."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle.modules.caches import no_caches
from rekindle.planner.devices import device_named
from rekindle.planner.instruments.memory_meter import LiveBytes
from rekindle.planner.op_words import word_of
from rekindle.planner.plan_for_budget import plan_by
from rekindle.planner.timeline import simulate
from rekindle.planner.trace.block_trace import record
from rekindle.planner.types import BlockTrace, Candidate
from rekindle.regions import saved_indices
from rekindle.regions.selective.decisions import Decision
from rekindle.regions.selective.planned_ops import NumberedOpsPolicy, policy_of
from rekindle.regions.selective.tensor_table import TensorTable
from rekindle.strategy import NumberedOps, OpAddress, PlannedOps, SavedIndices, Selective
from tests.toys import same_bits

pytest.importorskip("scipy")


class Layer(nn.Module):
    """Attention by hand, whose input is cast by two products, and an MLP; with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
        x = x + self.drop(weights @ x)
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Layers between an embedding and a head, with the loss inside; each may be called twice."""

    def __init__(self, layers: int = 3, calls: int = 1) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(200, 64), nn.Linear(64, 200)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.calls = calls

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for _ in range(self.calls):
            for layer in self.layers:
                x = layer(x)
        logits = self.head(x).flatten(0, 1).float()
        return functional.cross_entropy(logits, input_ids.flatten())


@dataclass
class Case:
    model: nn.Module
    batch: Any
    forwards: int = 1
    """In one autocast, one after the other."""

    def __call__(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.stack([self._loss() for _ in range(self.forwards)]).sum()

    def _loss(self) -> Tensor:
        if isinstance(self.batch, Tensor):
            return self.model(self.batch)  # type: ignore[no-any-return]
        return self.model(**self.batch).loss  # type: ignore[no-any-return]


IDS = torch.randint(0, 200, (4, 64), generator=torch.Generator().manual_seed(0))


def by_hand() -> Case:
    return Case(Model(), IDS)


def called_twice() -> Case:
    return Case(Model(calls=2), IDS)


def two_forwards() -> Case:
    return Case(Model(), IDS, forwards=2)


def gpt2() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=200, n_positions=64, n_embd=64, n_layer=3, n_head=4, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    return Case(model, {"input_ids": IDS, "labels": IDS})


CASES = [by_hand, called_twice, two_forwards, gpt2]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return request.param()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def profile(case: Case) -> rekindle.Profile:
    return rekindle.profile(case.model, case)


def uniform(profile: rekindle.Profile, index: int) -> list[Candidate]:
    """Every block by one option of the largest menu, or by the one of its own that is alike."""
    largest = max((block.candidates for block in profile.blocks), key=len)
    wanted = largest[min(index, len(largest) - 1)]
    menus = (profile.candidates(i) for i in range(len(profile.order)))
    return [
        min(
            menu,
            key=lambda o: (
                type(o.strategy) is not type(wanted.strategy),
                abs(o.bytes_held - wanted.bytes_held),
            ),
        )
        for menu in menus
    ]


def menu_size(profile: rekindle.Profile) -> int:
    return max(len(block.candidates) for block in profile.blocks)


def test_a_step_under_autocast_peaks_where_its_plan_says(
    case: Case, profile: rekindle.Profile
) -> None:
    for index in range(menu_size(profile)):
        options = uniform(profile, index)
        found = simulate(profile, options)
        ratio = peak_of(case, options, profile) / found.peak
        by_part = isinstance(options[0].strategy, Selective | SavedIndices)
        assert ratio == pytest.approx(1.0, abs=0.02 if by_part else 0.025), options[0].describe()


def peak_of(case: Case, options: list[Candidate], profile: rekindle.Profile) -> int:
    """The peak of a step by some options, as it is measured."""
    plan = plan_by(profile, 0, options, simulate(profile, options), 0.0)
    rekindle.apply(case.model, plan)
    case().backward()  # the gradients are there from the first step on
    known = [*case.model.parameters(), *case.model.buffers(), IDS]
    known += [p.grad for p in case.model.parameters() if p.grad is not None]
    with LiveBytes(known) as live:
        case().backward()
    case.model.zero_grad()
    rekindle.remove(case.model)
    return profile.static_bytes + live.peak()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops whose results regions keep, as they run."""
    ops: list[str] = []
    hold_after_op = TensorTable.hold_after_op

    def spy(table: TensorTable, tensor: Tensor, value: Any, maker: Any, *rest: Any) -> None:
        ops.append(maker.name())
        hold_after_op(table, tensor, value, maker, *rest)

    monkeypatch.setattr(TensorTable, "hold_after_op", spy)
    return ops


def test_what_is_kept_in_a_step_under_autocast_is_what_the_plan_names(
    case: Case, profile: rekindle.Profile, kept: list[str]
) -> None:
    menu = [
        o
        for o in profile.blocks[0].candidates
        if isinstance(o.strategy, Selective) and o.strategy.policy.kept
    ]
    assert len(profile.blocks) == 1
    assert menu
    for option in menu:
        options = [option] * len(profile.order)
        plan = plan_by(profile, 0, options, simulate(profile, options), 0.0)
        rekindle.apply(case.model, plan)
        kept.clear()
        case()
        rekindle.remove(case.model)
        named = [address.op for address in option.strategy.policy.kept]
        for op in set(named) | set(kept):
            results = _RESULTS.get(op, 1)
            assert kept.count(op) == named.count(op) * len(options) * results
        assert sorted(map(word_of, named)) == sorted(option.kept_names)


_RESULTS = {"aten::native_layer_norm": 3}
"""Ops with more results than one."""


def test_what_is_derived_in_a_step_under_autocast_is_what_the_plan_says(
    case: Case, profile: rekindle.Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[tuple[int, ...], int]] = []
    leave = saved_indices.SavedIndicesRegion.__exit__

    def spy(region: saved_indices.SavedIndicesRegion, *error: object) -> None:
        leave(region, *error)
        found.append((tuple(region.recomputed), region.saved))

    monkeypatch.setattr(saved_indices.SavedIndicesRegion, "__exit__", spy)
    for option in profile.blocks[0].candidates:
        if isinstance(option.strategy, SavedIndices):
            rekindle.apply(case.model, {path: option.strategy for path, _ in profile.order})
            found.clear()
            with no_caches(case.model):
                case()
            rekindle.remove(case.model)
            saved = (option.strategy.recomputed, option.strategy.count)
            looks = bool(option.strategy.recomputed)  # at what is saved: modules need no index
            assert found == [saved] * len(profile.order) * looks


def gradients(case: Case) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(case(), list(case.model.parameters())))


def test_gradients_under_autocast_are_those_of_a_plain_step(
    case: Case, profile: rekindle.Profile
) -> None:
    expected = gradients(case)
    for index in range(menu_size(profile)):
        options = uniform(profile, index)
        plan = plan_by(profile, 0, options, simulate(profile, options), 0.0)
        rekindle.apply(case.model, plan)
        assert all(map(same_bits, gradients(case), expected))
        rekindle.remove(case.model)


def test_a_plan_finds_its_ops_again_after_it_was_saved(
    profile: rekindle.Profile, tmp_path: Any
) -> None:
    profile.save(tmp_path / "profile.json")
    assert rekindle.Profile.load(tmp_path / "profile.json") == profile


@dataclass
class Branching:
    """The traces of a block, from call to call."""

    doubles: bool = False
    elsewhere: bool = False


class Block(nn.Module):
    """A block that may run other ops, or the same ones in another module, than it was planned."""

    def __init__(self, does: Branching) -> None:
        super().__init__()
        self.one, self.other = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Tanh()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        if self.does.doubles:
            x = x.tanh()
        if self.does.elsewhere:
            return self.other(self.one[0](x)).exp()  # type: ignore[no-any-return]
        return self.one(x).exp()  # type: ignore[no-any-return]


def graph_of(block: nn.Module, x: Tensor) -> BlockTrace:
    return record(lambda: block(x), device_named("cpu"), block)


@pytest.mark.parametrize("change", ["doubles", "elsewhere"])
def test_a_block_that_runs_other_ops_says_that_its_plan_no_longer_matches(
    change: str, kept: list[str]
) -> None:
    does = Branching()
    block, x = Block(does), torch.randn(4, 8, requires_grad=True)
    plain = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    (tanh,) = [op.address for op in graph_of(block, x).ops if op.name == "aten::tanh"]
    assert tanh == OpAddress("one.1", "aten::tanh", 0, 1)
    rekindle.apply(block, {"": policy_of(PlannedOps((tanh,)))})
    assert all(map(same_bits, torch.autograd.grad(block(x).sum(), [x, *block.parameters()]), plain))
    assert kept == ["aten::tanh"]
    setattr(does, change, True)
    with pytest.warns(UserWarning, match="The plan no longer matches a Block: it was made for "):
        block(x)
    kept.clear()
    out = block(x)  # said once
    assert kept == []  # rather than the wrong result
    found = torch.autograd.grad(out.sum(), [x, *block.parameters()])
    rekindle.remove(block)
    assert all(map(same_bits, found, torch.autograd.grad(block(x).sum(), [x, *block.parameters()])))


def test_a_plan_of_an_older_file_goes_by_numbers() -> None:
    policy = policy_of(NumberedOps((1,)))
    assert isinstance(policy, NumberedOpsPolicy)


def test_a_block_that_saves_other_tensors_says_that_its_plan_no_longer_matches() -> None:
    does = Branching()
    block, x = Block(does), torch.randn(4, 8, requires_grad=True)
    saves = len(graph_of(block, x).saved_tensors)
    rekindle.apply(block, {"": SavedIndices(count=saves)})
    block(x)
    does.doubles = True
    with torch.no_grad():
        block(x)
    with pytest.warns(UserWarning, match=f"autograd saved {saves} tensors there, and now"):
        block(x)
    block(x)  # said once
    rekindle.remove(block)


def test_a_block_in_evaluation_is_not_compared_with_its_plan() -> None:
    does = Branching()
    block, x = Block(does), torch.randn(4, 8, requires_grad=True)
    (tanh,) = [op.address for op in graph_of(block, x).ops if op.name == "aten::tanh"]
    assert tanh is not None
    policy = policy_of(PlannedOps((tanh,)))
    rekindle.apply(block, {"": policy})
    does.doubles = True
    block.eval()(x)
    assert policy.by_address
    rekindle.remove(block)


def test_casts_count_where_autocast_is_around_the_whole_step() -> None:
    torch.manual_seed(0)
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS).backward()  # casts are cached before the step is profiled
        profile = rekindle.profile(model, IDS)
        plan = rekindle.fit(model, IDS, "90%", profile=profile)
    rekindle.remove(model)
    assert profile.casts_in_backward
    assert plan.measured_peak is not None
    assert plan.measured_peak == pytest.approx(plan.predicted_peak, rel=0.02)


def test_a_plan_is_not_asked_twice_about_an_op_that_it_does_not_name() -> None:
    block, x = Block(Branching()), torch.randn(4, 8, requires_grad=True)
    (tanh,) = [op.address for op in graph_of(block, x).ops if op.name == "aten::tanh"]
    assert tanh is not None
    policy = policy_of(PlannedOps((tanh,)))
    rekindle.apply(block, {"": policy})
    block(x)
    decided = {traits.name: traits.decision for traits in policy.op_traits.values()}
    assert decided.pop("aten::tanh") is None
    assert {*decided.values()} <= {Decision.RECOMPUTE, None}
    assert decided["aten::exp"] is Decision.RECOMPUTE
    rekindle.remove(block)
