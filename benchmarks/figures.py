"""The tables in README and docs, made from `benchmarks/results/`: `python -m benchmarks.figures`.

Figures are copied by this program, not by hand, into the place between two comments of each page.
`--check` only says whether the pages are up to date.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_PLACE = re.compile(r"(<!-- figures: begin[^>]*-->\n).*?(<!-- figures: end -->)", re.DOTALL)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def overhead(results: dict[str, Any], only: Sequence[str] | None = None) -> str:
    """The host cost of one region: microseconds, and times torch's non-reentrant cost."""
    regions = {k: v for k, v in results["results"].items() if "torch" in v and k != "no_grad"}
    names = only or list(next(iter(regions.values())))
    rows = [
        [name, *(f"{c[name]['median_us']:.0f} ({c[name]['ratio']:.2f})" for c in regions.values())]
        for name in names
    ]
    return table(["µs over the recompute (times torch's)", *regions], rows)


def ops(results: dict[str, Any]) -> str:
    """Microseconds of host time that an op of a region costs, by the strategy of the region."""
    found = results["results"]
    rows = [
        [name, *(f"{us:.1f}" for us in (forward, backward, forward + backward))]
        for name, cost in found["costs"].items()
        for forward, backward in [(cost["forward_us"], cost["backward_us"])]
    ]
    heads = [f"µs an op over plain, of {found['ops']} ops", "forward", "backward", "both"]
    return table(heads, rows)


def imports(results: dict[str, Any]) -> str:
    """Milliseconds of an import on top of torch's, and the modules it loads."""
    rows = [
        [f"`{r['statement']}`", f"{r['milliseconds']:.0f}", str(r["modules"])]
        for r in results["results"]
    ]
    return table(["on top of `import torch`", "ms of CPU time", "modules"], rows)


def host(results: dict[str, Any]) -> str:
    """CPU milliseconds of a host-bound step, with every block recomputed and without."""
    rows = [
        [
            r["model"],
            f"{r['plain_ms']:.2f}",
            "none" if r["gc_ms"] is None else f"{r['gc_ms']:.2f}",
            f"{r['recompute_ms']:.2f}",
            "" if r["to_gc"] is None else f"{r['to_gc']:.2f}",
        ]
        for r in results["results"]
    ]
    return table(["CPU ms a step", "plain", "gc", "recompute all", "times gc"], rows)


def no_gpu(results: dict[str, Any]) -> str:
    """Seconds and host memory of the command, without a GPU."""
    rows = [
        [
            f"`rekindle {r['command']}`, {r['shape']}",
            *(f"{r[key]:.{digits}f}" for key, digits in _OF_COMMAND.items()),
        ]
        for r in results["results"]
    ]
    heads = ["as on an H100", "seconds", "of CPU time", "host memory, GiB", "peak of the step, GiB"]
    return table(heads, rows)


_OF_COMMAND = {"seconds": 0, "cpu_seconds": 0, "host_gib": 1, "peak_gib": 0}


def recompute(results: dict[str, Any], only: Sequence[str] | None = None) -> str:
    """Time and activation peak of a whole decoder, times plain eager's."""
    shapes = list(dict.fromkeys(r["shape"] for r in results["results"]))
    names = only or list(dict.fromkeys(r["strategy"] for r in results["results"]))
    cells = {(r["strategy"], r["shape"]): r for r in results["results"]}
    heads = [
        "every layer a region (times plain)",
        *(f"{s} {what}" for s in shapes for what in ("time", "peak")),
    ]
    keys = [(shape, key) for shape in shapes for key in ("time_ratio", "peak_ratio")]
    rows = [[name, *(f"{cells[name, s][key]:.2f}" for s, key in keys)] for name in names]
    return table(heads, rows)


def offload(results: dict[str, Any], only: Sequence[str] | None = None) -> str:
    """Time and activation peak with offload, times plain eager's; and what went over the link."""
    shapes = list(dict.fromkeys(r["shape"] for r in results["results"]))
    names = only or list(dict.fromkeys(r["strategy"] for r in results["results"]))
    cells = {(r["strategy"], r["shape"]): r for r in results["results"]}
    columns = [("time", "time_ratio", ".2f"), ("peak", "peak_ratio", ".2f")]
    if only is None:
        columns += [
            ("GiB each way", "gib_out", ".1f"),
            ("GiB derived", "gib_derived", ".1f"),
            ("ms waited", "ms_waited", ".0f"),
            ("over the link", "link_ratio", ".2f"),
        ]
    heads = ["activations offloaded (times plain)"]
    heads += [f"{shape} {head}" for shape in shapes for head, _, _ in columns]
    rows = [
        [name, *(_cell(cells[name, s], key, form) for s in shapes for _, key, form in columns)]
        for name in names
    ]
    return table(heads, rows)


def _cell(result: dict[str, Any], key: str, form: str) -> str:
    is_counted = result["gib_out"] or not key.startswith(("gib_", "ms_", "link_"))
    return format(result[key], form) if is_counted else ""


def budget(results: dict[str, Any], only: Sequence[str] | None = None) -> str:
    """Time and activation peak under plans, times plain eager's, with what was predicted."""
    shapes = list(dict.fromkeys(r["shape"] for r in results["results"]))
    names = only or list(dict.fromkeys(r["strategy"] for r in results["results"]))
    cells = {(r["strategy"], r["shape"]): r for r in results["results"]}
    heads = [
        "budget (times plain)",
        *(f"{s} {what} (predicted)" for s in shapes for what in ("time", "peak")),
    ]
    rows = [
        [
            name,
            *(
                _with_predicted(cells.get((name, shape)), what)
                for shape in shapes
                for what in ("time_ratio", "peak_ratio")
            ),
        ]
        for name in names
    ]
    return table(heads, rows)


def _with_predicted(result: dict[str, Any] | None, what: str) -> str:
    if result is None or result[what] is None:
        return ""
    predicted = result[f"predicted_{what}"]
    return f"{result[what]:.2f}" + ("" if predicted is None else f" ({predicted:.2f})")


def planning(results: dict[str, Any]) -> str:
    """Seconds to profile and to solve, by the number of layers."""
    shapes = list(dict.fromkeys(r["shape"] for r in results["results"]))
    counts = list(dict.fromkeys(r["layers"] for r in results["results"]))
    cells = {(r["layers"], r["shape"]): r for r in results["results"]}
    keys = [("a step", "step_seconds", ".2f"), ("profile", "profile_seconds", ".1f")]
    keys.append(("solve", "solve_seconds", ".2f"))
    heads = ["layers (seconds)", *(f"{s} {word}" for s in shapes for word, _, _ in keys)]
    rows = [
        [
            str(count),
            *(format(cells[count, s][key], form) for s in shapes for _, key, form in keys),
        ]
        for count in counts
    ]
    return table(heads, rows)


def compiled(results: dict[str, Any]) -> str:
    """Time and activation peak of compiled layers, times plain eager's."""
    shapes = list(dict.fromkeys(r["shape"] for r in results["results"]))
    names = list(dict.fromkeys(r["strategy"] for r in results["results"]))
    cells = {(r["strategy"], r["shape"]): r for r in results["results"]}
    columns = ("time", "peak", "GiB each way", "copies hidden")
    heads = ["every layer compiled (times plain eager)"]
    heads += [f"{shape} {head}" for shape in shapes for head in columns]
    rows = []
    for name in names:
        row = [name]
        for shape in shapes:
            found, eager = cells.get((name, shape)), cells["plain eager", shape]
            if found is None:  # a plan for less than the least that works
                row += ["", "", "", ""]
                continue
            row.append(f"{found['milliseconds'] / eager['milliseconds']:.2f}")
            row.append(f"{found['peak_mib'] / eager['peak_mib']:.2f}")
            row.append(f"{found['gib_moved']:.1f}" if found["gib_moved"] else "")
            row.append("" if found["hidden"] is None else f"{found['hidden']:.0%}")
        rows.append(row)
    return table(heads, rows)


def policies(results: dict[str, Any]) -> str:
    """What policies hold and replay in one block."""
    rows = [
        [
            f"`{r['policy']}`",
            f"{r['mib_held']:.0f}",
            f"{r['share']:.2f}",
            str(r["ops_replayed"]),
            str(r["ops_computed"]),
        ]
        for r in results["results"]
    ]
    return table(["policy", "MiB held", "of plain", "ops replayed", "of these no views"], rows)


def footprint(results: dict[str, Any]) -> str:
    """What planning takes of a device's memory, beside a step with every block recomputed."""
    rows = []
    for r in results["results"]:
        left = max(r["after"], r["after_twice"] or 0) - r["before"]
        peaks = [f"{r[key] / 2**30:.2f}" for key in ("planning_peak", "recompute_peak")]
        plan, predicted = (r[key] / 2**30 for key in ("measured_peak", "predicted_peak"))
        peaks.append(f"{plan:.2f} ({predicted:.2f})")
        rows.append([r["model"], r["budget"], str(left), *peaks, f"{r['seconds']:.0f}"])
    heads = ["model", "budget", "left behind, bytes", "planning peak, GiB", "recompute peak, GiB"]
    return table([*heads, "plan's peak, GiB (predicted)", "`fit`, s"], rows)


def zoo(results: dict[str, Any]) -> str:
    """Time and activation peak of models under their own checkpointing and under plans."""
    rows = results["results"]
    models = {row["model"]: row["title"] for row in rows}
    cells = {(row["model"], row["strategy"]): row for row in rows}
    fits = sorted({r["strategy"] for r in rows if r["strategy"].startswith("fit ")}, key=_by_share)
    heads = ["time at activation peak (times plain)", "gc"]
    heads += [_name_of_fit(name) for name in fits] + ["planning, s (steps)"]
    lines = []
    for model, title in models.items():
        failed = cells.get((model, "process"))
        planned = [cells[model, name] for name in fits if (model, name) in cells]
        longest = max((row["planning_seconds"] or 0.0 for row in planned), default=0.0)
        steps = max((row["planning_steps"] or 0.0 for row in planned), default=0.0)
        lines.append(
            [
                title,
                _zoo_cell(cells.get((model, "gc"), None if (model, "plain") in cells else failed)),
                *(_zoo_cell(cells.get((model, name), failed)) for name in fits),
                f"{longest:.1f} ({steps:.0f})" if planned else "",
            ]
        )
    return table(heads, lines)


def _by_share(name: str) -> tuple[bool, float]:
    """Sort the largest share first, and the budget of the model's own checkpointing last."""
    share = name.removeprefix("fit ")
    return (True, 0.0) if share == "gc" else (False, -float(share))


def _name_of_fit(name: str) -> str:
    share = name.removeprefix("fit ")
    head = "fit, as gc" if share == "gc" else f"fit {float(share):.0%}"
    return f"{head} (predicted; line)"


def _zoo_cell(row: dict[str, Any] | None) -> str:
    """A time at a peak; of a plan, with what was predicted, and the time of the line at this peak.

    The line is that between plain and gc.
    """
    if row is None:
        return "none"
    if row["time_ratio"] is None:
        error = row["error"] or "not measured"
        return "refused" if error.startswith("BudgetError") else error.split(":")[0]
    text = f"{row['time_ratio']:.2f} at {row['peak_ratio']:.2f}"
    if not row["strategy"].startswith("fit "):
        return text
    predicted = f"{row['predicted_time_ratio']:.2f} at {row['predicted_peak_ratio']:.2f}"
    line = "" if row["line_ratio"] is None else f"; {row['line_ratio']:.2f}"
    return f"{text} ({predicted}{line})"


def source(results: dict[str, Any], command: str) -> str:
    device = results["device"] if results["device"] != "cpu" else "CPU, one thread"
    return f"`{command}`, one run on {device}, torch {results['torch']}:"


def pages() -> dict[Path, list[str]]:
    """What stands between the comments of each page, in their order."""
    of_region = json.loads((RESULTS / "overhead-cpu.json").read_text())
    of_step = json.loads((RESULTS / "host-cpu.json").read_text())
    each_op = json.loads((RESULTS / "ops-cpu.json").read_text())
    imported = json.loads((RESULTS / "imports-cpu.json").read_text())
    gpu = json.loads((RESULTS / "recompute-h200.json").read_text())
    moved = json.loads((RESULTS / "offload-h200.json").read_text())
    held = json.loads((RESULTS / "policies.json").read_text())
    planned = json.loads((RESULTS / "budget-h200.json").read_text())
    taken = json.loads((RESULTS / "footprint-h200.json").read_text())
    in_graphs = json.loads((RESULTS / "compiled-h200.json").read_text())
    without_gpu = json.loads((RESULTS / "no-gpu-cpu.json").read_text())
    fourth = "scripts/bench budget --shape all"
    fifth = "scripts/bench planning"
    counted = [
        (json.loads(path.read_text()), command)
        for name, command in (("h200", f"{fifth} --shape 8b --layers 8 32"), ("cpu", fifth))
        if (path := RESULTS / f"planning-{name}.json").exists()
    ]
    first, second = "scripts/bench overhead", "scripts/bench recompute --shape all"
    third = "scripts/bench offload --shape all"
    short = ["torch", "torch reentrant", "rekindle"]
    selective = ["torch, keep matmuls and attention", "rekindle, keep matmuls and attention"]
    return {
        ROOT / "README.md": [
            _joined(
                source(of_region, first),
                overhead(of_region, short),
                source(gpu, second),
                recompute(gpu, ["plain", *short, *selective]),
                source(planned, fourth),
                budget(planned),
                source(moved, third),
                offload(moved, ["plain", "save_on_cpu", "auto", "share 0.5", "share 1.0"]),
            )
        ],
        ROOT / "docs" / "command.md": [
            _joined(source(without_gpu, "scripts/bench no_gpu"), no_gpu(without_gpu))
        ],
        ROOT / "docs" / "overhead.md": [
            _joined(
                *(source(of_region, first), overhead(of_region)),
                *(source(of_step, "scripts/bench host"), host(of_step)),
                *(source(each_op, "scripts/bench ops"), ops(each_op)),
                *(source(gpu, second), recompute(gpu)),
                *(source(imported, "scripts/bench imports"), imports(imported)),
            )
        ],
        ROOT / "docs" / "policies.md": [
            _joined(
                "`scripts/bench policies`: one block of the decoder's shape `8b`, on fake tensors:",
                policies(held),
            )
        ],
        ROOT / "docs" / "budget.md": [
            _joined(source(taken, "scripts/bench footprint --model all"), footprint(taken)),
            _joined(
                source(planned, fourth),
                budget(planned),
                *(part for r, by in counted for part in (source(r, by), planning(r))),
            ),
            zoo_place(),
        ],
        ROOT / "docs" / "compile.md": [
            _joined(source(in_graphs, "scripts/bench compiled --shape all"), compiled(in_graphs))
        ],
        ROOT / "docs" / "offload.md": [_joined(source(moved, third), offload(moved))],
    }


def zoo_place(path: Path = RESULTS / "zoo-h200.json") -> str:
    """The table of the zoo with its source; without results, a line that says so."""
    if not path.exists():
        return "Not measured yet: `scripts/bench zoo` does."
    results = json.loads(path.read_text())
    return _joined(source(results, "scripts/bench zoo"), zoo(results))


def _joined(*parts: str) -> str:
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    check = parser.parse_args().check
    stale = 0
    for page, figures in pages().items():
        text = page.read_text()
        assert len(_PLACE.findall(text)) == len(figures), f"places in {page.name}"
        each = iter(figures)
        filled = _PLACE.sub(lambda m, each=each: f"{m[1]}\n{next(each)}\n\n{m[2]}", text)  # type: ignore[misc]
        if filled != text:
            stale += 1
            print(f"{'out of date' if check else 'written'}: {page.relative_to(ROOT)}")
            if not check:
                page.write_text(filled)
    return stale if check else 0


if __name__ == "__main__":
    raise SystemExit(main())
