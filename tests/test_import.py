"""What `import rekindle` needs of the machine."""

import subprocess
import sys

_PROGRAM = """
import tempfile
import torch, torch.utils.checkpoint  # which have needs of their own

def refuse(*args, **kwargs):
    raise FileNotFoundError("No usable temporary directory found")

for name in ("gettempdir", "_get_default_tempdir", "mkdtemp", "mkstemp", "TemporaryFile"):
    setattr(tempfile, name, refuse)
import rekindle

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
rekindle.apply(model, {"0": "recompute", "1": "offload"})
with rekindle.offload():
    rekindle.checkpoint(model, torch.ones(2, 4)).sum().backward()
rekindle.remove(model)
try:
    rekindle.offload(tier="disk")
except FileNotFoundError:
    print("done")
"""


def test_rekindle_is_imported_and_used_without_a_writable_temporary_folder() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False
    )
    assert (found.stdout, found.stderr, found.returncode) == ("done\n", "", 0)
