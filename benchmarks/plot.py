"""The pictures in docs/budget.md, made from `benchmarks/results/`: `python -m benchmarks.plot`.

They show time against peak, both relative to plain eager, of checkpointing and of plans: of the
decoder, and of the models of the zoo. The same results give the same file, bit for bit, with the
same matplotlib. `--check` only says whether the files were made from these results.
"""

import argparse
import hashlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import RESULTS, ROOT

IMAGES = ROOT / "docs" / "img"
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


@dataclass(frozen=True)
class Picture:
    """A file, the results it is made from, and what draws them."""

    path: Path
    result: Path
    draw: Callable[[Any, list[dict[str, Any]]], None]
    """Draws results into a figure of matplotlib."""

    def drawn(self, result: dict[str, Any]) -> str:
        """The picture as SVG."""
        import matplotlib as mpl  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415

        with mpl.rc_context(STYLE):
            figure = Figure(layout="constrained")
            self.draw(figure, result["results"])
            file = io.StringIO()
            told = {"Date": None, "Description": f"results {digest(result)}"}
            figure.savefig(file, format="svg", metadata=told)
        return re.sub(r"[ \t]+$", "", file.getvalue(), flags=re.MULTILINE)

    def is_current(self) -> bool:
        """Whether the picture was made from the results that there are."""
        result = json.loads(self.result.read_text())
        return self.path.exists() and digest(result) in self.path.read_text()

    def write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(self.drawn(json.loads(self.result.read_text())))


def draw_budgets(figure: Any, results: list[dict[str, Any]]) -> None:
    """Torch's checkpointing and plans, on each shape of the decoder."""
    shapes = list(dict.fromkeys(r["shape"] for r in results))
    figure.set_size_inches(3.2 * len(shapes), 2.9)
    axes = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for ax, shape in zip(axes, shapes, strict=True):
        found = points(results, "shape", shape)
        ours = sorted(at for name, at in found.items() if name.startswith("rekindle"))
        ax.axhline(1.0, color="0.8", linewidth=0.8)
        ax.plot(*zip(*ours, strict=True), "o-", color=_OURS, markersize=4, label="rekindle")
        for name, marker in TORCH.items():
            if name in found:
                ax.plot(*found[name], marker, color="0.35", label=name)
        ax.set(title=shape, xlim=(0, 1), xlabel="activation peak (times plain)")
    axes[0].set_ylabel("time (times plain)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)


_OURS = "#d84315"
_COLUMNS = 4


def draw_zoo(figure: Any, results: list[dict[str, Any]]) -> None:
    """Each model of the zoo: its own checkpointing, the line from plain to it, and plans."""
    titles = {r["model"]: r["title"] for r in results if r["peak_ratio"] is not None}
    rows = -(-len(titles) // _COLUMNS)
    figure.set_size_inches(2.6 * _COLUMNS, 2.1 * rows + 0.6)
    axes = figure.subplots(rows, _COLUMNS, sharex=True, squeeze=False)
    for ax in axes.flat[len(titles) :]:
        ax.set_axis_off()
    legend: dict[str, Any] = {}
    for ax, (model, title) in zip(axes.flat, titles.items(), strict=False):
        found = points(results, "model", model)
        plans = sorted(at for name, at in found.items() if name.startswith("fit "))
        for name, marker in (("gc", "s"), ("recompute all", "^")):
            if name in found:
                ax.plot(*zip((1, 1), found[name], strict=True), "-", color="0.8", linewidth=0.8)
                ax.plot(*found[name], marker, color="0.35", markersize=4, label=name)
        if plans:
            ax.plot(*zip(*plans, strict=True), "o", color=_OURS, markersize=4, label="fit")
        ax.plot(1, 1, "o", color="0.35", markersize=4, label="plain")
        ax.set_title(title.split(",")[0].strip("`"), fontsize=9)
        ax.set(xlim=(0, 1.05))
        ax.set_ylim(0.95, max(1.1, ax.get_ylim()[1]))
        legend |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    figure.supxlabel("activation peak (times plain)", fontsize=9)
    figure.supylabel("time (times plain)", fontsize=9)
    figure.legend(legend.values(), legend, loc="outside lower right", ncols=4)


def points(results: list[dict[str, Any]], key: str, value: str) -> dict[str, tuple[float, float]]:
    """Peak and time of each strategy on a shape, or of a model."""
    return {
        r["strategy"]: (r["peak_ratio"], r["time_ratio"])
        for r in results
        if r[key] == value and r["peak_ratio"] is not None
    }


def digest(result: dict[str, Any]) -> str:
    """What tells results apart."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:16]


BUDGET = Picture(IMAGES / "budget.svg", RESULTS / "budget-h200.json", draw_budgets)
ZOO = Picture(IMAGES / "zoo.svg", RESULTS / "zoo-h200.json", draw_zoo)
PICTURES = [picture for picture in (BUDGET, ZOO) if picture.result.exists()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    if parser.parse_args().check:
        return 0 if all(picture.is_current() for picture in PICTURES) else 1
    for picture in PICTURES:
        picture.write()
        print(f"written: {picture.path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
