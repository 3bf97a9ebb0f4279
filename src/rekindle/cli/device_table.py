"""The table of devices, for a terminal or as JSON."""

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

import rekindle
from rekindle.sizes import format_bytes


def show(as_json: bool) -> None:
    """Print the devices that times and sizes can be those of."""
    known = rekindle.Device.known()
    if as_json:
        typer.echo(json.dumps([asdict(device) for device in known], indent=1))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("device", no_wrap=True)
    for name in ("memory", "TFLOP/s in bfloat16", "memory GB/s", "host link GB/s"):
        table.add_column(name, justify="right")
    for device in known:
        table.add_row(
            device.name,
            format_bytes(device.memory_bytes),
            f"{device.half / 1e12:g}",
            f"{device.memory / 1e9:g}",
            f"{device.link / 1e9:g}",
        )
    Console(highlight=False).print(table)
