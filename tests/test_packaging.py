"""The wheel and the source archive: what is in them, and that both install and work."""

import email.message
import email.parser
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import rekindle

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rekindle"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOR_USERS = {"all", "cli", "fit", "plot"}

USE = """
import rekindle, torch
from importlib import metadata
assert rekindle.__file__.startswith(PLACE), rekindle.__file__
assert metadata.version("rekindle") == rekindle.__version__
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
rekindle.checkpoint(model, torch.ones(2, 4)).sum().backward()
print(rekindle.explain(model, torch.ones(2, 4), loss=torch.sum, device="meta", like="H100"))
"""


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the archive, built without a network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "-d", str(folder))
    return folder


def the_one(folder: Path, pattern: str) -> Path:
    [found] = folder.glob(pattern)
    return found


def names_in_wheel(folder: Path) -> list[str]:
    with zipfile.ZipFile(the_one(folder, "*.whl")) as wheel:
        return wheel.namelist()


def names_in_archive(folder: Path) -> list[str]:
    """Without the folder that all is in."""
    with tarfile.open(the_one(folder, "*.tar.gz")) as archive:
        return [name.partition("/")[2] for name in archive.getnames()]


def metadata_of(folder: Path) -> email.message.Message:
    with zipfile.ZipFile(the_one(folder, "*.whl")) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        return email.parser.Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    """Also what is no Python: `py.typed`, and what pages are made of."""
    files = [path for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert SOURCE / "py.typed" in files
    packaged = [name for name in names_in_wheel(built) if ".dist-info/" not in name]
    expected = [path.relative_to(ROOT / "src").as_posix() for path in files]
    assert sorted(packaged) == sorted([*expected, "_rekindle_pytest.py"])


def test_pytest_finds_the_plugin_of_an_installed_wheel(built: Path, tmp_path: Path) -> None:
    install(built, "*.whl", tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import pytest; status = pytest.main(['--markers', '-p', 'no:cacheprovider'])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(status)"
    )
    assert "@pytest.mark.peak(limit=None, " in run("-c", program, cwd=tmp_path)


def test_the_wheel_holds_the_licence(built: Path) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names_in_wheel(built))


def test_the_archive_holds_what_is_needed_to_build_test_and_read(built: Path) -> None:
    names = set(names_in_archive(built))
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/rekindle/py.typed"}
    assert needed <= names
    assert {"tests/test_packaging.py", "docs/index.md", "scripts/test", "constraints.txt"} <= names
    assert not any(name.startswith((".venv", ".ci", "site/", "dist/")) for name in names)


def test_the_metadata_has_the_version_of_the_package(built: Path) -> None:
    assert metadata_of(built)["Version"] == rekindle.__version__


def test_torch_is_all_that_the_package_needs(built: Path) -> None:
    needs = metadata_of(built).get_all("Requires-Dist") or []
    assert [need for need in needs if "extra ==" not in need] == ["torch>=2.11"]


def test_all_is_every_extra_for_users() -> None:
    [everything] = EXTRAS["all"]
    assert everything == f"rekindle[{','.join(sorted(FOR_USERS - {'all'}))}]"
    assert set(EXTRAS) >= FOR_USERS


def install(built: Path, kind: str, target: Path) -> None:
    run(
        *("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-index", "--no-deps"),
        *("--no-build-isolation", "--target", str(target), str(the_one(built, kind))),
    )


def test_the_wheel_installs_and_works(built: Path, tmp_path: Path) -> None:
    install(built, "*.whl", tmp_path)
    program = f"import sys; sys.path.insert(0, PLACE := {str(tmp_path)!r})\n{USE}"
    assert "Sequential on H100" in run("-c", program, cwd=tmp_path)


def test_the_wheel_installs_the_command(built: Path, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    install(built, "*.whl", tmp_path)
    script = tmp_path / "bin" / "rekindle"
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"sys.argv = [{str(script)!r}, '--version']\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    assert run("-c", program, cwd=tmp_path) == f"rekindle {rekindle.__version__}\n"


def test_the_archive_installs_the_files_of_the_wheel(built: Path, tmp_path: Path) -> None:
    install(built, "*.tar.gz", tmp_path)
    files = [path for path in (tmp_path / "rekindle").rglob("*") if path.is_file()]
    installed = [path.relative_to(tmp_path).as_posix() for path in files if path.suffix != ".pyc"]
    packaged = [name for name in names_in_wheel(built) if name.startswith("rekindle/")]
    assert sorted(installed) == sorted(packaged)
