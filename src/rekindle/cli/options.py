"""The arguments and options that the commands have in common."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

import rekindle


def _devices(incomplete: str) -> list[str]:
    """The names of devices that a shell completes, without spaces."""
    names = [each.name.replace(" ", "-") for each in rekindle.Device.known()]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


_STEP, _WHERE, _OUT = "The step", "The device", "Output"

Model: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="MODULE:FUNCTION, as train:step or train.py:step, which returns model, batch; or "
        "hf:PATH of a config.json or a model's folder.",
        show_default=False,
    ),
]
Batch: TypeAlias = Annotated[
    int | None,
    typer.Option("--batch", "-b", min=1, help="Samples in a batch.", rich_help_panel=_STEP),
]
Seq: TypeAlias = Annotated[
    int | None,
    typer.Option("--seq", "-s", min=1, help="Tokens in a sequence.", rich_help_panel=_STEP),
]
DtypeName: TypeAlias = Literal["bfloat16", "float16", "float32", "float64", "bf16", "fp16", "fp32"]
Dtype: TypeAlias = Annotated[
    DtypeName | None,
    typer.Option(help="Of the parameters.", rich_help_panel=_STEP),
]
Optimizer: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="A class of torch.optim, for the size of its state, or none. For hf: adamw.",
        rich_help_panel=_STEP,
    ),
]
Architecture: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="A class of transformers, in the place of the one that the configuration names.",
        rich_help_panel=_STEP,
    ),
]
Blocks: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help='Paths of the modules to plan one by one, such as "layers.*"; once for each pattern.',
        rich_help_panel=_STEP,
    ),
]
Like: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--like",
        "-l",
        help='The device to plan for, such as "RTX 4090"; it need not be there.',
        autocompletion=_devices,
        rich_help_panel=_WHERE,
    ),
]
Device: TypeAlias = Annotated[
    str,
    typer.Option(
        help="meta allocates nothing; cuda or cpu make the model there, and measure.",
        rich_help_panel=_WHERE,
    ),
]
InMemory: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--in-memory",
        help="Make the model on the CPU, if its function cannot make it on the meta device.",
        rich_help_panel=_WHERE,
    ),
]
Budget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Bytes that a step may peak at, such as 24GiB; for a plan also a share of the "
        "activations, such as 40%. Without it: the device's memory, less a twentieth.",
        rich_help_panel=_WHERE,
    ),
]
MaxOffload: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Bytes that plans move to host memory at most, such as 100GiB.",
        rich_help_panel=_WHERE,
    ),
]
Spill: TypeAlias = Annotated[
    bool,
    typer.Option("--spill", help="Move to disk, not to host memory.", rich_help_panel=_WHERE),
]
Inexact: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--inexact",
        help="Also plan what changes the last bits of gradients, where that takes less.",
        rich_help_panel=_WHERE,
    ),
]
Points: TypeAlias = Annotated[int, typer.Option(min=1, help="Plans to look for.")]
Over: TypeAlias = Annotated[
    Literal["batch", "sequence"], typer.Option(help="The size that grows.", rich_help_panel=_STEP)
]
MultipleOf: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Sizes are multiples of it.", rich_help_panel=_STEP)
]
Most: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The largest size to try. For hf: the positions that the model has.",
        rich_help_panel=_STEP,
    ),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else.", rich_help_panel=_OUT)
]
Save: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Write the answer as JSON; rekindle.apply takes a plan that is loaded from it.",
        rich_help_panel=_OUT,
    ),
]
Html: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write a page, one file.", rich_help_panel=_OUT)
]
Snapshot: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Write a snapshot beside the page, for pytorch.org/memory_viz.", rich_help_panel=_OUT
    ),
]
Debug: TypeAlias = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUT)
]
