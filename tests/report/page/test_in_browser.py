"""Pages in Chromium: what they show is what their document has, for every way to look at it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle.sizes import format_bytes
from tests.browsing import Page
from tests.report.cases import GIB, KEEP, explanation, frontier, mixed_plan, profile_of

pytest.importorskip("scipy")
pytestmark = pytest.mark.browser

LEFT, RIGHT, HOME, END, DOWN = "\ue012", "\ue014", "\ue011", "\ue010", "\ue015"
TIMES, MINUS = "\u00d7", "\u2212"
Open = Callable[[str], Page]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    hostile = replace(profile_of(model="</script><b>[[script]]"), device="<i>x</i>")
    mixed_plan().save(folder / "plan.json")
    explanation().save(folder / "explanation.json")
    loaded = rekindle.Explanation.load(folder / "explanation.json")
    return {
        "plan": mixed_plan().report(folder / "plan.html", points=5, explanation=explanation()),
        "frontier": frontier().report(folder / "f.html", others={"torch": (12 * GIB, 0.34)}),
        "explanation": explanation().report(folder / "explanation.html", points=3),
        "explanation alone": loaded.report(folder / "alone.html"),
        "loaded plan": rekindle.Plan.load(folder / "plan.json").report(folder / "loaded.html"),
        "hostile": hostile.report(folder / "hostile.html", points=2),
        "one block": profile_of(1).report(folder / "one.html", points=2),
    }


KINDS = ("plan", "frontier", "explanation", "explanation alone", "loaded plan", "one block")
every_kind = pytest.mark.parametrize("kind", KINDS)
both_themes = pytest.mark.parametrize("theme", ["light", "dark"])


@pytest.fixture
def open_page(browser: Any, paths: dict[str, Path]) -> Iterator[Open]:
    yield lambda kind: Page(browser, paths[kind])
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def stop_of(page: Page) -> dict[str, Any]:
    """The stop that the slider is at."""
    stop: dict[str, Any] = page.document["plans"]["stops"][int(page.run("return budget.value"))]
    return stop


def formatted_time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def check_shown(page: Page) -> None:
    """Compare what is shown with the stop that the slider is at."""
    stop, plans = stop_of(page), page.document["plans"]
    panel = "#panels > :last-child"
    ratio = f"{stop['seconds'] / plans['stops'][plans['plain']]['seconds']:.2f}{TIMES}"
    assert page.text("#budget-value") == format_bytes(stop["budget"])
    assert page.text("#code") == stop["code"]
    values = [text.split(" ") for text in page.texts(f"{panel} dd")]
    assert " ".join(values[0]).startswith(format_bytes(stop["peak"]))
    assert " ".join(values[1]).startswith(formatted_time(stop["seconds"]))
    assert " ".join(values[2]).startswith(ratio)
    assert " ".join(values[3]).startswith(format_bytes(stop["moved"]))
    spoken = page.find("#budget").get_attribute("aria-valuetext")
    time_and_ratio = f"{formatted_time(stop['seconds'])} a step, {ratio} the time without a plan"
    assert spoken == f"{format_bytes(stop['budget'])}: {time_and_ratio}"
    labels = page.run(
        f"return [...document.querySelectorAll('{panel} .block')].map(e => e.ariaLabel)"
    )
    texts = [plans["candidates"][index]["text"] for index in stop["choice"]]
    assert labels == [f"{path}: {text}" for path, text in zip(plans["paths"], texts, strict=True)]
    assert page.text(f"{panel} .peak-text") == f"peak {format_bytes(stop['step']['peak'])}"


def test_every_stop_of_the_slider_shows_its_plan(open_page: Open) -> None:
    page = open_page("frontier")
    page.press("#budget", HOME)
    check_shown(page)
    for _ in range(len(page.document["plans"]["stops"]) - 1):
        page.press("#budget", RIGHT)
        check_shown(page)


def test_keys_move_the_slider_from_stop_to_stop(open_page: Open) -> None:
    page = open_page("frontier")
    last = len(page.document["plans"]["stops"]) - 1
    found = []
    for key in (HOME, RIGHT, RIGHT, LEFT, END, RIGHT):
        page.press("#budget", key)
        found.append(int(page.run("return budget.value")))
    assert found == [0, 1, 2, 1, last, last]


def test_the_slider_is_dragged(open_page: Open) -> None:
    from selenium.webdriver import ActionChains  # noqa: PLC0415

    page = open_page("frontier")
    page.press("#budget", END)
    slider = page.find("#budget")
    half = slider.size["width"] // 2
    drag = ActionChains(page.browser, duration=20).move_to_element_with_offset(slider, half - 14, 0)
    drag.click_and_hold().move_by_offset(-half, 0).release().perform()
    assert 0 < int(page.run("return budget.value")) < len(page.document["plans"]["stops"]) - 1
    check_shown(page)


def test_a_point_of_the_curve_chooses_its_plan(open_page: Open) -> None:
    page = open_page("frontier")
    page.run("document.querySelector('.target').dispatchEvent(new MouseEvent('click'))")
    assert page.run("return budget.value") == "0"
    check_shown(page)


def test_the_curve_names_what_was_measured_elsewhere(open_page: Open) -> None:
    page = open_page("frontier")
    assert [text for text in page.texts("#curve .mark") if "H100" not in text] == [
        *("every block recomputed", "torch")
    ]


def test_the_table_of_a_curve_has_its_numbers(open_page: Open) -> None:
    page = open_page("frontier")
    page.open_table("#curve .numbers")
    rows = page.texts("#curve tbody tr td:nth-child(2)")
    plans = page.document["plans"]
    points = [*plans["stops"], *plans["others"]]
    assert rows == [format_bytes(point["peak"]) for point in points]


def test_the_table_of_a_step_has_its_moments(open_page: Open) -> None:
    page = open_page("frontier")
    page.open_table(".panel .numbers")
    plans, stop = page.document["plans"], stop_of(page)
    memory = [plans["columns"][index] for index in stop["step"]["memory"]]
    totals = [plans["static"] + sum(causes) for causes in zip(*memory, strict=True)]
    shown = page.texts(".panel details.numbers[open] tbody td:nth-child(3)")
    assert shown == [format_bytes(total) for total in totals]


def test_keys_move_along_the_moments_of_a_step(open_page: Open) -> None:
    page = open_page("frontier")
    page.press("#budget", HOME)
    page.press(".panel .chart input", HOME, RIGHT)
    spoken = page.find(".panel .chart input").get_attribute("aria-valuetext")
    assert spoken.endswith(" in the forward of layers.0")
    assert page.text(".panel .chart ~ .where") == spoken
    page.press(".panel .chart input", END, LEFT)
    assert page.text(".panel .chart ~ .where").endswith(" in the replay and backward of layers.0")


def test_the_peak_is_told_by_its_causes(open_page: Open) -> None:
    page = open_page("frontier")
    plans, stop = page.document["plans"], stop_of(page)
    values = [plans["columns"][i][stop["step"]["peak_moment"]] for i in stop["step"]["memory"]]
    shown = page.texts(".panel .chart ~ .keys b")
    causes = [sum(plans["columns"][i]) > 0 for i in stop["step"]["memory"]]
    expected = [value for value, is_there in zip(values, causes, strict=True) if is_there]
    assert shown == [format_bytes(value) for value in (plans["static"], *expected)]


def test_keys_move_along_the_blocks(open_page: Open) -> None:
    page = open_page("plan")
    page.press(".block", HOME)
    found = []
    for _ in range(3):
        found.append(page.text(".strip ~ .where").partition(". ")[0])
        page.press(".block:focus", RIGHT)
    assert found == [
        "layers.0 Layer: keep",
        "layers.1 Layer: recompute",
        "layers.2 Layer: recompute mlp.act and 1 result (mul), keep the rest",
    ]
    assert page.run("return document.querySelectorAll('.block[tabindex=\"0\"]').length") == 1


def test_a_block_under_the_pointer_is_named_with_its_bytes(open_page: Open) -> None:
    from selenium.webdriver import ActionChains  # noqa: PLC0415

    page = open_page("plan")
    ActionChains(page.browser, duration=0).move_to_element(
        page.find(".block:nth-child(4)")
    ).perform()
    text = page.text(".strip ~ .where")
    assert text.startswith(
        "layers.3 Layer: offload 2 results (mm x2), keep the rest. 400 MiB kept, "
    )
    assert "500 MiB offloaded; forward 10.0 ms, backward 20.0 ms" in text


def test_bars_are_as_high_as_their_bytes(open_page: Open) -> None:
    page = open_page("plan")
    script = (
        "return [...document.querySelectorAll('.block:nth-child(4) .bar')].map(e => e.style.height)"
    )
    assert page.run(script) == [f"{100 * 500 / 900:.2f}%", f"{100 * 400 / 900:.2f}%"]
    classes = (
        "return [...document.querySelectorAll('.block:nth-child(6) .bar')].map(e => e.className)"
    )
    assert page.run(classes) == ["bar spill", "bar keep"]


def test_a_pinned_plan_stays_beside_the_one_that_is_chosen(open_page: Open) -> None:
    page = open_page("frontier")
    page.press("#budget", HOME)
    page.find("#pin").click()
    page.press("#budget", END)
    lowest, highest = (page.document["plans"]["stops"][i] for i in (0, -1))
    assert page.texts(".panel h2") == [
        f"Pinned: {format_bytes(lowest['budget'])}",
        f"Now: {format_bytes(highest['budget'])}",
    ]
    assert page.texts(".panel .peak-text") == [
        f"peak {format_bytes(stop['peak'])}" for stop in (lowest, highest)
    ]
    saved = format_bytes(highest["peak"] - lowest["peak"])
    assert f"+{saved} against the pinned" in page.text(".panel:last-child .facts")
    page.find("#pin").click()
    assert page.texts(".panel h2") == ["The step by this plan"]


def test_the_line_of_code_is_copied(open_page: Open) -> None:
    page = open_page("frontier")
    page.run("document.addEventListener('copy', () => (window.copied = String(getSelection())))")
    page.run(
        "navigator.clipboard && (navigator.clipboard.writeText = async t => { window.copied = t })"
    )
    page.find("#copy").click()
    assert page.text("#said") == "Copied."
    assert page.run("return window.copied") == stop_of(page)["code"]


def test_a_loaded_plan_is_shown_without_a_slider(open_page: Open) -> None:
    page = open_page("loaded plan")
    assert not page.find("#budget").is_displayed()
    assert "rekindle.Profile.load" in page.text(".notice")
    assert len(page.texts(".block")) == 8


def test_an_explanation_shows_its_peak_and_its_shares(open_page: Open) -> None:
    page = open_page("explanation")
    values = page.document["explanation"]
    assert page.text("h1").startswith(f"Gpt takes {format_bytes(values['peak'])}, which fits")
    for by in ("group", "line", "op", "kind", "module"):
        page.run(f"document.getElementById('share-{by}').click()")
        rows = sorted(values["shares"][by], key=lambda row: -row[2])
        expected = [format_bytes(row[2]) for row in rows if row[2]][:12]
        assert page.texts(".shares .share-name b") == expected


def test_keys_choose_how_memory_is_shared_out(open_page: Open) -> None:
    page = open_page("explanation")
    page.press("#share-group", RIGHT)
    values = page.document["explanation"]
    first = max(values["shares"]["line"], key=lambda row: row[2])
    assert page.texts(".shares code")[0] == values["names"][first[0]]


def test_all_shares_are_shown_when_asked_for(open_page: Open) -> None:
    page = open_page("explanation")
    page.run("document.getElementById('share-module').click()")
    page.find(".more").click()
    count = sum(row[2] > 0 for row in page.document["explanation"]["shares"]["module"])
    assert len(page.texts(".shares > li")) == count > 12


def test_saved_tensors_name_their_op_and_line(open_page: Open) -> None:
    page = open_page("explanation")
    first = page.document["explanation"]["saved"][0]
    row = page.texts("#explained-saved tbody tr")[0]
    assert row.startswith(format_bytes(first["bytes"]))
    assert first["op"] in row
    assert first["line"] in row


def test_changes_have_their_code_and_effect(open_page: Open) -> None:
    page = open_page("explanation")
    changes = page.document["explanation"]["changes"]
    shown = page.texts("#explained-changes > ol .effect")
    assert [text.partition(" · ")[0] for text in shown] == [
        f"{MINUS}{format_bytes(change['saved'])}" for change in changes
    ]


def test_a_block_names_the_largest_saved_tensors_in_it(open_page: Open) -> None:
    page = open_page("explanation")
    page.press(".block", HOME)
    details = page.text(".strip ~ .where")
    assert details.startswith("blocks.0 GptBlock: ")
    assert "Largest saved without a plan: " in details
    assert "tests/explanation/models.py:" in details


def test_bytes_are_written_as_rekindle_prints_them(open_page: Open) -> None:
    page = open_page("one block")
    counts = [0, 1, 1023, 1024, 1280, 1344, 5 * 2**18, 2**30 - 1, 3 * 2**29, 5 * 2**28, 2**40 + 1]
    counts += [7919**power for power in range(1, 4)]
    assert page.run("return arguments[0].map(formatBytes)", counts) == list(
        map(format_bytes, counts)
    )


@every_kind
def test_nothing_is_asked_from_elsewhere_and_nothing_is_complained_about(
    kind: str, open_page: Open
) -> None:
    page = open_page(kind)
    assert {url.partition(":")[0] for url in page.requests()} <= {"file", "data"}
    assert page.complaints() == []
    assert page.run("return document.documentElement.dataset.ready") == "yes"


@every_kind
@both_themes
def test_a_narrow_screen_shows_all_without_moving_sideways(
    kind: str, theme: str, open_page: Open
) -> None:
    page = open_page(kind)
    page.prefer(theme)
    page.set_width(360)
    page.wait_for("return [...document.querySelectorAll('svg')].every(e => e.clientWidth < 360)")
    script = """
      const isInside = e => e.closest('.scroll, .offscreen, .skip');
      return [...document.querySelectorAll('body *')]
        .filter(e => !isInside(e) && e.getBoundingClientRect().right > 360.5)
        .map(e => e.outerHTML.slice(0, 80));
    """
    assert page.run(script) == []
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.run(wide) == 0


CONTRAST = """
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => v / 255).map(
      v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const color = rgba(getComputedStyle(e).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const e = node.parentElement, style = getComputedStyle(e);
    if (!node.data.trim() || !e.checkVisibility() || e.closest('script, title, .skip')) continue;
    const ink = rgba(e instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), isBold = Number(style.fontWeight) >= 700;
    const least = size >= 24 || (size >= 18.66 && isBold) ? 3 : 4.5;
    if ((a + 0.05) / (b + 0.05) < least) found.push([node.data.trim(), ink, ground(e)]);
  }
  return found;
"""


@pytest.mark.parametrize("kind", ["plan", "explanation"])
@both_themes
def test_text_stands_out_from_its_ground(kind: str, theme: str, open_page: Open) -> None:
    page = open_page(kind)
    page.prefer(theme)
    assert page.run(CONTRAST) == []


def test_the_theme_is_that_of_the_system_until_it_is_switched(open_page: Open) -> None:
    page = open_page("frontier")
    ground = "return getComputedStyle(document.body).backgroundColor"
    page.prefer("light")
    light = page.run(ground)
    page.prefer("dark")
    dark = page.run(ground)
    assert light != dark
    page.wait_for("return byId('theme').ariaLabel === 'Switch to the light theme'")
    page.find("#theme").click()
    assert page.run(ground) == light
    page.prefer("light")
    page.find("#theme").click()
    assert page.run(ground) == dark


@every_kind
def test_everything_that_is_used_has_a_name(kind: str, open_page: Open) -> None:
    page = open_page(kind)
    shown = [
        element
        for element in page.browser.find_elements("css selector", "button, input, summary")[:40]
        if element.is_displayed()
    ]
    assert shown
    assert [e.get_attribute("outerHTML") for e in shown if not e.accessible_name] == []


@every_kind
def test_every_drawing_has_a_role_and_a_text(kind: str, open_page: Open) -> None:
    page = open_page(kind)
    script = """
      return [...document.querySelectorAll('svg:not([aria-hidden])')]
        .filter(e => e.getAttribute('role') !== 'img' || !e.ariaLabel).length
    """
    assert page.run(script) == 0


@every_kind
def test_a_page_has_one_heading_of_the_first_level_and_no_id_twice(
    kind: str, open_page: Open
) -> None:
    page = open_page(kind)
    assert len([text for text in page.texts("h1") if text]) == 1
    ids = page.run("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_texts_that_look_like_html_are_texts(open_page: Open) -> None:
    page = open_page("hostile")
    assert page.text("h1").startswith("</script><b>[[script]] in ")
    assert page.run("return document.querySelectorAll('main b, main i').length > 0")
    assert page.run("return document.querySelectorAll('h1 b').length") == 0
    assert "<i>x</i>" in page.text("#about")
    assert page.complaints() == []


def test_a_tiled_block_is_told_apart(browser: Any, tmp_path: Path) -> None:
    """Contrived: whatever runs tiles, a candidate says so in its words."""
    page = Page(browser, frontier().report(tmp_path / "page.html"))
    page.run(
        """
        const page = JSON.parse(byId('document').textContent);
        page.plans.candidates.forEach(each => { each.words = ['tile']; each.text = 'in 8 tiles'; });
        fillPanel(document.querySelector('.panel'), page, page.plans.stops[0], 'Tiles', null);
        """
    )
    assert "in tiles8 blocks" in page.texts(".panel .key")
    assert len(page.texts(".block.tile")) == 8
    assert KEEP.words == ("keep",)
