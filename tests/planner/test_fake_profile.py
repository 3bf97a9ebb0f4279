"""Profiles without an accelerator and without memory: the bytes of a measured one, known times."""

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from benchmarks.decoder import Decoder, Shape
from rekindle.modules.forward import forward_of
from rekindle.planner.devices import DEVICES, Device, Efficiency, OpClock, device_named, device_of
from rekindle.planner.measure.measure_step import measure_step
from rekindle.planner.plan_for_budget import plain_prediction
from rekindle.planner.trace.fake_tensors import with_fake_tensors
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import BlockTrace, Candidate
from rekindle.strategy import Keep, NumberedOps, Recompute, Selective
from tests.planner.test_fit import CASES, Case, step, unchanged
from tests.toys import Block, Stack, same_bits

pytest.importorskip("scipy")


def gpt2() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=4, use_cache=False
    )
    config.bos_token_id = config.eos_token_id = None
    config.loss_type = "ForCausalLMLoss"
    tokens = torch.randint(64, (2, 16))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


def padded_gpt2() -> Case:
    model, batch = gpt2()
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -3:] = 0
    return model, {**batch, "attention_mask": mask}


def decoder() -> Case:
    """Heads that share keys, and a rotary table that is a buffer larger than what is copied."""
    shape = Shape("test", dim=64, ffn=96, heads=2, kv_heads=1, layers=2, batch=1, tokens=600)
    return Decoder(shape, dtype=torch.float32), shape.hidden_states(dtype=torch.float32)


def that_learns() -> Case:
    return Stack(3, 16, 0.1), torch.randn(64, 16, requires_grad=True)


def torch_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(2, 16, 32)


def frozen_in_half() -> Case:
    model = Stack(4, 16, 0.1).to(torch.bfloat16)
    model.blocks[:2].requires_grad_(False)
    return model, torch.randn(64, 16, dtype=torch.bfloat16)


class Recurrent(nn.Module):
    """Its weights are known by another way than as parameters, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.cell(x)[0]
        return out


def recurrent() -> Case:
    return nn.Sequential(*(Recurrent() for _ in range(2))), torch.randn(4, 2, 16)


class Shifted(nn.Module):
    """Its gradients are views of others: one that it shares, and one number for all places."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.repeated = (nn.Parameter(torch.randn(64, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shared).exp() + self.shared + self.repeated.sum()


def shifted() -> Case:
    return nn.Sequential(*(Shifted() for _ in range(2))), torch.randn(64, 16)


EVERY = {
    **CASES,
    **{
        case.__name__: case
        for case in (
            gpt2,
            padded_gpt2,
            decoder,
            that_learns,
            torch_encoder,
            frozen_in_half,
            recurrent,
            shifted,
        )
    },
}
every_case = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)


def every_third(graph: BlockTrace) -> list[frozenset[int]]:
    """Sets to keep that depend on no time, of what backward needs: the rest goes when it may."""
    needed = [op.number for op in graph.ops if graph.saved.issuperset(op.outputs)]
    return [frozenset(needed[start::3]) for start in range(3)]


@pytest.fixture
def same_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Menus have the same options, whatever the times are."""
    monkeypatch.setattr("rekindle.planner.keep_sets.keep_sets", every_third)
    monkeypatch.setattr("rekindle.planner.profile_model.undominated", list)


@pytest.fixture
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Menus are short, where a test is not about them: each option is run, fake or not."""
    monkeypatch.setattr(
        "rekindle.planner.keep_sets.keep_sets", lambda graph: every_third(graph)[:1]
    )


@cache
def imagined_stack() -> rekindle.Profile:
    """A profile for the tests that want one and not its making."""
    torch.manual_seed(0)
    return rekindle.profile(*that_learns(), device="meta", like="H200")


def without_times(profile: rekindle.Profile) -> list[Any]:
    """All there is of a profile but times, in pieces that are easily told apart."""
    return [
        replace(profile, rest_seconds=0.0, planning_peak=None, blocks=()),
        *(replace(block, candidates=()) for block in profile.blocks),
        *(
            replace(option, forward_seconds=0.0, backward_seconds=0.0, seconds_noise=0.0)
            for block in profile.blocks
            for option in block.candidates
        ),
    ]


@every_case
@pytest.mark.usefixtures("same_sets")
def test_all_but_times_is_as_measured(case: Callable[[], Case]) -> None:
    model, batch = case()
    measured = rekindle.profile(model, batch)
    imagined = rekindle.profile(model, batch, device="meta", like="cpu")
    assert without_times(imagined) == without_times(measured)
    assert len(imagined.blocks[0].candidates) >= 4


@every_case
@pytest.mark.usefixtures("few_sets")
def test_the_model_ends_as_it_was(case: Callable[[], Case]) -> None:
    model, batch = case()
    step(model, batch)
    with unchanged(model):
        rekindle.profile(model, batch, device="meta", like="H200")
    assert not any(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers()))


@pytest.mark.usefixtures("same_sets")
def test_a_model_on_the_meta_device_has_the_profile_of_a_real_one() -> None:
    model, batch = that_learns()
    real = rekindle.profile(model, batch, device="meta", like="H200")
    meta = rekindle.profile(model.to("meta"), batch.to("meta"), device="meta", like="H200")
    assert meta == real


@pytest.mark.usefixtures("same_sets")
def test_a_model_of_fake_tensors_has_the_profile_of_a_real_one() -> None:
    model, batch = that_learns()
    real = rekindle.profile(model, batch, device="meta", like="H200")
    with FakeTensorMode():
        twin, fake_batch = Stack(3, 16, 0.1), torch.randn(64, 16, requires_grad=True)
    assert rekindle.profile(twin, fake_batch, device="meta", like="H200") == real


def test_a_function_may_reach_tensors_on_the_meta_device() -> None:
    model, batch = that_learns()
    given = rekindle.profile(model, batch, device="meta", like="H200")
    model.to("meta")
    far = batch.detach().to("meta").requires_grad_()
    reached = rekindle.profile(model, lambda: model(far), device="meta", like="H200")
    assert reached.blocks == given.blocks
    assert far.grad is None


def test_a_function_that_reaches_what_learns_leaves_its_gradient_alone() -> None:
    model, batch = that_learns()
    batch.grad = before = torch.randn(64, 16)
    values = before.clone()
    rekindle.profile(model, lambda: model(batch), device="meta", like="H200")
    assert batch.grad is before
    assert same_bits(before, values)


def test_nothing_real_is_made_or_computed() -> None:
    """By what reaches the kernels, below the fake tensors."""

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
            real.extend(t.shape for t in made if not (t.is_meta or isinstance(t, FakeTensor)))
            return out

    real: list[torch.Size] = []
    model, batch = that_learns()
    with Listening():
        model(batch)
        assert real
        real.clear()
        rekindle.profile(model, batch, device="meta", like="H200")
    assert real == []


def test_times_are_the_same_every_time() -> None:
    model, batch = that_learns()
    profiles = [rekindle.profile(model, batch, device="meta", like="A100-80GB") for _ in range(2)]
    assert profiles[0] == profiles[1]


def test_a_profile_does_not_depend_on_when_the_garbage_collector_comes() -> None:
    model, batch = that_learns()
    thresholds = gc.get_threshold()
    found = []
    try:
        for threshold in (0, 40, 700):  # never, after each few objects, and as usual
            gc.set_threshold(threshold)
            found.append(rekindle.profile(model, batch, device="meta", like="A100-80GB"))
    finally:
        gc.set_threshold(*thresholds)
    assert found[0] == found[1] == found[2]


EVEN = Device(
    "even", 4e12, 2e12, 1e12, 1e9, link=0.0, memory_bytes=0, launch=1.0,
    efficiency=Efficiency(0.5, 0.25, 0.5, 0.5),
)  # fmt: skip
"""Half of 1 GB a second, a second for each op, 5e11 FLOP/s in float32."""
MIB = 2**20


def taken(run: Callable[[], Any], device: Device = EVEN) -> float:
    """Seconds by the table, without what launches take: these are a second each."""
    with FakeTensorMode(), OpClock(device) as clock:
        return clock.timed(run)


def test_an_op_without_a_formula_takes_what_its_bytes_take_and_a_launch() -> None:
    assert taken(lambda: torch.empty(MIB) + 1) == pytest.approx(1 + 8 * MIB / 5e8)


def test_a_product_takes_what_its_arithmetic_takes_in_its_type() -> None:
    def product(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: torch.empty(4096, 4096, dtype=dtype) @ torch.empty(4096, 4096, dtype=dtype)

    quick = replace(EVEN, memory=1e15, launch=0.0)
    flops = 2 * 4096**3
    assert taken(product(torch.float32), quick) == pytest.approx(flops / 5e11)
    assert taken(product(torch.bfloat16), quick) == pytest.approx(flops / 2e12)


def test_a_product_of_float32_is_quicker_where_its_precision_may_be_less() -> None:
    before = torch.get_float32_matmul_precision()
    quick = replace(EVEN, memory=1e15, launch=0.0)
    try:
        torch.set_float32_matmul_precision("high")
        found = taken(lambda: torch.empty(64, 64) @ torch.empty(64, 64), quick)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == pytest.approx(2 * 64**3 / 1e12)


def test_a_small_product_takes_what_its_bytes_take() -> None:
    found = taken(lambda: torch.empty(MIB, 1) @ torch.empty(1, 1))
    assert found == pytest.approx(1 + (8 * MIB + 4) / 5e8)


@pytest.mark.parametrize("share", [(False, 1.0), (True, 0.5)], ids=["all", "causal"])
def test_attention_takes_two_products_and_five_in_backward(share: tuple[bool, float]) -> None:
    causal, part = share
    quick = replace(EVEN, memory=1e18, launch=0.0)
    product = 2 * 2 * 4 * 64 * 64 * 8 / (1e12 * 0.25) * part
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 64, 8, requires_grad=True) for _ in range(3))
    out: list[Tensor] = []
    with q.fake_mode, OpClock(quick) as clock:  # type: ignore[attr-defined]
        forward = clock.timed(
            lambda: out.append(scaled_dot_product_attention(q, k, v, is_causal=causal))
        )
        backward = clock.timed(lambda: out[0].backward(torch.empty_like(out[0])))
    assert forward == pytest.approx(2 * product, rel=1e-3)
    assert backward == pytest.approx(5 * product, rel=1e-3)


def test_views_and_memory_that_nobody_writes_take_no_time() -> None:
    assert taken(lambda: torch.empty(8, 8).view(64)[3:].detach().t()) == 0.0


def test_what_is_picked_from_a_large_table_counts_and_not_the_table() -> None:
    def pick() -> None:
        nn.functional.embedding(torch.empty(1000, dtype=torch.long), torch.empty(MIB, 64))

    assert taken(pick) == pytest.approx(1 + 2 * 4 * 64 * 1000 / 5e8)


def test_a_replay_takes_as_long_as_the_ops_that_run_again() -> None:
    x = torch.randn(64, 16, requires_grad=True)
    found = rekindle.profile(Stack(3, 16), x, device="meta", like="cpu").blocks[0].candidates
    keep = next(option for option in found if option.strategy == Keep())
    again = next(option for option in found if option.strategy == Recompute())
    assert keep.forward_seconds == again.forward_seconds
    least = DEVICES["cpu"].launch
    assert again.backward_seconds - keep.backward_seconds > 3 * least
    # But for the residual's sum and the last product, which nobody needs again.
    assert again.backward_seconds - keep.backward_seconds <= keep.forward_seconds


@pytest.mark.usefixtures("few_sets")
def test_on_a_faster_device_a_step_takes_less() -> None:
    model = Stack(3, 16).to(torch.bfloat16)
    big = torch.empty(2**16, 16, dtype=torch.bfloat16, device="meta")
    seconds = [
        plain_prediction(rekindle.profile(model, big, device="meta", like=name)).seconds
        for name in ("T4", "A100-40GB", "A100-80GB", "H200")
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 4


def test_a_device_with_a_link_has_options_that_offload() -> None:
    model, batch = that_learns()
    profile = rekindle.profile(model, batch, device="meta", like="H100")
    assert profile.bytes_per_second == 64e9 * 0.85
    moved = [option for option in profile.blocks[0].candidates if option.tier]
    assert moved
    assert all(option.bytes_moved > 0 for option in moved)


def test_a_device_without_a_link_has_none() -> None:
    model, batch = that_learns()
    profile = rekindle.profile(model, batch, device="meta", like="cpu")
    assert profile.bytes_per_second == 0.0
    assert not any(option.tier for option in profile.blocks[0].candidates)


@pytest.mark.filterwarnings("ignore:The plan no longer matches")  # a CPU has another dropout
def test_a_plan_says_what_it_was_made_for_and_is_carried_out_by_the_real_model() -> None:
    model, batch = that_learns()
    profile = rekindle.profile(model, batch, device="meta", like="RTX 4090")
    plan = rekindle.solve(profile, "60%")
    assert plan.device == profile.device == "RTX 4090"
    plain = step(model, batch)
    rekindle.apply(model, plan)
    assert any(forward_of(block) is not None for block in model.blocks)
    assert all(map(same_bits, plain, step(model, batch)))


def test_a_plan_made_on_the_meta_device_keeps_the_real_step_within_its_budget() -> None:
    model, batch = that_learns()
    meta = Stack(3, 16, 0.1).to("meta")
    far = batch.detach().to("meta").requires_grad_()
    profile = rekindle.profile(meta, far, device="meta", like="cpu")
    plan = rekindle.solve(profile, "60%")
    assert measure_step(TrainingStep(model, batch), plan, profile).peak <= plan.budget


def test_a_device_may_be_described() -> None:
    mine = replace(DEVICES["T4"], name="mine", memory=1e6)
    model, batch = that_learns()
    profile = rekindle.profile(model, batch, device="meta", like=mine)
    assert profile.device == "mine"
    assert profile.blocks[0].candidates[0].seconds > 0.01


ON_A_GPU = {
    torch.float32: "aten::_scaled_dot_product_efficient_attention",
    torch.bfloat16: "aten::_scaled_dot_product_flash_attention",
}


class Dropping(nn.Module):
    """Attention with dropout, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return dropout(scaled_dot_product_attention(x, x, x, dropout_p=0.1), 0.2)


class Names(TorchDispatchMode):
    """The names of ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ON_A_GPU, ids=str)
def test_dropout_and_attention_with_dropout_are_as_on_a_gpu(dtype: torch.dtype) -> None:
    model, x = Dropping().to(dtype), torch.randn(2, 4, 16, 8, dtype=dtype)
    found = {}
    for name in ("cpu", "H100"):
        with with_fake_tensors(model, x, as_on=name) as given, Names() as names:
            model(given)
        found[name] = names.found
    with Names() as names:
        model(x)
    assert found["cpu"] == names.found
    assert found["H100"][-3:] == [ON_A_GPU[dtype], "aten::detach", "aten::native_dropout"]


def test_blocks_with_dropout_are_replayed_as_on_a_gpu() -> None:
    model = nn.Sequential(*(Dropping() for _ in range(2)))
    profile = rekindle.profile(model, torch.randn(2, 4, 16, 8), device="meta", like="H100")
    keep = profile.blocks[0].candidates[0]
    assert keep.strategy == Keep()
    # Results of the product, attention, and dropout; attention's statistics and seed; the mask.
    size, statistics, seed, mask = 4 * 1024, 4 * 2 * 4 * 32, 2 * 8, 1024
    assert keep.bytes_held == 3 * size + statistics + seed + mask


class Deciding(nn.Module):
    """Looks at a value to decide what to run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out if out.sum() > 0 else -out


def test_a_step_that_looks_at_values_is_refused_and_leaves_nothing_changed() -> None:
    model, batch = Deciding(), torch.randn(4, 16)
    step(model, batch)
    with unchanged(model), pytest.raises(rekindle.RekindleError, match="looks at the values"):
        rekindle.profile(model, batch, device="meta", like="H200")
    assert all(isinstance(p, nn.Parameter) and type(p) is nn.Parameter for p in model.parameters())


class Counting(nn.Module):
    """Looks at positions, which depend on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0])
        assert bool((positions.diff() == 1).all()), "not packed"
        assert int(positions.max().item()) == x.shape[0] - 1
        out: Tensor = self.blocks(x * positions[:, None])
        return out


def test_whole_numbers_that_no_input_decides_may_be_looked_at() -> None:
    model = Counting().to("meta")
    profile = rekindle.profile(model, torch.empty(4, 16, device="meta"), device="meta", like="T4")
    assert len(profile.order) == 2


@pytest.mark.usefixtures("few_sets")
def test_a_mask_of_the_batch_may_be_looked_at() -> None:
    """A model of transformers leaves out a mask that hides nothing: so does its profile."""
    model, batch = gpt2()
    mask = torch.ones_like(batch["input_ids"])
    whole = rekindle.profile(model, {**batch, "attention_mask": mask}, device="meta", like="cpu")
    model, batch = padded_gpt2()
    hidden = rekindle.profile(model, batch, device="meta", like="cpu")
    assert "bool[2, 1, 16, 16]" in hidden.blocks[0].signature
    assert "bool[2, 1, 16, 16]" not in whole.blocks[0].signature


def seventy(layers: int) -> Case:
    """The shapes of a model of 70 billion parameters, on the meta device."""
    shape = Shape(
        "70b", dim=8192, ffn=28672, heads=64, kv_heads=8, layers=layers, batch=1, tokens=8192
    )
    return Decoder(shape, device="meta"), shape.hidden_states(device="meta").requires_grad_()


def test_layers_that_fit_nowhere_here_are_profiled() -> None:
    model, batch = seventy(2)
    optimizer = torch.optim.AdamW(model.parameters())
    profile = rekindle.profile(model, batch, device="meta", like="H200", optimizer=optimizer)
    weights = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    assert weights > 3 * 2**30
    assert profile.static_bytes == 4 * weights + buffers + batch.nbytes
    keep = profile.blocks[0].candidates[0]
    assert keep.bytes_held > 3 * 2**30
    assert rekindle.solve(profile, "50%").predicted_peak < plain_prediction(profile).peak


@pytest.mark.usefixtures("few_sets")
def test_more_layers_have_the_same_menu_and_a_longer_order() -> None:
    few, many = (rekindle.profile(*seventy(n), device="meta", like="H200") for n in (2, 6))
    assert len(many.blocks) == 1
    assert many.blocks == few.blocks
    assert len(many.order) == 3 * len(few.order)
    assert many.rest_seconds == pytest.approx(few.rest_seconds)


def measured_elsewhere(model: nn.Module, batch: Any) -> rekindle.Profile:
    """A measured profile, as it might have been on a device with a link."""
    measured = rekindle.profile(model, batch)
    return replace(measured, device="NVIDIA H200", bytes_per_second=5e10, rest_seconds=0.25)


def test_a_measured_profile_gives_its_blocks_and_times() -> None:
    model, batch = that_learns()
    like = measured_elsewhere(model, batch)
    found = rekindle.profile(model.to("meta"), batch, device="meta", like=like)
    assert [block.candidates for block in found.blocks] == [
        block.candidates for block in like.blocks
    ]
    assert (found.device, found.bytes_per_second, found.rest_seconds) == ("NVIDIA H200", 5e10, 0.25)
    assert (found.order, found.static_bytes, found.rest_peak) == (
        like.order,
        like.static_bytes,
        like.rest_peak,
    )


def test_a_measured_profile_does_for_more_layers_and_for_an_optimizer() -> None:
    model, batch = that_learns()
    like = measured_elsewhere(model, batch)
    larger = Stack(30, 16, 0.1).to("meta")
    found = rekindle.profile(
        larger, batch, device="meta", like=like, optimizer=torch.optim.Adam(larger.parameters())
    )
    assert len(found.order) == 30
    weights = sum(p.nbytes for p in larger.parameters())
    assert found.static_bytes == 4 * weights + batch.nbytes


def test_a_measured_profile_of_other_blocks_is_refused_with_both() -> None:
    model, batch = that_learns()
    like = measured_elsewhere(model, batch)
    other = Stack(3, 16, 0.1)
    other.blocks[1].mlp.up.bias = None
    with unchanged(other), pytest.raises(ValueError, match=r"'blocks\.1' is not among those"):
        rekindle.profile(other, batch, device="meta", like=like)


def test_a_measured_profile_of_another_batch_or_class_is_refused() -> None:
    model, batch = that_learns()
    like = measured_elsewhere(model, batch)
    with pytest.raises(ValueError, match=r"batch of float32\[64, 16\] that learns.*\[32, 16\]"):
        rekindle.profile(model, batch[:32].detach(), device="meta", like=like)
    with pytest.raises(ValueError, match="profile is of a Stack, but the model is a Sequential"):
        rekindle.profile(nn.Sequential(model), batch, device="meta", like=like)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_model_without_memory_is_not_measured(kind: str) -> None:
    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        model = Stack(2, 16)
    for call in (rekindle.profile, lambda m, x: rekindle.fit(m, x, "50%")):
        with pytest.raises(ValueError, match=r'no memory.*device="meta"'):
            call(model, torch.randn(4, 16))


def test_a_device_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"no device 'H2000'.*'H200', 'H100'.*'RTX 4090'"):
        rekindle.profile(*that_learns(), device="meta", like="H2000")


@pytest.mark.parametrize("name", ["rtx4090", "RTX-4090", "a100-80gb", "cpu"])
def test_a_name_may_be_written_in_other_ways(name: str) -> None:
    assert device_named(name) in (DEVICES["RTX 4090"], DEVICES["A100-80GB"], DEVICES["cpu"])


TOLD = {
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100-PCIE-40GB": "A100-40GB",
    "NVIDIA L40S": "L40S",
    "NVIDIA L4": "L4",
    "Tesla T4": "T4",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA L40": None,
    "NVIDIA T400": None,
}


@pytest.mark.parametrize("told", TOLD)
def test_a_gpu_that_is_there_is_found_in_the_table(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: told)
    found = device_of(torch.device("cuda", 0))
    assert (found and found.name) == TOLD[told]


def test_what_times_are_taken_must_be_said_for_a_model_on_the_meta_device() -> None:
    model = Stack(2, 16).to("meta")
    with pytest.raises(ValueError, match=r"like= says which device.*'H200'"):
        rekindle.profile(model, torch.randn(4, 16), device="meta")


def test_a_model_on_a_device_of_the_table_is_profiled_as_on_that() -> None:
    model, batch = that_learns()
    assert rekindle.profile(model, batch, device="meta").device == "cpu"


def test_other_devices_and_kinds_of_likeness_are_refused() -> None:
    model, batch = that_learns()
    with pytest.raises(ValueError, match='device should be "meta"'):
        rekindle.profile(model, batch, device="cuda")
    with pytest.raises(ValueError, match='like= is for device="meta"'):
        rekindle.profile(model, batch, like="H200")
    with pytest.raises(TypeError, match="name of a device or a profile, but got int"):
        rekindle.profile(model, batch, device="meta", like=200)  # type: ignore[arg-type]


def test_parameters_of_another_class_are_refused_by_name() -> None:
    class Special(nn.Parameter):
        pass

    model = Stack(2, 16)
    model.blocks[0].norm.weight = Special(torch.ones(16))
    with pytest.raises(ValueError, match=r"blocks\.0\.norm\.weight is a Special"):
        rekindle.profile(model, torch.randn(4, 16), device="meta", like="H200")


def test_every_device_of_the_table_is_whole() -> None:
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.half >= device.tf32 >= device.single > 0
        assert 0 < device.memory < 2e13
        assert (device.link > 0) == (name != "cpu")


SAVED = rekindle.Profile(
    model="Stack",
    device="H200",
    batch="float32[4, 8]",
    static_bytes=100,
    before_bytes=10,
    rest_peak=20,
    rest_seconds=0.125,
    bytes_per_second=5e10,
    blocks=(
        rekindle.planner.types.BlockProfile(
            "Block",
            "Block()",
            (
                Candidate(Keep()),
                Candidate(Recompute()),
                Candidate(Selective(NumberedOps((1, 3), (5,))), 40, 20, 0.1),
            ),
        ),
    ),
    order=(("blocks.0", 0), ("blocks.1", 0)),
)


def test_a_profile_that_is_read_again_is_the_same(tmp_path: Path) -> None:
    for profile in (SAVED, imagined_stack()):
        profile.save(tmp_path / "profile.json")
        again = rekindle.Profile.load(tmp_path / "profile.json")
        assert again == profile
        assert hash(again) == hash(profile)
        assert repr(again) == repr(profile)


def test_a_profile_that_was_saved_has_the_same_plans(tmp_path: Path) -> None:
    profile = imagined_stack()
    profile.save(str(tmp_path / "profile.json"))
    again = rekindle.Profile.load(str(tmp_path / "profile.json"))
    assert rekindle.solve(again, "60%") == rekindle.solve(profile, "60%")


def test_a_saved_profile_is_json_with_its_schema_and_fields(tmp_path: Path) -> None:
    SAVED.save(tmp_path / "profile.json")
    values = json.loads((tmp_path / "profile.json").read_text())
    assert (values["schema"], values["version"]) == ("rekindle profile", 6)
    assert values.keys() - {"schema", "version"} == vars(SAVED).keys()


def test_a_plan_is_no_profile_and_a_profile_no_plan(tmp_path: Path) -> None:
    SAVED.save(tmp_path / "profile.json")
    with pytest.raises(ValueError, match=r"profile\.json is not a plan of rekindle's"):
        rekindle.Plan.load(tmp_path / "profile.json")
    profile = imagined_stack()
    rekindle.solve(profile, "60%").save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.json is not a profile of rekindle's"):
        rekindle.Profile.load(tmp_path / "plan.json")


@pytest.mark.parametrize("field", ["blocks", "order", "static_bytes"])
def test_a_profile_without_one_of_its_fields_is_refused_with_its_name(
    field: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    SAVED.save(path)
    values = json.loads(path.read_text())
    del values[field]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"not a whole profile.*{field}"):
        rekindle.Profile.load(path)


def test_a_buffer_that_is_fake_teaches_nothing_of_the_real_one() -> None:
    """The engine learns once whether a large buffer changes behind its version counter's back."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(16)
            self.register_buffer("scale", torch.ones(2**15, 16))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x * self.scale[: x.shape[0]])
            self.scale.data.mul_(2)
            return out

    def gradients_of(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        rekindle.apply(model, "recompute")
        model(batch).sum().backward()
        rekindle.remove(model)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    batch = torch.randn(4, 16)
    fresh, seen = (nn.Sequential(Behind(), Behind()) for _ in range(2))
    seen.load_state_dict(fresh.state_dict())
    rekindle.profile(seen, batch, device="meta", like="cpu")
    assert all(map(same_bits, gradients_of(fresh), gradients_of(seen)))


def test_the_page_lists_the_devices_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "budget.md").read_text()
    for device in DEVICES.values():
        link = f"{device.link / 1e9:.4g}" if device.link else "none"
        rates = [device.half / 1e12, device.tf32 / 1e12, device.single / 1e12, device.memory / 1e9]
        cells = [f"`{device.name}`", *(f"{rate:.4g}" for rate in rates), link]
        assert f"| {' | '.join(cells)} | {device.memory_bytes >> 30} GiB |\n" in page
