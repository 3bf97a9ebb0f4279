"""Steps that functions of users return."""

import sys
from pathlib import Path

import pytest
import torch

from rekindle.cli.failures import UsageError
from rekindle.cli.function_source import FunctionSource
from rekindle.cli.steps import Sizes
from tests.cli.steps import loss_of
from tests.toys import Stack

STEPS = "tests.cli.steps"


def source(name: str) -> FunctionSource:
    return FunctionSource(STEPS, name)


def test_a_pair_is_a_model_and_a_batch() -> None:
    made = source("pair").step(Sizes(), "meta")
    assert isinstance(made.model, Stack)
    assert (made.batch.shape, made.loss, made.optimizer) == ((64, 16), None, None)


def test_a_triple_has_a_loss_and_a_dict_an_optimizer() -> None:
    assert source("triple").step(Sizes(), "meta").loss is loss_of
    made = source("step").step(Sizes(), "meta")
    assert made.loss is loss_of
    assert isinstance(made.optimizer, torch.optim.AdamW)


def test_on_the_meta_device_nothing_is_allocated() -> None:
    made = source("step").step(Sizes(), "meta")
    assert made.batch.is_meta
    assert all(parameter.is_meta for parameter in made.model.parameters())


def test_sizes_and_dtype_are_given_to_parameters_of_these_names() -> None:
    assert source("step").step(Sizes(batch=3, seq=5), "meta").batch.shape == (3, 5, 16)
    assert source("typed").step(Sizes(dtype=torch.bfloat16), "meta").batch.dtype == torch.bfloat16


def test_a_size_that_the_function_does_not_take_is_refused_with_how_to_take_it() -> None:
    with pytest.raises(UsageError, match=r"no parameters: write it as def pair\(batch=...\)"):
        source("pair").step(Sizes(batch=3), "meta")


def test_what_the_function_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    source("step").step(Sizes(), "meta")
    assert capsys.readouterr() == ("", "a line of the user's own\n")


def test_a_function_that_reads_values_is_told_how_it_can() -> None:
    with pytest.raises(RuntimeError, match="meta") as caught:
        source("reading").step(Sizes(), "meta")
    assert "--in-memory calls it on the CPU" in caught.value.__notes__[0]
    assert source("reading").step(Sizes(), "cpu").batch.shape == (64, 16)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "it returned nothing"),
        ("turned_round", "the model first, but it returned a Tensor"),
        ("misspelled", "it returned a dict with los"),
        ("not_a_function", "should be a function, but is a int"),
        ("stepp", "has no function stepp; it has .*step, pair"),
    ],
)
def test_what_is_no_step_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        source(name).step(Sizes(), "meta")


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="There is no module trains in "):
        FunctionSource("trains", "step")


def test_a_module_that_lacks_a_module_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_another.py").write_text("import an_absent_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ModuleNotFoundError, match="an_absent_module"):
        FunctionSource("needs_another", "step")


def test_a_file_is_imported_by_its_path_and_finds_what_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_step.py").write_text("WIDTH = 16\n")
    (tmp_path / "json.py").write_text(  # the name of a module that is there already
        "import torch\nfrom beside_the_step import WIDTH\n"
        "def step():\n    return torch.nn.Linear(WIDTH, 1), torch.zeros(2, WIDTH)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    import json  # noqa: PLC0415

    made = FunctionSource(str(tmp_path / "json.py"), "step").step(Sizes(), "meta")
    assert made.batch.shape == (2, 16)
    assert sys.modules["json"] is json
    del sys.modules["beside_the_step"], sys.modules["step_in_json"]


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"There is no file trains.py"):
        FunctionSource("trains.py", "step")
