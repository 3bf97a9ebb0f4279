"""Measures one model of the zoo: plain, its own gradient checkpointing, and plans for budgets.

All strategies of a model are timed in turns in one process. Peaks come from the steps that are
timed: the most that torch's allocator gave out, less what was allocated before, when the gradients
were there; on a CPU from one more step, by rekindle's own meter. Gradients and buffers are compared
with those of a plain step afterwards, with deterministic algorithms on.
"""

import gc
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import rekindle
from benchmarks.workload import same_bits
from benchmarks.zoo_models import Case, Family
from rekindle.planner.instruments.memory_meter import metered
from rekindle.planner.training_step import TrainingStep

PLAIN, GC, RECOMPUTE = "plain", "gc", "recompute all"
AS_GC = "gc"
"""Among shares: as much as the model's own checkpointing takes."""
_STEPS = 2
"""Steps that are timed in a row."""
_WARM_UP, _LEARNING = 1, 10
"""Steps before those: by most strategies, and by those that offload.

It takes some steps until host memory and torch's allocator have all that offload needs.
"""
_MIN_ROUNDS = 2


@dataclass(frozen=True)
class Row:
    """One strategy on one model; times and peaks are those of a forward and backward."""

    model: str
    title: str
    strategy: str
    """`plain`, `gc`, `recompute all`, `fit 0.6` with the share, or `fit gc`."""
    milliseconds: float | None = None
    time_ratio: float | None = None
    peak_mib: float | None = None
    """Of activations."""
    peak_ratio: float | None = None
    predicted_time_ratio: float | None = None
    """To the measured plain step, as all ratios."""
    predicted_peak_ratio: float | None = None
    budget_ratio: float | None = None
    """The budget, less what is static."""
    line_ratio: float | None = None
    """The time at this peak of the straight line between plain and checkpointing."""
    planning_seconds: float | None = None
    """Of `profile`, which all budgets share, and of `fit`."""
    planning_steps: float | None = None
    """As often as a plain step goes into that."""
    gradients: str | None = None
    """Of the comparison with a plain step's."""
    plan: dict[str, int] = field(default_factory=dict)
    """How many blocks have which candidate."""
    error: str | None = None
    """The first line, if no plan was found or the strategy failed."""
    rounds: int = 0


@dataclass
class Strategy:
    """A way to run the model, which is turned on and off."""

    name: str
    on: Callable[[], object]
    off: Callable[[], object]
    warm_up: int = _WARM_UP
    plan: "rekindle.Plan | None" = None
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    """Bytes above those before a step."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        self.on()
        try:
            yield
        finally:
            self.off()


class Bench:
    """A case, and what was allocated before its steps."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.is_cuda = case.device == "cuda"
        self.step()  # so that gradients are there
        self.step()
        self.collect()
        self.before = torch.cuda.memory_allocated() if self.is_cuda else 0

    def step(self) -> None:
        self.case.loss().backward()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def collect(self) -> None:
        gc.collect()
        self.synchronize()

    def measure(self, strategy: Strategy, steps: int = _STEPS) -> None:
        """Time steps by a strategy, and note their peak."""
        with strategy.applied():
            for _ in range(strategy.warm_up):
                self.step()
            self.collect()
            if self.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(steps):
                self.synchronize()
                start = time.perf_counter()
                self.step()
                self.synchronize()
                strategy.seconds.append(time.perf_counter() - start)
            if self.is_cuda:
                peak = torch.cuda.max_memory_allocated() - self.before
                strategy.peak = max(strategy.peak, peak)
            elif not strategy.peak:
                strategy.peak = self._metered_peak()

    def _metered_peak(self) -> int:
        known = TrainingStep(self.case.model, self.case.batch).existing_tensors()
        with metered(torch.device(self.case.device), known) as meter:
            meter.reset()
            self.step()
            return meter.peak()


class Comparison:
    """Gradients and buffers of a plain step under deterministic algorithms, to compare with."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._buffers = [buffer.clone() for buffer in case.model.buffers()]
        self._expected = [tensor.clone() for tensor in self._results()]
        self._repeats = self._is_as_expected()

    def of(self, strategy: Strategy) -> str:
        """Say in a word or a few if the strategy's gradients and buffers are plain's."""
        if not self._repeats:
            return "plain does not repeat"
        with strategy.applied():
            return "identical" if self._is_as_expected() else "differ"

    def _is_as_expected(self) -> bool:
        return all(map(same_bits, self._results(), self._expected))

    def _results(self) -> list[Tensor]:
        model = self._case.model
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), self._buffers, strict=True):
                buffer.copy_(value)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        torch.manual_seed(1)
        self._case.loss().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [tensor.reshape(-1) for tensor in (*gradients, *model.buffers())]


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms where there are any."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def own_checkpointing(model: nn.Module) -> Strategy | None:
    """The model's own gradient checkpointing, if its library has one for it."""
    base: Any = model
    if hasattr(base, "get_base_model"):  # of peft
        base = base.get_base_model()
    if not getattr(base, "supports_gradient_checkpointing", False):
        return None
    return Strategy(GC, base.gradient_checkpointing_enable, base.gradient_checkpointing_disable)


def recompute_all(model: nn.Module) -> Strategy:
    """Every block recomputed by rekindle: those that the model's library would checkpoint."""
    try:
        from rekindle.integrations import transformers as integration  # noqa: PLC0415
    except ImportError:
        return Strategy(
            RECOMPUTE,
            lambda: rekindle.apply(model, "recompute"),
            lambda: rekindle.remove(model),
        )
    return Strategy(
        RECOMPUTE, lambda: integration.apply(model, "recompute"), lambda: integration.remove(model)
    )


class ModelRun:
    """The strategies of one model, and their rows of the table."""

    def __init__(self, name: str, family: Family, device: str) -> None:
        self._name, self._title = name, family.title
        self._case = family.case(device, is_large=device == "cuda")
        self._bench = Bench(self._case)
        self._plain = Strategy(PLAIN, lambda: None, lambda: None)
        self._strategies: list[Strategy] = []
        self._rows: dict[str, Row] = {}
        self._profile: rekindle.Profile | None = None
        self._profile_seconds = 0.0
        self._rounds = 0
        own = own_checkpointing(self._case.model)
        for strategy in filter(None, (self._plain, own, recompute_all(self._case.model))):
            self._rows[strategy.name] = self._row(strategy.name)
            self._strategies.append(strategy)
        self._in_turns(_MIN_ROUNDS, 0.0)

    def _row(self, strategy: str) -> Row:
        return Row(self._name, self._title, strategy)

    def rows(self) -> list[Row]:
        """Return the rows, with what was measured so far."""
        return with_figures(self._rows, self._strategies, self._rounds)

    def plan(self, share: str) -> None:
        """Have `rekindle.fit` plan for a share of plain's activation peak, or for gc's peak."""
        row = self._row(f"fit {share}")
        peaks = {strategy.name: strategy.peak for strategy in self._strategies}
        nbytes = peaks.get(GC) if share == AS_GC else int(float(share) * peaks[PLAIN])
        if nbytes is None:
            return
        row = replace(row, budget_ratio=round(nbytes / peaks[PLAIN], 3))
        self._bench.collect()
        profiled, start = self._profile_seconds, time.perf_counter()  # 0 if it is yet to be
        try:
            row = self._planned(row, nbytes)
        except Exception as error:  # noqa: BLE001 (a row of the table, not its end)
            if not isinstance(error, rekindle.BudgetError):
                traceback.print_exc()
            row = replace(row, error=first_line(error))
        finally:
            rekindle.remove(self._case.model)
        seconds = profiled + time.perf_counter() - start
        steps = seconds / median(self._plain.seconds)
        self._rows[row.strategy] = replace(
            row, planning_seconds=round(seconds, 2), planning_steps=round(steps, 1)
        )
        print(f"{self._name}, {row.strategy}: {seconds:.1f} s", flush=True)

    def _planned(self, row: Row, nbytes: int) -> Row:
        model, loss = self._case.model, self._case.loss
        if self._profile is None:
            start = time.perf_counter()
            self._profile = rekindle.profile(model, loss, progress=False)
            self._profile_seconds = time.perf_counter() - start
        static = self._profile.static_bytes
        plan = rekindle.fit(model, loss, static + nbytes, profile=self._profile, progress=False)
        self._strategies.append(planned(row.strategy, model, plan))
        return replace(
            row,
            predicted_peak_ratio=round((plan.predicted_peak - static) / self._plain.peak, 3),
            plan=dict(Counter(candidate.describe() for _, _, candidate in plan.blocks)),
        )

    def time(self, seconds: float) -> None:
        """Time all strategies in turns, for about some seconds."""
        for strategy in self._strategies:
            strategy.seconds.clear()
        self._rounds = self._in_turns(_MIN_ROUNDS, seconds)

    def _in_turns(self, min_rounds: int, seconds: float) -> int:
        end, rounds, order = time.perf_counter() + seconds, 0, random.Random(0)
        while rounds < min_rounds or time.perf_counter() < end:
            for strategy in order.sample(self._strategies, len(self._strategies)):
                try:
                    self._bench.measure(strategy)
                except Exception as error:  # noqa: BLE001 (as above)
                    traceback.print_exc()
                    row = replace(self._rows[strategy.name], error=first_line(error))
                    self._rows[strategy.name] = row
                    self._strategies.remove(strategy)
            rounds += 1
        return rounds

    def compare(self) -> None:
        """Compare the gradients and buffers of all strategies with those of a plain step."""
        with deterministic():
            comparison = Comparison(self._case)
            for strategy in self._strategies:
                row = replace(self._rows[strategy.name], gradients=comparison.of(strategy))
                self._rows[strategy.name] = row


def measure(
    name: str,
    family: Family,
    shares: Sequence[str],
    seconds: float,
    device: str,
    report: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Measure a model; `report` is given the rows so far, whenever there are more."""
    run = ModelRun(name, family, device)
    report(run.rows())
    for share in shares:
        run.plan(share)
        report(run.rows())
    run.time(seconds)
    report(run.rows())
    run.compare()
    report(run.rows())
    return run.rows()


def planned(name: str, model: nn.Module, plan: "rekindle.Plan") -> Strategy:
    return Strategy(
        name,
        lambda: rekindle.apply(model, plan),
        lambda: rekindle.remove(model),
        _LEARNING if plan.offloads else _WARM_UP,
        plan,
    )


def with_figures(rows: dict[str, Row], strategies: Sequence[Strategy], rounds: int) -> list[Row]:
    """Return the rows with what was measured of their strategies so far."""
    by_name = {strategy.name: strategy for strategy in strategies}
    plain = by_name[PLAIN]
    base = by_name.get(GC) or by_name.get(RECOMPUTE)
    found = []
    for row in rows.values():
        strategy = by_name.get(row.strategy)
        if strategy is None or not strategy.seconds:
            found.append(row)
            continue
        taken, peak = median(strategy.seconds), strategy.peak / plain.peak
        plain_seconds = median(plain.seconds)
        predicted = strategy.plan and strategy.plan.predicted_time / plain_seconds
        line = base and line_between(
            base.peak / plain.peak, median(base.seconds) / plain_seconds, peak
        )
        found.append(
            replace(
                row,
                milliseconds=round(taken * 1e3, 3),
                time_ratio=round(taken / plain_seconds, 3),
                peak_mib=round(strategy.peak / 2**20, 1),
                peak_ratio=round(peak, 3),
                predicted_time_ratio=predicted and round(predicted, 3),
                line_ratio=line and round(line, 3),
                rounds=rounds,
            )
        )
    return found


def line_between(peak: float, time: float, at: float) -> float | None:
    """Return the time at a peak, on the line from plain's to that of a strategy.

    Below that strategy's peak it is the strategy's time. A strategy that saves nothing has no line.
    """
    if peak > _SAVES_NOTHING:
        return None
    return time + (1 - time) * (min(max(at, peak), 1.0) - peak) / (1 - peak)


_SAVES_NOTHING = 0.95


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
