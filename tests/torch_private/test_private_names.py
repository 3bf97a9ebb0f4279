"""Private names of torch are read in one room, where each says for how long."""

import ast
import re
from pathlib import Path

import pytest

import rekindle

SOURCE = Path(rekindle.__file__).parent
ROOM = "torch_private"
FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))

ATTRIBUTES = frozenset(
    {
        *("_cdata", "_schema", "_opname", "_overloadname", "_qualified_op_name"),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "_is_view", "_make_subclass"),
        *("_call_impl", "_forward_hooks_always_called", "_compiled_call_impl"),
        *("_sequence_nr", "_forward_cls", "_execution_engine"),
        *("_dynamo_marked_constant", "_torchdynamo_disable", "_torchdynamo_orig_callable"),
        *("_get_fsdp_state", "_fsdp_param_group", "_run_policy", "_flat_weights"),
    }
)
"""Private attributes of torch's objects, by whatever expression the object is reached.

Not among them, because they are read all over the field: `_version` and `_base` of tensors,
`_parameters`, `_buffers` and `_modules` of modules, `_saved_*` of nodes, which torch documents."""


def is_private(name: str) -> bool:
    """True if a dotted name is torch's, and no public one; ops may begin with an underscore."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return False
    hidden = [part for part in parts if part.startswith("_") and not part.startswith("__")]
    return bool(hidden) or "experimental" in parts


def private_names(source: str) -> set[str]:
    """The private names of torch that a file imports or reads."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add(alias.name)
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(dotted(node, bound))
            if node.attr in ATTRIBUTES:
                found.add(f"torch: .{node.attr}")
        elif isinstance(node, ast.Constant) and node.value in ATTRIBUTES:  # as getattr is given it
            found.add(f"torch: .{node.value}")
    return {name for name in found if is_private(name) or name.startswith("torch: ")}


def dotted(node: ast.expr, bound: dict[str, str]) -> str:
    """`torch.a.b` for an expression that reads it, however it was imported; else nothing."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, bound)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith(ROOM)])
def test_private_names_of_torch_are_read_in_one_room(file: str) -> None:
    assert private_names((SOURCE / file).read_text()) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch._C import _autograd",
        "from torch.utils import _pytree",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "def late():\n    from torch._subclasses import FakeTensor",
        "import torch\ntorch._C._get_tracing_state()",
        "import torch as t\nt.cuda._sleep(1)",
        "from torch import nn\ncode = nn.Module._call_impl.__code__",
        "key = storage_of(x)._cdata",
        "schema = getattr(op, '_schema', None)",
    ],
)
def test_the_scan_sees_every_way_of_reading_a_private_name(source: str) -> None:
    """Contrived files, to show that the scan above can fail."""
    assert private_names(source)


def test_ops_and_public_names_are_none_of_the_private_ones() -> None:
    source = (
        "import torch\ntorch.ops.aten._to_copy.default\ntorch.cuda.is_initialized()\nx._version"
    )
    assert private_names(source) == set()


def documented(source: str) -> dict[str, str]:
    """Each public function, class and value of a file, with its docstring."""
    body = ast.parse(source).body
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = str(after.value.value) if is_text else ""  # type: ignore[union-attr]
            found |= {target.id: text for target in targets if isinstance(target, ast.Name)}
    return {name: text for name, text in found.items() if not name.startswith("_")}


TRIED = re.compile(r"tried\s+on\s+torch\s+2\.\d+", re.IGNORECASE)
GOES = re.compile(r"goes\s+when", re.IGNORECASE)


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith(ROOM)])
def test_each_private_name_says_its_versions_and_when_it_can_go(file: str) -> None:
    names = documented((SOURCE / file).read_text())
    assert [n for n, text in names.items() if not (TRIED.search(text) and GOES.search(text))] == []


def test_a_name_without_its_versions_is_found() -> None:
    """A contrived file, to show that the check above can fail."""
    source = 'sleep = torch.cuda._sleep\n"""Waits."""\n\ndef wait() -> None:\n    """Waits."""\n'
    assert documented(source) == {"sleep": "Waits.", "wait": "Waits."}
    assert TRIED.search("Tried\non torch 2.11 and 2.13.")
    assert not TRIED.search("Tried on everything.")
