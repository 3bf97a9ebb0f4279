"""The picture in docs/budget.md, made from `benchmarks/results/`: `python -m benchmarks.plot`.

It shows time against peak, both relative to plain eager, of torch's checkpointing and of plans. The
same results give the same file, bit for bit, with the same matplotlib. `--check` only says whether
the file was made from these results.
"""

import argparse
import hashlib
import io
import json
import re
from typing import Any

from benchmarks.figures import RESULTS, ROOT

PICTURE = ROOT / "docs" / "img" / "budget.svg"
RESULT = RESULTS / "budget-h200.json"
STYLE = {
    "svg.hashsalt": "rekindle",  # names of parts that do not change from run to run
    "svg.fonttype": "none",  # text as text
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
TORCH = {
    "torch": "o",
    "torch, keep matmuls and attention": "s",
    "torch, keep every second matmul": "^",
}


def points(results: list[dict[str, Any]], shape: str) -> dict[str, tuple[float, float]]:
    """Peak and time of each strategy on a shape."""
    return {
        r["strategy"]: (r["peak_ratio"], r["time_ratio"])
        for r in results
        if r["shape"] == shape and r["peak_ratio"] is not None
    }


def drawn(result: dict[str, Any]) -> str:
    """The picture as SVG."""
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    results = result["results"]
    shapes = list(dict.fromkeys(r["shape"] for r in results))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.2 * len(shapes), 2.9), layout="constrained")
        axes = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
        for ax, shape in zip(axes, shapes, strict=True):
            found = points(results, shape)
            ours = sorted(at for name, at in found.items() if name.startswith("rekindle"))
            ax.axhline(1.0, color="0.8", linewidth=0.8)
            ax.plot(*zip(*ours, strict=True), "o-", color="#d84315", markersize=4, label="rekindle")
            for name, marker in TORCH.items():
                if name in found:
                    ax.plot(*found[name], marker, color="0.35", label=name)
            ax.set(title=shape, xlim=(0, 1), xlabel="activation peak (times plain)")
        axes[0].set_ylabel("time (times plain)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        file = io.StringIO()
        told = {"Date": None, "Description": f"results {digest(result)}"}
        figure.savefig(file, format="svg", metadata=told)
    return re.sub(r"[ \t]+$", "", file.getvalue(), flags=re.MULTILINE)


def digest(result: dict[str, Any]) -> str:
    """What tells results apart."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:16]


def is_current() -> bool:
    """Whether the picture was made from the results that there are."""
    return PICTURE.exists() and digest(json.loads(RESULT.read_text())) in PICTURE.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    if parser.parse_args().check:
        return 0 if is_current() else 1
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn(json.loads(RESULT.read_text())))
    print(f"written: {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
