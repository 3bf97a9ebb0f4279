"""What `import rekindle` needs of the machine."""

import subprocess
import sys

STANDARD = sys.stdlib_module_names

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


def imported_by(program: str) -> set[str]:
    """The modules that a program imports, those of torch and its needs aside."""
    print_new = "print(*sorted(set(sys.modules) - before))"
    lines = ["import sys, torch, torch.utils.checkpoint", "before = set(sys.modules)"]
    found = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, program, print_new])],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(found.stdout.split())


def rooms(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("rekindle.")}


def libraries(modules: set[str]) -> set[str]:
    """What is of neither rekindle, nor torch, nor Python."""
    return {name.partition(".")[0] for name in modules} - {"rekindle", "torch", *STANDARD}


def test_importing_rekindle_imports_what_training_needs_and_no_planner() -> None:
    assert rooms(imported_by("import rekindle")) == {
        *("_api", "compat", "compile", "errors", "losses", "module_attachment", "modules"),
        *(
            "observation",
            "offload",
            "policies",
            "regions",
            "rows",
            "sizes",
            "strategy",
            "strategy_json",
        ),
        "torch_private",
    }


def test_importing_rekindle_imports_no_other_library() -> None:
    assert libraries(imported_by("import rekindle")) == set()


def test_all_public_names_are_imported_without_another_library() -> None:
    modules = imported_by("from rekindle import *")
    assert "planner" in rooms(modules)
    assert libraries(modules) == set()
