"""The command `rekindle`: where a step's memory goes, what fits, and what it costs.

```
app ─Asked─▶ answers ─▶ output
               │
               ▼
            sources: module:function │ hf:config.json ─▶ Step
```

It works by rekindle's public functions and values. typer is imported by the other files here, so
only when the command runs.
"""

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command, with the arguments of the process."""
    if find_spec("typer") is None:
        sys.exit("The command rekindle needs typer, which is not installed: pip install typer")
    from rekindle.cli.app import app  # noqa: PLC0415

    app(prog_name="rekindle")
