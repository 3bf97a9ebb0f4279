"""The commands, as typer has them."""

from typing import Annotated

import typer

import rekindle
from rekindle.cli import answers, device_table, options
from rekindle.cli.answers import Allowed, Asked
from rekindle.cli.failures import errors_as_messages
from rekindle.cli.output import Output
from rekindle.cli.sources import dtype_named, source_of
from rekindle.cli.steps import Sizes

_CODES = "Exit codes: 0 done; 1 an error; 2 wrong options; 3 no plan fits."

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_CODES,
    help="Where the memory of a training step goes, what would fit, and what it costs: without a "
    "GPU, and without a network.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rekindle {rekindle.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def _asked(
    model: str,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    optimizer: str | None,
    architecture: str | None,
    blocks: list[str] | None,
    like: str | None,
    device: str,
    in_memory: bool,
) -> Asked:
    sizes = Sizes(batch, seq, dtype_named(dtype))
    source = source_of(model, architecture)
    return Asked(source, sizes, optimizer, device, like, in_memory, tuple(blocks or ()))


@app.command(epilog=_CODES)
def explain(
    model: options.Model,
    batch: options.Batch = None,
    seq: options.Seq = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    architecture: options.Architecture = None,
    blocks: options.Blocks = None,
    like: options.Like = None,
    device: options.Device = "meta",
    in_memory: options.InMemory = False,
    as_json: options.Json = False,
    save: options.Save = None,
    html: options.Html = None,
    snapshot: options.Snapshot = None,
    debug: options.Debug = False,
) -> None:
    """Say where the memory of a training step goes, and what would make it less."""
    with errors_as_messages(debug):
        output = Output(as_json, save, html, snapshot)
        output.check()
        asked = _asked(
            *(model, batch, seq, dtype, optimizer, architecture, blocks, like, device, in_memory)
        )
        output.write(*answers.explained(asked))


@app.command(epilog=_CODES)
def plan(
    model: options.Model,
    budget: options.Budget = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    architecture: options.Architecture = None,
    blocks: options.Blocks = None,
    like: options.Like = None,
    device: options.Device = "meta",
    in_memory: options.InMemory = False,
    max_offload: options.MaxOffload = None,
    spill: options.Spill = False,
    inexact: options.Inexact = False,
    as_json: options.Json = False,
    save: options.Save = None,
    html: options.Html = None,
    snapshot: options.Snapshot = None,
    debug: options.Debug = False,
) -> None:
    """Plan a training step for a budget: what to keep, recompute and offload."""
    with errors_as_messages(debug):
        output = Output(as_json, save, html, snapshot)
        output.check()
        asked = _asked(
            *(model, batch, seq, dtype, optimizer, architecture, blocks, like, device, in_memory)
        )
        output.write(*answers.planned(asked, budget, Allowed(spill, max_offload, inexact)))


@app.command(epilog=_CODES)
def frontier(
    model: options.Model,
    points: options.Points = 8,
    batch: options.Batch = None,
    seq: options.Seq = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    architecture: options.Architecture = None,
    blocks: options.Blocks = None,
    like: options.Like = None,
    device: options.Device = "meta",
    in_memory: options.InMemory = False,
    max_offload: options.MaxOffload = None,
    spill: options.Spill = False,
    inexact: options.Inexact = False,
    as_json: options.Json = False,
    save: options.Save = None,
    html: options.Html = None,
    debug: options.Debug = False,
) -> None:
    """Show what less memory costs: plans from the plain peak down to the smallest."""
    with errors_as_messages(debug):
        output = Output(as_json, save, html)
        output.check()
        asked = _asked(
            *(model, batch, seq, dtype, optimizer, architecture, blocks, like, device, in_memory)
        )
        output.write(*answers.frontier_of(asked, points, Allowed(spill, max_offload, inexact)))


@app.command(epilog=_CODES)
def largest(
    model: options.Model,
    over: options.Over = "batch",
    budget: options.Budget = None,
    multiple_of: options.MultipleOf = 1,
    most: options.Most = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    architecture: options.Architecture = None,
    blocks: options.Blocks = None,
    like: options.Like = None,
    device: options.Device = "meta",
    in_memory: options.InMemory = False,
    max_offload: options.MaxOffload = None,
    as_json: options.Json = False,
    save: options.Save = None,
    html: options.Html = None,
    debug: options.Debug = False,
) -> None:
    """Find the largest batch or sequence that fits, and the one with the best throughput."""
    with errors_as_messages(debug):
        output = Output(as_json, save, html)
        output.check()
        asked = _asked(
            *(model, batch, seq, dtype, optimizer, architecture, blocks, like, device, in_memory)
        )
        found = answers.largest_of(asked, over, budget, multiple_of, most, max_offload)
        output.write(*found)


@app.command()
def devices(as_json: options.Json = False) -> None:
    """List the devices that --like knows, by their makers' figures."""
    device_table.show(as_json)
