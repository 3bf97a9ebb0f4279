"""Long sequences and large vocabularies: checkpointing, Liger and plans: `scripts/bench longctx`.

Each way to run each case is measured in a process of its own: on a GPU in its full size, on a CPU
in a tiny one, which only shows that all of it runs. One that fails is a row of the table, not the
end. Ways are plain eager, transformers' gradient checkpointing ("gc"), the same with Liger's fused
head and loss if that is installed, and `rekindle.fit` for a budget. Times are those of forward and
backward, with gradients present; peaks are of all that is allocated.

`--like H200` runs nothing: it predicts every way on fake tensors, and says what rules the peak.
"""

import argparse
import gc
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import rekindle
from benchmarks.measure import environment, format_table, save_json
from rekindle.planner.instruments.memory_meter import metered
from rekindle.planner.training_step import TrainingStep
from rekindle.strategy import Recompute

GIB = 2**30
PLAIN, GC, LIGER, FIT = "plain", "gc", "gc + liger", "fit "


@dataclass(frozen=True)
class Case:
    """A model at one length, and the ways to run it."""

    title: str
    kind: str
    """The family of transformers."""
    samples: int
    tokens: int
    """Tokens of each sample."""
    ways: tuple[str, ...]
    """`plain`, `gc`, `gc + liger`, and `fit` with a budget."""
    max_offload: str | None = None
    """Host memory for plans."""


CASES = {
    "32k": Case("Llama 8B", "llama", 1, 2**15, (GC, LIGER, "fit 46GiB")),
    "64k": Case("Llama 8B", "llama", 1, 2**16, (GC, LIGER, "fit 125GiB")),
    "128k": Case("Llama 8B", "llama", 1, 2**17, (LIGER, "fit 125GiB")),
    "256k": Case("Llama 8B", "llama", 1, 2**18, (LIGER, "fit 135GiB"), "100GiB"),
    "qwen2": Case("Qwen2 0.5B", "qwen2", 8, 2048, (PLAIN, GC, LIGER, "fit 35%")),
}
TINY_TOKENS = 256

_SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}


@dataclass(frozen=True)
class Row:
    """One way to run one case."""

    case: str
    way: str
    seconds: float | None = None
    peak_gib: float | None = None
    predicted_seconds: float | None = None
    predicted_peak_gib: float | None = None
    planning_seconds: float | None = None
    gradients: str | None = None
    """A digest of all gradients' bits, of a case that also runs plain."""
    plan: str = ""
    error: str = ""


def model_of(case: Case, device: str, *, is_large: bool) -> nn.Module:
    """A model with random weights: in bfloat16, or in float32 if it is a tiny one."""
    import transformers  # noqa: PLC0415

    name = {"llama": "Llama", "qwen2": "Qwen2"}[case.kind]
    sizes = _SIZES[case.kind] | ({} if is_large else _TINY)
    config = getattr(transformers, f"{name}Config")(
        **sizes, max_position_embeddings=2**20, use_cache=False, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return (model.bfloat16() if is_large else model).train()


def batch_of(case: Case, device: str, *, is_large: bool) -> dict[str, Tensor]:
    tokens = case.tokens if is_large else TINY_TOKENS
    words = _SIZES[case.kind]["vocab_size"] if is_large else _TINY["vocab_size"]
    torch.manual_seed(0)
    if device == "meta":
        ids = torch.zeros(case.samples, tokens, dtype=torch.long, device="meta")
    else:
        ids = torch.randint(words, (case.samples, tokens)).to(device)
    return {"input_ids": ids, "labels": ids}


def use_liger(kind: str) -> None:
    """Have models of a family use Liger's fused head and loss, and nothing else of it."""
    from liger_kernel import transformers as liger  # noqa: PLC0415

    getattr(liger, f"apply_liger_kernel_to_{kind}")(
        rope=False,
        swiglu=False,
        rms_norm=False,
        cross_entropy=False,
        fused_linear_cross_entropy=True,
    )


def has_liger() -> bool:
    try:
        import liger_kernel  # noqa: F401, PLC0415
    except ImportError:
        return False
    return torch.cuda.is_available()


# --- One way, in this process --------------------------------------------------------------------


def measure(name: str, way: str, steps: int = 3) -> Row:
    """Measure one way to run a case."""
    case, is_large = CASES[name], torch.cuda.is_available()
    device = "cuda" if is_large else "cpu"
    if way == LIGER:
        use_liger(case.kind)
    model = model_of(case, device, is_large=is_large)
    batch = batch_of(case, device, is_large=is_large)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    row = Row(name, way)
    if way in (GC, LIGER):
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if way.startswith(FIT):
        budget = way.removeprefix(FIT)
        # A tiny model has another scale: half of what its activations take.
        begin = time.perf_counter()
        plan = rekindle.fit(
            model,
            batch,
            budget=budget if is_large else "50%",
            max_offload=case.max_offload,
            progress=False,
        )
        row = Row(
            name,
            way,
            predicted_seconds=plan.predicted_time,
            predicted_peak_gib=plan.predicted_peak / GIB,
            planning_seconds=time.perf_counter() - begin,
            plan=str(plan),
        )
    seconds, peak = _timed(model, batch, steps)
    digest = _digest(model, batch) if PLAIN in case.ways else None
    return Row(**{**asdict(row), "seconds": seconds, "peak_gib": peak / GIB, "gradients": digest})


def _timed(model: nn.Module, batch: dict[str, Tensor], steps: int) -> tuple[float, int]:
    """Seconds of a step, and the bytes that it peaks at."""

    def step() -> None:
        model(**batch).loss.backward()

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    step()
    gc.collect()
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - begin)
    if torch.cuda.is_available():
        return median(times), torch.cuda.max_memory_allocated()
    known = TrainingStep(model, batch).existing_tensors()
    with metered(torch.device("cpu"), known) as meter:
        step()
        return median(times), meter.peak()


def _digest(model: nn.Module, batch: dict[str, Tensor]) -> str:
    """A digest of the bits of all gradients of one step."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    torch.use_deterministic_algorithms(True, warn_only=True)
    model(**batch).loss.backward()
    torch.use_deterministic_algorithms(False)
    found = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.grad is not None:
            found.update(
                parameter.grad.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            )
    return found.hexdigest()[:12]


# --- Predictions, without a device ---------------------------------------------------------------


def predict(name: str, like: str, *, is_large: bool = True) -> list[Row]:
    """Predict all ways to run a case on a device that need not be there."""
    case = CASES[name]
    model, batch = (each(case, "meta", is_large=is_large) for each in (model_of, batch_of))
    begin = time.perf_counter()
    profile = rekindle.profile(
        model, batch, device="meta", like=like, max_offload=case.max_offload, progress=False
    )
    profiling = time.perf_counter() - begin
    print(what_rules(profile))
    ways = [(GC, profile.rest), *(("gc, head by rows", rest) for rest in profile.rests)]
    rows = [
        Row(
            name,
            way,
            predicted_seconds=rest.recompute_seconds,
            predicted_peak_gib=None if rest.recompute_peak is None else rest.recompute_peak / GIB,
        )
        for way, rest in ways
    ]
    fits = [way for way in case.ways if way.startswith(FIT)]
    return rows + [_solved(name, way, profile, profiling) for way in fits]


def _solved(name: str, way: str, profile: "rekindle.Profile", profiling: float) -> Row:
    begin = time.perf_counter()
    try:
        plan = rekindle.solve(profile, way.removeprefix(FIT))
    except rekindle.BudgetError as error:
        return Row(name, way, error=str(error))
    return Row(
        name,
        way,
        predicted_seconds=plan.predicted_time,
        predicted_peak_gib=plan.predicted_peak / GIB,
        planning_seconds=profiling + time.perf_counter() - begin,
        plan=str(plan),
    )


def what_rules(profile: "rekindle.Profile") -> str:
    """The parts of a step's peak, in GiB, with every block recomputed."""
    menus = [profile.candidates(i) for i in range(len(profile.order))]
    whole = [next(each for each in menu if each.strategy == Recompute()) for menu in menus]
    parts = {
        "parameters, gradients, batch": profile.static_bytes,
        "inputs of all blocks": sum(each.bytes_held for each in whole),
        "replay and backward of one block": max(each.backward_peak for each in whole),
        "head and loss": profile.rest_peak,
        **{f"head and loss, {rest.heads[0][2]}": rest.rest_peak for rest in profile.rests},
    }
    width = max(map(len, parts))
    return "\n".join(
        f"  {name.ljust(width)}  {size / GIB:8.2f} GiB" for name, size in parts.items()
    )


# --- All of them ---------------------------------------------------------------------------------


def format_rows(rows: list[Row]) -> str:
    """A table of rows: times beside that of the first one that has one."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    heads = ["way", "s", "time", "GiB", "predicted s", "predicted GiB", "planning s", "gradients"]
    reference = {
        row.case: row.seconds
        for row in reversed(rows)
        if row.seconds and not row.way.startswith(FIT)
    }
    lines = []
    for row in rows:
        ratio = row.seconds / reference[row.case] if row.seconds and row.case in reference else None
        lines.append(
            [
                f"{row.case}: {row.way}",
                shown(row.seconds, ".2f"),
                shown(ratio, ".2f"),
                shown(row.peak_gib, ".1f"),
                shown(row.predicted_seconds, ".2f"),
                shown(row.predicted_peak_gib, ".1f"),
                shown(row.planning_seconds, ".1f"),
                row.gradients or "-",
            ]
        )
    notes = [f"{row.case}: {row.way}: {text}" for row in rows if (text := row.error or row.plan)]
    return "\n".join([format_table(heads, lines), *notes])


def measured_apart(name: str, way: str, options: argparse.Namespace) -> Row:
    """Measure one way in a process of its own; an error is a row, too."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks.longctx", "--one", name, way]
        command += ["--steps", str(options.steps), "--json", str(path)]
        try:
            done = subprocess.run(
                command, stderr=subprocess.PIPE, text=True, timeout=options.limit, check=False
            )
        except subprocess.TimeoutExpired:
            return Row(name, way, error=f"not done in {options.limit:.0f} s")
        if path.exists():
            return Row(**json.loads(path.read_text())["results"][0])
        said = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return Row(name, way, error=said[-1] if said else f"ended with {done.returncode}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=CASES, help="repeat for more (all)")
    parser.add_argument("--like", help="predict on this device, such as H200, and run nothing")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed (%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=1200.0, help="seconds of one way (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "WAY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.one:
        save_json(options.json, "longctx", [asdict(measure(*options.one, options.steps))], device)
        return 0
    print(", ".join(f"{key} {value}" for key, value in environment(device).items()))
    rows: list[Row] = []
    for name in options.case or CASES:
        case = CASES[name]
        print(f"\n{case.title}, {case.samples} x {case.tokens} tokens", flush=True)
        if options.like:
            found = predict(name, options.like)
        else:
            ways = [way for way in case.ways if way != LIGER or has_liger()]
            found = [measured_apart(name, way, options) for way in ways]
        print(format_rows(found), flush=True)
        rows += found
        if options.json:  # after each, so that a run that is ended leaves what it has
            save_json(options.json, "longctx", [asdict(row) for row in rows], device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
