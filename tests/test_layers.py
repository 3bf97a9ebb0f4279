"""The directions of imports, which `scripts/check` holds: every module has its layer."""

import tomllib
from pathlib import Path

import rekindle

SOURCE = Path(rekindle.__file__).parent
SPLIT = {"rekindle", "rekindle.regions"}
"""Packages whose parts are in layers of their own."""


def layers() -> list[str]:
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    found = next(contract for contract in contracts if contract["id"] == "layers")["layers"]
    return [name.strip() for layer in found for name in layer.split("|")]


def parts_of(package: str) -> list[str]:
    folder = SOURCE.joinpath(*package.split(".")[1:])
    names = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    names += [path.parent.name for path in folder.glob("*/__init__.py")]
    return [f"{package}.{name}" for name in names]


def test_every_module_has_its_layer() -> None:
    parts = {part for package in SPLIT for part in parts_of(package)} - SPLIT
    assert sorted(parts) == sorted(layers())


def test_packages_whose_parts_have_layers_hold_nothing_themselves() -> None:
    """Their own code would be in no layer; the root's puts the public names together."""
    for package in SPLIT - {"rekindle"}:
        own = SOURCE.joinpath(*package.split(".")[1:], "__init__.py").read_text()
        assert "import" not in own
