"""The commands: what they print and write, and the codes with which they exit."""

import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import rekindle
from rekindle.cli.app import app
from rekindle.cli.output import describe_step
from rekindle.cli.steps import Step
from tests.cli import steps
from tests.toys import Stack

pytest.importorskip("scipy")

LIKE = ("--like", "RTX 4090")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def of(name: str, command: str = "plan", *options: str) -> Result:
    return run(command, f"tests.cli.steps:{name}", *options)


def answer(name: str, command: str, *options: str) -> Any:
    """The JSON that a command prints: all of its stdout."""
    done = of(name, command, *LIKE, "--json", *options)
    assert (done.exit_code, done.exception) == (0, None), done.output
    return json.loads(done.stdout)


def values_of(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """The step of a function, and the options by which the command runs it."""
    made = getattr(steps, name)()
    made = (
        made
        if isinstance(made, dict)
        else dict(zip(("model", "batch", "loss"), made, strict=False))
    )
    return made.pop("model"), made.pop("batch"), {**made, "device": "meta", "like": "RTX 4090"}


def test_explain_prints_the_explanation_of_the_step() -> None:
    model, batch, options = values_of("step")
    expected = rekindle.explain(model, batch, **options)
    done = of("step", "explain", *LIKE)
    title, _, text = done.stdout.partition("\n")
    assert title == "Stack: 3.31 thousand parameters in float32, AdamW"
    assert text.splitlines()[:3] == str(expected).splitlines()[:3]
    assert done.exit_code == 0
    assert answer("step", "explain")["peak"] == expected.peak


def test_plan_prints_the_plan_that_is_solved_for_the_budget() -> None:
    model, batch, options = values_of("triple")
    expected = rekindle.solve(rekindle.profile(model, batch, **options), "60%")
    found = answer("triple", "plan", "--budget", "60%")
    assert found["predicted_peak"] == expected.predicted_peak
    assert found["budget"] == expected.budget
    assert str(expected).splitlines()[0] in of("triple", "plan", *LIKE, "--budget", "60%").stdout


def test_without_a_budget_a_plan_is_for_the_memory_of_the_device() -> None:
    assert answer("triple", "plan")["budget"] == rekindle.Device.named("RTX 4090").usable_bytes


def test_strategies_that_are_not_exact_are_planned_if_asked_for() -> None:
    model, batch, options = values_of("triple")
    profile = rekindle.profile(model, batch, **options, exact=False)
    found = answer("triple", "frontier", "--inexact", "--points", "2")
    assert found["points"][-1]["peak"] == rekindle.frontier(profile, 2)[-1].peak


def test_bytes_are_a_budget_without_a_unit() -> None:
    assert answer("triple", "plan", "--budget", "1000000")["budget"] == 1000000


def test_frontier_has_as_many_points_as_are_asked_for() -> None:
    assert len(answer("triple", "frontier", "--points", "3")["points"]) == 3


def test_largest_tries_sizes_of_the_functions_parameter() -> None:
    found = answer("step", "largest", "--multiple-of", "2", "--most", "4")
    assert (found["over"], found["size"], found["capped"]) == ("batch", 4, True)
    found = answer("step", "largest", "--over", "sequence", "--batch", "8", "--most", "1")
    assert (found["over"], found["tried"][0]["items"]) == ("sequence", 8)


def test_largest_needs_a_parameter_for_the_size() -> None:
    done = of("triple", "largest", *LIKE)
    assert done.exit_code == 2
    assert "write it as def triple(batch=...)" in done.stderr


def test_blocks_are_named_once_for_each_pattern() -> None:
    found = answer("triple", "plan", "--blocks", "blocks.0", "--blocks", "blocks.1")
    assert [path for path, *_ in found["blocks"]] == ["blocks.0", "blocks.1"]


def test_an_optimizer_that_is_asked_for_counts_in_place_of_the_functions_own() -> None:
    def peak(*options: str) -> int:
        return int(answer("step", "plan", *options)["predicted_peak"])

    parameters = 4 * sum(parameter.numel() for parameter in Stack(3, 16).parameters())
    assert peak("--optimizer", "RMSprop") == peak("--optimizer", "none") + parameters
    assert peak() == peak("--optimizer", "none") + 2 * parameters


def test_files_are_written_and_named(tmp_path: Path) -> None:
    plan, page, snapshot = (tmp_path / name for name in ("plan.json", "plan.html", "plan.pickle"))
    files = ("--save", str(plan), "--html", str(page), "--snapshot", str(snapshot))
    done = of("triple", "plan", *LIKE, "--budget", "60%", *files)
    assert done.stderr == f"wrote {plan}\nwrote {page}\nwrote {snapshot}\n"
    rekindle.apply(Stack(3, 16), rekindle.Plan.load(plan))
    assert page.read_text().startswith("<!doctype html>")
    assert snapshot.stat().st_size > 0


def test_the_page_of_largest_is_that_of_its_plan(tmp_path: Path) -> None:
    page = tmp_path / "largest.html"
    done = of("step", "largest", *LIKE, "--most", "1", "--html", str(page))
    assert (done.exit_code, page.exists()) == (0, True)


def test_a_real_device_measures_and_verifies() -> None:
    found = of("triple", "plan", "--device", "cpu", "--budget", "200%", "--json")
    plan = json.loads(found.stdout)
    assert (plan["device"], plan["measured_peak"] <= plan["budget"]) == ("cpu", True)


def test_no_plan_that_fits_is_an_exit_code_of_its_own() -> None:
    done = of("triple", "plan", *LIKE, "--budget", "1KiB")
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.startswith("error: No plan fits into 1 KiB")
    assert of("step", "largest", *LIKE, "--budget", "1KiB").exit_code == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Which device is the step for? --like"),
        (("--like", "RTX 4091"), "There is no device 'RTX 4091'"),
        ((*LIKE, "--budget", "much"), "budget should be"),
        ((*LIKE, "--optimizer", "lr_scheduler"), "--optimizer should be a class of torch.optim"),
        ((*LIKE, "--spill"), "--spill measures a disk"),
        ((*LIKE, "--snapshot", "plan.pickle"), "--html names it"),
        ((*LIKE, "--save", "nowhere/plan.json"), "There is no folder nowhere"),
        ((*LIKE, "--architecture", "LlamaModel"), "--architecture is for models that a config"),
        ((*LIKE, "--device", "cpu"), "--like goes with --device meta"),
        (("--device", "cpu"), "--budget says how much memory"),
        (("--device", "toaster", "--budget", "1GiB"), "--device toaster: this machine has none"),
    ],
)
def test_wrong_options_are_refused_before_the_step_is_made(
    options: tuple[str, ...], message: str
) -> None:
    done = of("step", "plan", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert "a line of the user's own" not in done.stderr


@pytest.mark.parametrize("model", ["train", ":step", "train:"])
def test_a_model_is_a_function_or_a_configuration(model: str) -> None:
    done = run("plan", model, *LIKE)
    assert done.exit_code == 2
    assert "is neither MODULE:FUNCTION" in done.stderr


def test_an_error_of_the_users_is_a_message_with_its_line_and_a_traceback_if_asked_for() -> None:
    done = of("failing", "plan", *LIKE)
    assert done.exit_code == 1
    assert "error: RuntimeError: " in done.stderr
    assert "toys.py:" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback (most recent call last)" in of("failing", "plan", *LIKE, "--debug").stderr


def test_warnings_are_one_line() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = of("pair", "plan", *LIKE)
    assert done.stderr.startswith("warning: The loss is not in the plan")
    assert done.stderr.count("\n") == 1


def test_devices_are_a_table_or_json() -> None:
    done = run("devices")
    assert done.stdout.splitlines()[0].split()[:2] == ["device", "memory"]
    assert len(done.stdout.splitlines()) == 1 + len(rekindle.Device.known())
    [first, *_] = json.loads(run("devices", "--json").stdout)
    assert first["name"] == rekindle.Device.known()[0].name


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"rekindle {rekindle.__version__}\n"


def test_help_says_what_exit_codes_mean() -> None:
    assert "3 no plan fits" in run("plan", "--help").stdout


def test_large_models_are_counted_in_billions() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(50_000, 50_000, dtype=torch.bfloat16)
    expected = "Linear: 2.5 billion parameters in bfloat16, no optimizer"
    assert describe_step(Step(model, None)) == expected


DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_use_commands_and_options_that_there_are() -> None:
    pages = [*DOCS.glob("**/*.md"), DOCS.parent / "README.md"]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    calls = [line for line in lines if line.startswith("rekindle ")]
    assert len(calls) > 5
    commands = typer.main.get_command(app).commands
    for call in calls:
        _, name, *arguments = shlex.split(call.partition(">")[0])
        commands[name].make_context(name, arguments)
