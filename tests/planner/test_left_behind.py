"""Planning leaves nothing behind, also where it fails, and takes no more memory than it may.

Live bytes are counted op by op from before the call to after it: what a graph, a hook or a saved
tensor keeps alive counts, whether Python's garbage collector can see it or not.
"""

import gc
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner import fit, verified_plan
from rekindle.planner.measure.memory_meter import LiveBytes
from rekindle.planner.measure.whole_step_calibration import SLACK
from tests.toys import Block, Stack

pytest.importorskip("scipy")
transformers = pytest.importorskip("transformers")

Case = tuple[nn.Module, dict[str, Tensor]]
TOKENS = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "vocab_size": 64,
    "use_cache": False,
}


def gpt2(device: str = "cpu") -> Case:
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, n_positions=32, **TOKENS)
    return case_of(transformers.GPT2LMHeadModel(config), device)


def bert(device: str = "cpu") -> Case:
    config = transformers.BertConfig(
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        **TOKENS,
    )
    return case_of(transformers.BertForMaskedLM(config), device)


def t5(device: str = "cpu") -> Case:
    config = transformers.T5Config(
        num_layers=2, d_model=32, d_kv=16, num_heads=2, d_ff=64, decoder_start_token_id=0, **TOKENS
    )
    return case_of(transformers.T5ForConditionalGeneration(config), device)


def case_of(model: nn.Module, device: str) -> Case:
    ids = torch.randint(64, (4, 32), device=device)
    return model.to(device).train(), {"input_ids": ids, "labels": ids}


class Biased(nn.Module):
    """A block that hands on what it was given beside the state: a bias, as T5's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = x.new_ones(64, 8, 8) if bias is None else bias
        return self.linear(x).relu() + (bias @ x).sum(0), bias


class SharesABias(nn.Module):
    """The first block makes a bias, much larger than all else, that every other one uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Biased() for _ in range(6)])

    def forward(self, x: Tensor) -> Any:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return types.SimpleNamespace(loss=x.sum())


def shared_bias(device: str = "cpu") -> Case:
    return SharesABias().to(device), {"x": torch.randn(8, 8, device=device)}


every_model = pytest.mark.parametrize("case", [gpt2, bert, t5])


def fit_and_remove(model: nn.Module, batch: Any) -> None:
    rekindle.fit(model, batch, "80%")
    rekindle.remove(model)


def make_a_frontier(model: nn.Module, batch: Any) -> None:
    rekindle.frontier(rekindle.profile(model, batch), points=2)


every_call = pytest.mark.parametrize("call", [rekindle.profile, fit_and_remove, make_a_frontier])


def hooks_of(model: nn.Module) -> list[Any]:
    """The hooks and the attributes of every module, and the hooks and gradients of parameters."""
    modules = [
        (set(vars(module)), [list(found) for n, found in vars(module).items() if "_hooks" in n])
        for module in model.modules()
    ]
    parameters = [
        (p.grad, p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None) or None)
        for p in model.parameters()
    ]
    return [modules, parameters]


class Left:
    """What there is more after a call than before."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._model = model
        gc.collect()  # of what other tests left
        self._before = self._state()
        self.live = LiveBytes([*model.parameters(), *model.buffers(), *batch.values()])

    def _state(self) -> tuple[Any, ...]:
        return (
            hooks_of(self._model),
            sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None,
            threading.active_count(),
            torch.is_grad_enabled(),
            rekindle.is_recomputing(),
            torch.get_rng_state().tolist(),
            [b.tolist() for b in self._model.buffers()],
        )

    def check(self) -> None:
        gc.collect()
        assert self.live.now() == 0
        assert self._state() == self._before


@every_model
@every_call
def test_nothing_is_left_behind(case: Callable[[], Case], call: Callable[..., Any]) -> None:
    model, batch = case()
    model(**batch).loss.backward()  # what is made once, is
    model.zero_grad()
    left = Left(model, batch)
    with left.live:
        call(model, batch)
    left.check()


class Failing(nn.Module):
    """Around a module: raises at the n-th forward, or in the n-th backward."""

    def __init__(self, inner: nn.Module, error: type[BaseException], way: str, at: int) -> None:
        super().__init__()
        self.inner = inner
        self._error = error
        self._left = [at]
        self._way = way

    def fail_in_time(self) -> None:
        self._left[0] -= 1
        if self._left[0] == 0:
            raise self._error("as planned")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        if self._way == "forward":
            self.fail_in_time()
        elif torch.is_grad_enabled():
            out = FailsInBackward.apply(out, self.fail_in_time)
        return out


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail_in_time: Callable[[], None]) -> Tensor:
        ctx.fail_in_time = fail_in_time
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fail_in_time()
        return *gradients, None


@pytest.mark.parametrize("at", [1, 2, 9, 40])
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind_where_it_fails(
    error: type[BaseException], way: str, at: int
) -> None:
    model, batch = gpt2()
    mlp = model.transformer.h[1].mlp  # type: ignore[union-attr, index]
    mlp.act = Failing(mlp.act, error, way, at)  # type: ignore[union-attr, arg-type]
    left = Left(model, batch)
    with left.live:
        assert failed_with(error, lambda: rekindle.fit(model, batch, "80%"))
    left.check()


def failed_with(error: type[BaseException], call: Callable[[], Any]) -> bool:
    """Whether a call raises an error; none of its frames is left."""
    try:
        call()
    except error:
        return True
    return False


@pytest.mark.gpu
@every_model
def test_nothing_is_left_behind_on_a_gpu(case: Callable[[str], Case]) -> None:
    model, batch = case("cuda")
    model(**batch).loss.backward()  # what is made once, is: workspaces, above all
    model.zero_grad()
    fit_and_remove(model, batch)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for call in (rekindle.profile, fit_and_remove, make_a_frontier):
        call(model, batch)
        gc.collect()
        assert torch.cuda.memory_allocated() == before


def peak_of_a_recomputed_step(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes that a step with every block recomputed makes at its highest, gradients in place."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *model.buffers(), *batch.values()]
    rekindle.apply(model, "recompute")
    with LiveBytes([*known, *(p.grad for p in model.parameters() if p.grad is not None)]) as live:
        model(**batch).loss.backward()
    rekindle.remove(model)
    model.zero_grad()
    return live.peak()


@pytest.mark.parametrize("case", [gpt2, bert, t5, shared_bias])
def test_planning_peaks_no_higher_than_a_step_with_every_block_recomputed(
    case: Callable[[], Case],
) -> None:
    model, batch = case()
    peak = peak_of_a_recomputed_step(model, batch)
    profile = rekindle.profile(model, batch)
    assert profile.recompute_peak == profile.static_bytes + peak
    assert profile.planning_peak is not None
    assert profile.planning_peak - profile.static_bytes <= (1 + SLACK) * peak


def test_a_plan_tells_the_planning_peak() -> None:
    model, batch = gpt2()
    profile = rekindle.profile(model, batch)
    assert rekindle.fit(model, batch, "80%", profile=profile).planning_peak == profile.planning_peak


@every_model
def test_what_is_seen_from_outside_is_the_planning_peak(case: Callable[[], Case]) -> None:
    model, batch = case()
    with LiveBytes([*model.parameters(), *model.buffers(), *batch.values()]) as live:
        profile = rekindle.profile(model, batch)
    copies = sum(buffer.nbytes for buffer in model.buffers())  # which wait in host memory
    assert profile.planning_peak == profile.static_bytes + live.peak() - copies


def test_gradients_that_are_there_already_make_no_difference_to_the_planning_peak() -> None:
    model, batch = gpt2()
    without = rekindle.profile(model, batch).planning_peak
    model(**batch).loss.backward()
    assert rekindle.profile(model, batch).planning_peak == without


class Skipping(nn.Module):
    """Skips blocks at random while it trains, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block(16, 0.1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.4:
                x = layer(x)
        return x.square().mean()


@pytest.fixture(params=range(4))
def seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(request.param)
    return


@pytest.mark.usefixtures("seeded")
def test_blocks_that_are_skipped_at_random_are_planned_for_what_ran() -> None:
    model, x = Skipping(), torch.randn(64, 16)
    state = torch.get_rng_state()
    plan = rekindle.fit(model, x, "80%")
    assert {path for path, _, _ in plan.blocks} | set(plan.unused) == {
        f"layers.{i}" for i in range(6)
    }
    assert torch.equal(torch.get_rng_state(), state)
    with rekindle.observe() as seen:
        for _ in range(8):
            model(x).backward()
    assert seen.total.forwards > 0
    rekindle.remove(model)


def test_blocks_that_the_planned_step_skipped_are_recomputed_when_they_run() -> None:
    model, x = Skipping(), torch.randn(64, 16)
    plan = rekindle.fit(model, x, "70%")
    skipped = {path: model.get_submodule(path) for path in plan.unused}
    assert skipped
    with rekindle.observe() as seen:
        next(iter(skipped.values()))(torch.randn(4, 16)).sum().backward()
    assert seen.total.replays == 1


class Unsteady(nn.Module):
    """Runs one block more each time: it does not repeat itself, whatever the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(9))
        self._calls = iter(range(2, 9))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: next(self._calls)]:
            x = block(x)
        return x.sum()


def test_a_step_that_does_not_repeat_itself_is_refused_with_the_place() -> None:
    with pytest.raises(rekindle.RekindleError, match=r"as number [3-9] it ran none, then 'blocks"):
        rekindle.profile(Unsteady(), torch.randn(4, 8))


class OnPacked(nn.Module):
    """A block that takes and gives a PackedSequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, packed: nn.utils.rnn.PackedSequence) -> nn.utils.rnn.PackedSequence:
        out: nn.utils.rnn.PackedSequence = self.lstm(packed)[0]
        return out


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OnPacked() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [9, 6, 2], batch_first=True)
        for layer in self.layers:
            packed = layer(packed)
        return packed.data.square().mean()


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = [x[0, :9], x[1, :6], x[2, :2]]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        for layer in self.layers:
            nested = layer(nested)
        return nested.values().square().mean()


@pytest.mark.parametrize("kind", [Packing, Jagged])
def test_blocks_may_take_what_is_made_of_several_tensors(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(3, 9, 8)
    model(x).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plan = rekindle.fit(model, x, "85%")
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    model(x).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    rekindle.remove(model)


class WithScripts(nn.Module):
    """Scripted blocks behind a module with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(torch.jit.script(Block(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_scripted_blocks_are_refused_with_everything_as_it_was() -> None:
    model, x = WithScripts(), torch.randn(4, 8)
    before = [b.clone() for b in model.buffers()]
    with pytest.raises(ValueError, match=r"layers\.0 is scripted"):
        rekindle.fit(model, x, "80%")
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize("what", ["recompute", "offload", rekindle.policies.keep_matmuls])
def test_scripting_a_model_that_has_a_strategy_says_to_remove_it_first(what: Any) -> None:
    model = nn.Sequential(Block(8), Block(8))
    rekindle.apply(model, what)
    with pytest.raises(rekindle.RekindleError, match=r"rekindle\.remove"):
        torch.jit.script(model)
    rekindle.remove(model)
    torch.jit.script(model)


def test_two_threads_that_call_a_model_with_more_plan_it_again_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Stack(3, 16)
    rekindle.fit(model, lambda: model(torch.randn(32, 16)).square().mean(), "80%")
    plans = []
    refit = fit.refit
    monkeypatch.setattr(fit, "refit", lambda *args: plans.append(refit(*args)) or plans[-1])
    errors: list[BaseException] = []
    ready = threading.Barrier(2)

    def train() -> None:
        try:
            ready.wait()
            for _ in range(3):
                model(torch.randn(64, 16)).square().mean().backward()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert plans == [rekindle.plan_of(model)]


def test_a_model_that_two_threads_train_is_not_planned_again_in_the_middle_of_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Stack(3, 16)
    plan = rekindle.fit(model, lambda: model(torch.randn(32, 16)).square().mean(), "80%")
    loss = model(torch.randn(32, 16)).square().mean()
    other = threading.Thread(target=lambda: model(torch.randn(64, 16)))
    other.start()
    other.join()
    loss.backward()
    assert "several threads train it" in caplog.text
    assert rekindle.plan_of(model) == plan
    assert all(p.grad is not None for p in model.parameters())


def test_a_plan_that_runs_out_of_memory_when_it_is_tried_gives_way_to_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = gpt2()
    profile = rekindle.profile(model, batch)
    aimed = []
    measure_step = fit.measure_step

    def first_fails(step: Any, plan: rekindle.Plan, *args: Any, **options: Any) -> Any:
        aimed.append(plan.predicted_peak)
        if len(aimed) == 1:
            raise torch.OutOfMemoryError("no room")
        return measure_step(step, plan, *args, **options)

    monkeypatch.setattr(verified_plan, "measure_step", first_fails)
    plan = rekindle.fit(model, batch, "80%", profile=profile)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert len(aimed) == 2
    assert aimed[1] < aimed[0]
    rekindle.remove(model)


def test_a_device_that_has_no_room_for_any_plan_is_a_budget_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(verified_plan, "measure_step", fails)
    model, batch = gpt2()
    with pytest.raises(rekindle.BudgetError, match="out of memory"):
        rekindle.fit(model, batch, "80%")
    assert rekindle.plan_of(model) is None
