"""Seconds and host memory that the command takes for large models without a GPU.

The commands are `rekindle explain` and `rekindle plan`, as on an H100, of a Llama of transformers
that a configuration describes, with the state of AdamW: `scripts/bench no_gpu`. Each one is a
process, so that the figures are those of all that it does, imports included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.llama import LLAMA_8B, LLAMA_70B, TINY_LLAMA, LlamaShape
from benchmarks.measure import environment, format_table, save_json

SHAPES = {"8b": LLAMA_8B, "70b": LLAMA_70B, "tiny": TINY_LLAMA}
COMMANDS = {"explain": ["explain"], "plan": ["plan", "--budget", "40%"]}
LIKE = "H100"


@dataclass(frozen=True)
class Answer:
    """One command on one shape."""

    shape: str
    command: str
    seconds: float
    cpu_seconds: float
    """Of all threads; on an idle machine about the seconds."""
    host_gib: float
    """The most memory that the process had, torch and transformers included."""
    peak_gib: float
    """The peak of the step that is explained or planned."""


def measure(shape: LlamaShape, command: str) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config_of(shape)))
        answer = Path(folder, "answer.json")
        sizes = ["--batch", str(shape.batch), "--seq", str(shape.tokens)]
        where = ["--like", LIKE, "--save", str(answer)]
        call = [sys.executable, "-m", "rekindle", *COMMANDS[command], f"hf:{path}", *sizes, *where]
        start = time.perf_counter()
        process = subprocess.Popen(call, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"rekindle {command} of {shape.name} failed")
        found = json.loads(answer.read_text())
    peak = found["peak" if command == "explain" else "predicted_peak"]
    cpu = used.ru_utime + used.ru_stime
    unit = 2**30 if sys.platform == "darwin" else 2**20
    host = used.ru_maxrss / unit
    return Answer(shape.name, command, *(round(x, 2) for x in (seconds, cpu, host, peak / 2**30)))


def config_of(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.tokens,
        "tie_word_embeddings": shape.tied,
        "dtype": "bfloat16",
    }


def format_results(results: list[Answer]) -> str:
    rows = [
        [
            *(f"{r.command} {r.shape}", f"{r.seconds:.1f}", f"{r.cpu_seconds:.1f}"),
            *(f"{r.host_gib:.2f}", f"{r.peak_gib:.1f}"),
        ]
        for r in results
    ]
    heads = ["command", "seconds", "of CPU", "host memory, GiB", "peak of the step, GiB"]
    return format_table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the command takes without a GPU.")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    options = parser.parse_args()

    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    names = ["8b", "70b"] if options.shape == "all" else [options.shape]
    results = [measure(SHAPES[name], command) for name in names for command in COMMANDS]
    print(f"\n{format_results(results)}")
    if options.json:
        save_json(options.json, "no_gpu", [asdict(result) for result in results])


if __name__ == "__main__":
    main()
