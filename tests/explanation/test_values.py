"""An explanation as a value: text, HTML, JSON; and what making one leaves behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.explanation import explain_model
from rekindle.sizes import format_bytes
from tests.explanation.models import DIM, dropped, gpt, tied
from tests.html_tags import Tags
from tests.planner.cases import unchanged
from tests.toys import Stack


@pytest.fixture(scope="module")
def explained() -> rekindle.Explanation:
    torch.manual_seed(0)
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    return rekindle.explain(model, batch, optimizer=optimizer, device="meta", like="H100")


def test_the_text_names_the_peak_and_has_every_table(explained: rekindle.Explanation) -> None:
    text = str(explained)
    assert text.splitlines()[0] == "Gpt on H100, recorded without memory"
    assert explained.peak_at in text
    titles = ["kind ", "module ", "line ", "op ", "largest saved", "changes,"]
    lines = [line.strip() for line in text.splitlines()]
    found = [next(i for i, line in enumerate(lines) if line.startswith(t)) for t in titles]
    assert found == sorted(found)
    assert len(lines) < 80


def test_its_repr_is_short(explained: rekindle.Explanation) -> None:
    assert repr(explained) == f"<Explanation of Gpt on H100: peak {format_bytes(explained.peak)}>"


def test_its_html_is_whole_small_and_for_both_themes(explained: rekindle.Explanation) -> None:
    html = explained._repr_html_()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert {"table", "ul"} <= tags.seen
    assert "prefers-color-scheme:dark" in html
    assert len(html) < 20_000


def test_a_file_gives_back_the_explanation(explained: rekindle.Explanation, tmp_path: Path) -> None:
    path = tmp_path / "explanation.json"
    explained.save(path)
    assert rekindle.Explanation.load(path) == explained
    assert json.loads(path.read_text())["schema"] == "rekindle explanation"


def test_plain_values_are_json_and_have_all_fields(explained: rekindle.Explanation) -> None:
    values = explained.as_json()
    assert json.loads(json.dumps(values)) == values
    assert values["timeline"][0].keys() >= {"event", "seconds", "phase", "module", "kinds"}
    assert len(values["kind_names"]) == len(values["timeline"][0]["kinds"])
    assert values["timeline"][-1]["seconds"] > 0


def test_a_damaged_file_is_refused_at_the_place(
    explained: rekindle.Explanation, tmp_path: Path
) -> None:
    path = tmp_path / "explanation.json"
    explained.save(path)
    values = json.loads(path.read_text())
    values["kinds"][0]["kinds"].pop()
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"kinds\[0\].kinds: should have 10 numbers"):
        rekindle.Explanation.load(path)


@pytest.mark.usefixtures("few_sets")
def test_two_explanations_of_one_step_are_equal() -> None:
    model, batch = dropped()
    one = rekindle.explain(model, batch, device="meta", like="cpu")
    assert rekindle.explain(model, batch, device="meta", like="cpu") == one


@pytest.mark.usefixtures("few_sets")
@pytest.mark.parametrize("options", [{}, {"device": "meta", "like": "H100"}], ids=["cpu", "meta"])
def test_the_model_ends_as_it_was(options: dict[str, Any]) -> None:
    model, batch = dropped()
    model(batch).backward()
    with unchanged(model):
        rekindle.explain(model, batch, **options)


@pytest.mark.usefixtures("few_sets")
def test_strategies_that_are_applied_are_off_meanwhile_and_on_again() -> None:
    model, batch = gpt()
    plain = rekindle.explain(model, batch, device="meta", like="cpu")
    rekindle.apply(model, {"blocks.*": "recompute"})
    with unchanged(model):
        found = rekindle.explain(model, batch, device="meta", like="cpu")
    rekindle.remove(model)
    assert found.peak == plain.peak


class Fails(nn.Module):
    """Raises an error in the backward of its second step."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.stack, self.calls, self.allowed = Stack(2, DIM), [0], allowed

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.calls[0] > self.allowed:
            raise KeyError("contrived")
        out: Tensor = self.stack(x).square().mean()
        return out


@pytest.mark.usefixtures("few_sets")
def test_the_model_ends_as_it_was_where_the_recorded_step_fails() -> None:
    """The recorded step is the last: the error is raised in it."""
    x = torch.randn(4, DIM)
    counted = Fails(10**6)
    rekindle.explain(counted, x, device="meta", like="cpu")
    model = Fails(counted.calls[0] - 1)
    with unchanged(model), pytest.raises(KeyError, match="contrived"):
        rekindle.explain(model, x, device="meta", like="cpu")


def out_of_memory_at_first(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have the first recorded step run out of memory; returns the steps that were recorded."""
    recorded: list[Any] = []
    record_step = explain_model.record_step

    def record(step: Any, *args: Any) -> Any:
        recorded.append(step)
        if len(recorded) == 1:
            raise torch.OutOfMemoryError("no room")
        return record_step(step, *args)

    monkeypatch.setattr(explain_model, "record_step", record)
    return recorded


@pytest.mark.usefixtures("few_sets")
def test_a_step_that_does_not_fit_is_recorded_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = tied()
    plain = rekindle.explain(model, batch, device="meta", like="cpu")
    recorded = out_of_memory_at_first(monkeypatch)
    with unchanged(model):
        found = rekindle.explain(model, batch)
    assert len(recorded) == 2
    assert found.source == "fake tensors"
    assert (found.peak, found.kinds, found.saved) == (plain.peak, plain.kinds, plain.saved)


class Peeks(nn.Module):
    """Reads a value that no fake tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(3, DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stack(x)
        return out.square().mean() if out.sum().item() < 1e9 else out.mean()


@pytest.mark.usefixtures("few_sets")
def test_one_that_fake_tensors_cannot_run_is_recorded_with_its_blocks_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Peeks(), torch.randn(64, DIM)
    plain = rekindle.explain(model, x)
    out_of_memory_at_first(monkeypatch)
    with unchanged(model):
        found = rekindle.explain(model, x)
    assert plain.source == "device"
    assert found.source == "recompute"
    assert found.peak < plain.peak
    assert "replay" in {each.name for each in found.kinds if each.highest}
    assert "with every block recomputed" in str(found).splitlines()[0]


def test_like_is_for_the_meta_device() -> None:
    model, batch = gpt()
    with pytest.raises(ValueError, match="like= is for"):
        rekindle.explain(model, batch, like="H100")
