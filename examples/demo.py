"""Train a small GPT with and without rekindle, and compare: `scripts/demo`.

Both runs start from the same seed and learn the same text with the same dropout; their steps take
turns. The runs differ only in how a block is called: `block(x)` or `rekindle.checkpoint(block, x)`.
Every gradient of every step is compared bit for bit; a difference is reported, with exit code 1.

Then `rekindle.fit` makes the model fit three budgets, and a page shows all plans between none and
the smallest, and where the memory goes: `demo.html`, or what `--page` names.

Activation memory is measured in a separate step, because measuring takes time. `LiveBytes` sees
every op that runs, forward and backward, and adds up the storages that ops made and that are alive:
each storage once, however many tensors share it, from the op that makes it until it is freed.
Parameters, their gradients and the batch exist before the step and do not count. So the figure is
what a training step needs on top of the model, in exact bytes, by the same rule for both runs. At
the end of the plain run's forward it equals the bytes that saved-tensor hooks see, plus the loss.
Two things are not counted: workspace inside one op, and the state of the random number generator
(5 KB a region), which torch copies without an op.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import rekindle
from rekindle.planner.instruments.memory_meter import LiveBytes

LAYERS, DIM, HEADS, CONTEXT, BATCH, DROPOUT = 6, 96, 4, 64, 8, 0.1
STEPS = 30
BUDGETS = ("75%", "50%", "35%")
"""Shares of the peak that activations have without a plan."""

TEXT = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.

That time of year thou mayst in me behold
When yellow leaves, or none, or few, do hang
Upon those boughs which shake against the cold,
Bare ruin'd choirs, where late the sweet birds sang.
In me thou see'st the twilight of such day
As after sunset fadeth in the west,
Which by and by black night doth take away,
Death's second self, that seals up all in rest.
In me thou see'st the glowing of such fire
That on the ashes of his youth doth lie,
As the death-bed whereon it must expire,
Consum'd with that which it was nourish'd by.
This thou perceiv'st, which makes thy love more strong,
To love that well which thou must leave ere long.
"""
ALPHABET = sorted(set(TEXT))
CODES = torch.tensor([ALPHABET.index(character) for character in TEXT])

RunBlock = Callable[[nn.Module, Tensor], Tensor]


def plain(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = block(x)
    return out


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x)
    return out


class Block(nn.Module):
    """A transformer layer with dropout in all the usual places."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp_norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT(nn.Module):
    """A model that predicts the next character; `run_block` calls its blocks."""

    def __init__(self, run_block: RunBlock) -> None:
        super().__init__()
        self.run_block = run_block
        self.characters = nn.Embedding(len(ALPHABET), DIM)
        self.positions = nn.Parameter(torch.randn(CONTEXT, DIM) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, len(ALPHABET)))

    def forward(self, codes: Tensor, following: Tensor) -> Tensor:
        x = self.characters(codes) + self.positions
        for block in self.blocks:
            x = self.run_block(block, x)
        return cross_entropy(self.head(x).flatten(0, 1), following.flatten())

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.named_parameters() if p.grad is not None}


def new_model(run_block: RunBlock) -> GPT:
    """Make a model with the same parameters every time, and gradients of zero."""
    torch.manual_seed(0)
    model = GPT(run_block)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def draw_batch() -> tuple[Tensor, Tensor]:
    """Draw random pieces of the text, and the same pieces one character later."""
    starts = torch.randint(len(CODES) - CONTEXT, (BATCH, 1))
    pieces = CODES[starts + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


@dataclass(frozen=True)
class Step:
    """Results of one training step; the gradients are valid until the model's next step."""

    loss: float
    seconds: float
    gradients: dict[str, Tensor]


def train(run_block: RunBlock) -> Iterator[Step]:
    """Train a new model, one step per item; each step is seeded, so that runs can take turns."""
    model = new_model(run_block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(STEPS):
        torch.manual_seed(number)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        loss = model(*draw_batch())
        loss.backward()
        optimizer.step()
        yield Step(loss.item(), time.perf_counter() - start, model.gradients())


@dataclass(frozen=True)
class Memory:
    """Activation bytes of one step."""

    held: int
    """Bytes at the end of the forward: what is held for the backward."""
    peak: int
    """The most bytes at any moment, replays and the backward's own intermediates included."""


def measure_memory(run_block: RunBlock) -> Memory:
    model = new_model(run_block)
    codes, following = draw_batch()
    known = [codes, following, *model.parameters(), *model.gradients().values()]
    with LiveBytes(not_counted=known) as live:
        loss = model(codes, following)
        held = live.now()
        loss.backward()
    return Memory(held, live.peak())


def fit_budgets(page: Path) -> tuple[str, bool]:
    """Fit the model to three budgets; return a table, and whether all gradients agree.

    Writes the page.
    """
    batch = draw_batch()
    expected = gradients_of(new_model(plain), batch)
    profile = rekindle.profile(new_model(plain), batch)
    lines = [f"{'budget':>10}{'predicted':>12}{'measured':>12}{'time':>8}{'gradients':>12}"]
    agree = True
    for share in BUDGETS:
        model = new_model(plain)
        plan = rekindle.fit(model, batch, share)
        assert plan.measured_peak is not None, "fit measures"
        found = gradients_of(model, batch)
        same = all(torch.equal(found[name], expected[name]) for name in expected)
        agree = agree and same
        peaks = [f"{peak / 2**20:.1f} MiB" for peak in (plan.predicted_peak, plan.measured_peak)]
        ratio = f"{plan.predicted_time / plan.plain_time:.2f}x"
        agreement = "identical" if same else "different"
        lines.append(f"{share:>10}{peaks[0]:>12}{peaks[1]:>12}{ratio:>8}{agreement:>12}")
    lines += ["", "What less memory costs (of the whole step, parameters and gradients too):"]
    points = rekindle.frontier(profile, 6)
    for point in points:
        times = point.seconds / points[0].seconds
        lines.append(f"{point.peak / 2**20:>8.1f} MiB{times:>8.2f}x the time")
    points.report(page, explanation=rekindle.explain(new_model(plain), batch))
    return "\n".join(lines), agree


def gradients_of(model: GPT, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=False)
    model(*batch).backward()
    return {name: gradient.clone() for name, gradient in model.gradients().items()}


def first_difference(step: Step, other: Step) -> str | None:
    """Return the name of the first gradient that differs in a bit; None if all are equal."""
    for name, gradient in step.gradients.items():
        bits, other_bits = (g.view(torch.uint8) for g in (gradient, other.gradients[name]))
        if not torch.equal(bits, other_bits):
            return name
    return None


def format_table(
    memory: tuple[Memory, Memory], seconds: tuple[float, float], losses: tuple[float, float]
) -> str:
    def row(title: str, values: tuple[float, float], scale: float, unit: str) -> str:
        left, right = (f"{value / scale:.1f} {unit}" for value in values)
        return f"{title:<30}{left:>12}{right:>12}{values[1] / values[0]:>8.2f}"

    before, after = memory
    return "\n".join(
        [
            f"{'':<30}{'plain':>12}{'rekindle':>12}{'ratio':>8}",
            row("peak activation memory", (before.peak, after.peak), 2**20, "MiB"),
            row("held from forward to backward", (before.held, after.held), 2**20, "MiB"),
            row("time per step", seconds, 1e-3, "ms"),
            f"{'loss at the end':<30}{losses[0]:>12.6f}{losses[1]:>12.6f}",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains a small GPT with and without rekindle.")
    parser.add_argument("--page", type=Path, default="demo.html", help="(%(default)s)")
    page: Path = parser.parse_args().page
    torch.set_num_threads(1)  # more threads gain nothing on such small tensors, and times vary
    count = sum(parameter.numel() for parameter in GPT(plain).parameters())
    print(f"A GPT of {LAYERS} layers and {count:,} parameters, dropout {DROPOUT}, {STEPS} steps\n")
    memory = (measure_memory(plain), measure_memory(checkpointed))

    steps: list[tuple[Step, Step]] = []
    differences: list[str] = []
    for pair in zip(train(plain), train(checkpointed), strict=True):
        different = first_difference(*pair)
        if different:
            differences.append(f"step {len(steps)}, {different}")
        steps.append(pair)

    seconds = (median(a.seconds for a, _ in steps), median(b.seconds for _, b in steps))
    losses = (steps[-1][0].loss, steps[-1][1].loss)
    print(format_table(memory, seconds, losses))
    with rekindle.observe() as seen:
        new_model(checkpointed)(*draw_batch()).backward()
    print(f"\nOne step as rekindle.observe() sees it:\n{seen}\n")
    table, agree = fit_budgets(page)
    print(f"rekindle.fit(model, batch, budget):\n{table}\n")
    if not agree:
        differences.append("a plan")
    if differences:
        print(f"gradients identical: no (first in {differences[0]})")
        return 1
    compared = len(steps[0][0].gradients)
    print(f"gradients identical: yes ({compared} in each of {STEPS} steps, bit for bit)")
    print(f"\nthe page, with a slider over budgets: {page.resolve().as_uri()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
