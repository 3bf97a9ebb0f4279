"""The names that other people's code imports: ours, torch's public ones and a few private ones."""

import ast
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.utils.checkpoint as torch_module
from torch import Tensor

import rekindle
from rekindle._api import on_first_use
from rekindle.compat import checkpoint as compat
from rekindle.compile import hand_over

ROOT_FILE = Path(rekindle.__file__)
SOURCE = ROOT_FILE.parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
PRIVATE = [
    "_CachedTorchDispatchMode",
    "_CachingTorchDispatchMode",
    "_DEFAULT_DETERMINISM_MODE",
    "_checkpoint_without_reentrant_generator",
    "_infer_device_type",
]
METHODS = [
    "CheckpointFunction.backward",
    "CheckpointFunction.forward",
    "DefaultDeviceType.get_device_type",
    "DefaultDeviceType.set_device_type",
    "GraphExecGroup.__enter__",
    "GraphExecGroup._get_current_group",
]
FUNCTIONS = [name for name in torch_module.__all__ if inspect.isfunction(vars(torch_module)[name])]


def sorted_as_ruff_does(names: list[str]) -> list[str]:
    """Constants, then classes, then functions, as ruff's RUF022."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def reach(module: ModuleType, path: str) -> object:
    found: object = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def test_the_names_of_rekindle_are_sorted() -> None:
    assert rekindle.__all__ == sorted_as_ruff_does(rekindle.__all__)


def test_the_names_of_rekindle_are_what_it_exports() -> None:
    exported = {
        name
        for name, value in vars(rekindle).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    } - {"TYPE_CHECKING", "import_module"}
    assert exported | {"policies", "strategy"} | set(on_first_use.__all__) == set(rekindle.__all__)


def test_names_for_first_use_are_those_that_type_checkers_read() -> None:
    branches = [node for node in ast.parse(ROOT_FILE.read_text()).body if isinstance(node, ast.If)]
    imports = [node for branch in branches for node in branch.body]
    read = [each for each in imports if isinstance(each, ast.ImportFrom)]
    assert [each.module for each in read] == [on_first_use.__name__]
    assert [alias.name for alias in read[0].names] == on_first_use.__all__


def test_a_name_is_the_same_object_at_its_first_use_and_later() -> None:
    vars(rekindle).pop("Plan", None)
    first = rekindle.Plan
    assert first is rekindle.Plan is on_first_use.Plan


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rekindle' has no attribute 'plam'"):
        getattr(rekindle, "plam")  # noqa: B009 (mypy refuses it as an attribute, which is right)


def test_dir_shows_the_public_names_and_no_module_but_two_of_values() -> None:
    assert dir(rekindle) == sorted([*rekindle.__all__, "__version__"])
    modules = [name for name in dir(rekindle) if isinstance(getattr(rekindle, name), ModuleType)]
    assert modules == ["policies", "strategy"]


def test_the_names_of_the_compat_module_are_sorted() -> None:
    assert compat.__all__ == sorted_as_ruff_does(compat.__all__)


def test_every_name_of_the_compat_module_is_there() -> None:
    assert [name for name in compat.__all__ if not hasattr(compat, name)] == []


def test_every_public_name_of_torch_is_a_public_name_of_the_compat_module() -> None:
    assert set(torch_module.__all__) <= set(compat.__all__)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_that_others_import_is_there(name: str) -> None:
    assert type(getattr(compat, name)) is type(getattr(torch_module, name))


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS, *PRIVATE[-2:]])
def test_a_function_takes_the_parameters_of_torchs(name: str) -> None:
    """In torch's order, for those given by position; ours may have more."""
    theirs = inspect.signature(reach(torch_module, name)).parameters  # type: ignore[arg-type]
    ours = inspect.signature(reach(compat, name)).parameters  # type: ignore[arg-type]
    kinds = {parameter.name: parameter.kind for parameter in ours.values()}
    unnamed = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    for parameter in theirs.values():
        if parameter.kind in unnamed:
            assert parameter.kind in kinds.values()
        else:
            assert kinds[parameter.name] == parameter.kind
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert [p.name for p in theirs.values() if p.kind is by_position] == [
        p.name for p in ours.values() if p.kind is by_position
    ]


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS, *PRIVATE[-2:]])
def test_a_parameter_has_the_default_of_torchs(name: str) -> None:
    theirs = inspect.signature(reach(torch_module, name)).parameters  # type: ignore[arg-type]
    ours = inspect.signature(reach(compat, name)).parameters  # type: ignore[arg-type]
    named = [p for p in theirs.values() if p.name in ours]
    assert [(p.name, p.default) for p in named] == [(p.name, ours[p.name].default) for p in named]


def test_our_own_checkpoint_takes_torchs_parameters_and_preserve_rng_state() -> None:
    theirs = inspect.signature(torch_module.checkpoint).parameters
    ours = inspect.signature(rekindle.checkpoint).parameters
    assert set(theirs) | {"preserve_rng_state"} == set(ours)


def test_our_own_checkpoint_is_not_reentrant_by_default() -> None:
    x = torch.ones(2, requires_grad=True)
    assert type(rekindle.checkpoint(torch.sin, x).grad_fn).__name__ == "SinBackward0"


def test_noop_context_fn_is_torchs_own_object() -> None:
    """Torch compares it by identity."""
    assert rekindle.noop_context_fn is torch_module.noop_context_fn
    assert compat.noop_context_fn is torch_module.noop_context_fn


# Our own engine: outside `compat` and `compile`, nothing knows torch's.


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def mentions(source: str) -> set[str]:
    """What a file imports, and the dotted names it uses."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        else:
            found.add(dotted(node))
    return found


def is_engine(file: str) -> bool:
    return not file.startswith(("compat/", "compile/", "torch_private/torch_checkpoint"))


@pytest.mark.parametrize("file", [file for file in FILES if is_engine(file)])
def test_the_engine_does_not_mention_torchs_module(file: str) -> None:
    names = mentions((SOURCE / file).read_text())
    assert [name for name in names if name.startswith("torch.utils.checkpoint")] == []


def may_name_torchs_checkpoint(file: str) -> bool:
    return file.startswith(("compile/", "torch_private/torch_checkpoint"))


@pytest.mark.parametrize("file", [f for f in FILES if not may_name_torchs_checkpoint(f)])
def test_torchs_checkpoint_is_named_in_compile_only(file: str) -> None:
    names = mentions((SOURCE / file).read_text())
    forbidden = {
        "_torch.checkpoint",
        "_torch.CheckpointFunction",
        "_torch._checkpoint_without_reentrant_generator",
        "rekindle.torch_private.torch_checkpoint.torch_checkpoint",
        "torch.utils.checkpoint.checkpoint",
        "torch_module.checkpoint",
    }
    assert names & forbidden == set()


def test_the_scan_sees_every_way_of_naming_torchs_checkpoint() -> None:
    """A contrived file, to show that the scan above can fail."""
    source = "from torch.utils.checkpoint import checkpoint\ntorch.utils.checkpoint.checkpoint(f)"
    assert "torch.utils.checkpoint.checkpoint" in mentions(source.splitlines()[0])
    assert "torch.utils.checkpoint.checkpoint" in mentions(source.splitlines()[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_eager_regions_run_without_torchs_engine(
    use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contrived: torch's engine is taken away."""

    def taken_away(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch's engine was called")

    monkeypatch.setattr(hand_over, "torch_checkpoint", taken_away)
    for name in ("checkpoint", "_checkpoint_without_reentrant_generator", "_CheckpointFrame"):
        monkeypatch.setattr(torch_module, name, taken_away)
    monkeypatch.setattr(torch_module.CheckpointFunction, "apply", taken_away)
    x = torch.ones(2, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return x.sin().exp()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x, use_reentrant=use_reentrant).cos()

    rekindle.checkpoint(outer, x, use_reentrant=use_reentrant).sum().backward()
    compat.checkpoint_sequential([inner, outer], 2, x, use_reentrant).sum().backward()
    assert x.grad is not None
