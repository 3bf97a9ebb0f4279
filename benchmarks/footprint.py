"""Device memory that planning itself takes: `scripts/bench footprint [--model all]`.

The models are stock models of transformers with random weights, each in a process of its own. After
a warm-up step, `fit` and `remove` run twice. Measured are the bytes on the device before and after
each, the peak of planning, and its bound: the peak of a step with every block recomputed.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rekindle
from benchmarks.measure import environment, format_table, save_json

_MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and a budget."""

    build: Callable[[], nn.Module]
    batch: Callable[[str], dict[str, Tensor]]
    budget: str
    autocast: bool = False


@dataclass(frozen=True)
class Footprint:
    """Bytes, of one model."""

    model: str
    budget: str
    before: int
    after: int
    after_twice: int | None
    """After a second `fit`; None where one took more than a minute."""
    planning_peak: int
    recompute_peak: int
    measured_peak: int
    predicted_peak: int
    seconds: float
    """Of the first `fit`."""


def measure(name: str, case: Case, device: str) -> Footprint:
    model = case.build().train()
    batch = case.batch(device)

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16) if case.autocast else nullcontext():
            out: Tensor = model(**batch).loss
        return out

    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    loss().backward()  # with gradients left, as after a step that accumulates
    model.gradient_checkpointing_disable()  # type: ignore[operator]
    before = _allocated(device)
    start = time.perf_counter()
    plan = rekindle.fit(model, loss, case.budget)
    seconds = time.perf_counter() - start
    rekindle.remove(model)
    after = _allocated(device)
    recompute_peak = _recomputed(model, loss, device)
    after_twice, peak_again = None, 0
    if seconds < 60:
        peak_again = rekindle.fit(model, loss, case.budget).planning_peak or 0
        rekindle.remove(model)
        after_twice = _allocated(device)
    assert plan.planning_peak is not None
    assert plan.measured_peak is not None
    return Footprint(
        name,
        case.budget,
        before,
        after,
        after_twice,
        max(plan.planning_peak, peak_again),
        recompute_peak,
        plan.measured_peak,
        plan.predicted_peak,
        round(seconds, 1),
    )


def _recomputed(model: nn.Module, loss: Callable[[], Tensor], device: str) -> int:
    """The peak of a step with every block recomputed, gradients in place."""
    rekindle.apply(model, "recompute")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss().backward()
    rekindle.remove(model)
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _allocated(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _ids(rows: int, length: int, words: int) -> Callable[[str], dict[str, Tensor]]:
    def batch(device: str) -> dict[str, Tensor]:
        ids = torch.randint(words, (rows, length), device=device)
        return {"input_ids": ids, "labels": ids}

    return batch


def _build(kind: str, config: str, dtype: torch.dtype, lora: bool = False, **sizes: Any) -> Any:
    def build() -> Any:
        import transformers  # noqa: PLC0415

        device = "cuda" if torch.cuda.is_available() else "cpu"
        made = getattr(transformers, config)(**sizes, use_cache=False)
        with torch.device(device):
            model = getattr(transformers, kind)(made).to(dtype)
        return _with_lora(model) if lora else model

    return build


def _with_lora(model: nn.Module) -> nn.Module:
    import peft  # noqa: PLC0415

    config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
    wrapped: nn.Module = peft.get_peft_model(model, config)
    return wrapped


_LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
_LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
}
_FP32, _BF16 = torch.float32, torch.bfloat16

CASES = {
    "gpt2-medium": Case(
        _build("GPT2LMHeadModel", "GPT2Config", _FP32, n_embd=1024, n_layer=24, n_head=16),
        _ids(16, 1024, 50257),
        "60%",
        autocast=True,
    ),
    "bert-large": Case(
        _build(
            *("BertForMaskedLM", "BertConfig", _FP32),
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
        _ids(64, 512, 30522),
        "60%",
        autocast=True,
    ),
    "t5-large": Case(
        _build(
            *("T5ForConditionalGeneration", "T5Config", _FP32),
            d_model=1024,
            d_ff=4096,
            num_layers=24,
            num_heads=16,
            decoder_start_token_id=0,
        ),
        _ids(16, 512, 32128),
        "60%",
        autocast=True,
    ),
    "llama-1b-lora": Case(
        _build("LlamaForCausalLM", "LlamaConfig", _BF16, lora=True, **_LLAMA_1B),
        _ids(4, 2048, 128256),
        "60%",
    ),
    "llama-8b-32k": Case(
        _build("LlamaForCausalLM", "LlamaConfig", _BF16, **_LLAMA_8B),
        _ids(1, 32768, 128256),
        "120GiB",
    ),
}
TINY = {
    "tiny-gpt2": Case(
        _build(
            *("GPT2LMHeadModel", "GPT2Config", _FP32),
            n_embd=32,
            n_layer=3,
            n_head=2,
            vocab_size=64,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
        ),
        _ids(2, 32, 64),
        "60%",
    ),
}


def format_results(results: list[Footprint]) -> str:
    def mib(nbytes: int) -> str:
        return f"{nbytes / _MIB:,.1f}"

    rows = [
        [
            r.model,
            r.budget,
            mib(r.before),
            f"{r.after - r.before:+,}",
            "" if r.after_twice is None else f"{r.after_twice - r.before:+,}",
            mib(r.planning_peak),
            mib(r.recompute_peak),
            mib(r.measured_peak),
            mib(r.predicted_peak),
            f"{r.seconds:.1f}",
        ]
        for r in results
    ]
    head = ["model", "budget", "before, MiB", "left, bytes", "left twice, bytes"]
    head += ["planning peak, MiB", "recompute peak, MiB", "plan's peak, MiB", "predicted, MiB"]
    return format_table([*head, "fit, s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="What planning takes of a device's memory.")
    known = {**CASES, **TINY}
    parser.add_argument("--model", choices=[*known, "all"], default="tiny-gpt2", nargs="+")
    parser.add_argument("--one", action="store_true", help="in this process, as a line of JSON")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = [options.model] if isinstance(options.model, str) else options.model
    names = list(CASES) if "all" in asked else asked
    if device == "cpu" and any(name in CASES for name in names):
        parser.error("without a GPU only --model tiny-gpt2 can be measured")
    if options.one:
        print(json.dumps(asdict(measure(names[0], known[names[0]], device))))
        return
    print(", ".join(f"{key} {value}" for key, value in environment(device).items()))
    results = []
    for name in names:
        command = [sys.executable, "-m", "benchmarks.footprint", "--one", "--model", name]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ran.returncode:
            print(f"{name}: failed")
            continue
        results.append(Footprint(**json.loads(ran.stdout.splitlines()[-1])))
        print(format_results(results[-1:]), flush=True)
    print(format_results(results))
    if options.json:
        save_json(options.json, "footprint", [asdict(result) for result in results], device)


if __name__ == "__main__":
    main()
