"""The report page in a real browser: no errors, no requests, figures there, nothing wider than a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fdp.cli.report import read_runs, write_page
from tests.report.browser import Browser, Page, find_browser, open_browser
from tests.report.run_folders import make_records, write_run

pytestmark = pytest.mark.skipif(find_browser() is None, reason="chromium is not installed: apt-get install chromium")

EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
SHAPES = """[...document.querySelectorAll("svg path")].map(path => path.getAttribute("d"))"""
DRAWN = """[...document.querySelectorAll("figure")].map(figure => {
  const drawing = [...figure.querySelectorAll("svg")].find(each => each.getBoundingClientRect().width > 0);
  const lines = [...drawing.querySelectorAll("path.line")];
  return [figure.id, drawing.getBoundingClientRect().height, Math.max(...lines.map(each => each.getTotalLength()))];
})"""
OVERLAPS = """[...document.querySelectorAll("figure")].flatMap(figure => {
  const boxes = [...figure.querySelectorAll(".x-axis span")].map(each => each.getBoundingClientRect())
    .filter(box => box.width > 0).sort((a, b) => a.left - b.left);
  const heads = [figure.querySelector("h3"), ...figure.querySelectorAll(".badge")].map(e => e.getBoundingClientRect());
  const touch = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const pairs = list => list.flatMap((a, i) => list.slice(i + 1).map(b => [a, b]));
  return [...pairs(boxes), ...pairs(heads)].filter(([a, b]) => touch(a, b)).map(() => figure.id);
})"""
CONTRAST = """(() => {
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(each => each / 255)
      .map(each => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : colour;
  };
  return [...document.querySelectorAll("p, td, th, h1, h2, h3, small, label, .badge, .value, .more, .name, .sub, li")]
    .filter(element => element.getBoundingClientRect().width > 0)
    .map(element => {
      const [a, b] = [light(getComputedStyle(element).color), light(behind(element))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), element.className + " " + element.tagName];
    }).filter(([ratio]) => ratio < 4.5);
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of one run, of an evil one, of an unfinished one and of several, each written once."""
    folder = tmp_path_factory.mktemp("runs")
    one = write_run(folder / "one", make_records(3000, evaluate_every=100, texts=("a" * 300, "two\nlines")), lr=8e-3)
    evil = write_run(folder / "evil", make_records(20, evaluate_every=5, texts=(EVIL,)), model=EVIL, data=EVIL)
    half = write_run(folder / ("long-name-" * 8), make_records(30), planned=90, finished=False)
    plain = write_run(folder / "plain", make_records(40, private=False), method="none")
    chosen = {"one": [one], "evil": [evil], "half": [half], "several": [one, evil, half, plain]}
    return {name: write_page(read_runs(runs), folder / f"{name}.html") for name, runs in chosen.items()}


def check(page: Page) -> None:
    assert page.complaints == []
    wide, there = page.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= there, "nothing is wider than the window"
    shapes = page.run(SHAPES)
    assert len(shapes) >= 10
    assert not [shape for shape in shapes if "NaN" in shape or "Infinity" in shape or "nan" in shape]
    drawn = page.run(DRAWN)
    assert {"figure-loss", "figure-learning-rate"} <= {name for name, _, _ in drawn}
    assert all(height > 100 and length > 0 for _, height, length in drawn)
    assert page.run(OVERLAPS) == []


@pytest.mark.parametrize("name", ["one", "evil", "half", "several"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_is_drawn_without_errors_at_any_width(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    page = browser.open(pages[name], width=width)
    assert page.run("innerWidth") == width
    check(page)
    assert page.run("document.title") != "taken", "the name of a run is not run"


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable_in_light_and_dark(browser: Browser, pages: dict[str, Path], dark: bool) -> None:
    page = browser.open(pages["several"], width=1280, dark=dark)
    assert page.run(CONTRAST) == []


def test_the_pointer_reads_out_values_and_runs_can_be_switched_off(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["several"], width=1280, height=2000)
    box = page.run("""(() => { const canvas = document.querySelector("#figure-loss .linear .canvas");
        canvas.scrollIntoView(); const box = canvas.getBoundingClientRect(); return [box.x, box.y, box.width]; })()""")
    page.move_pointer(box[0] + box[2] / 200, box[1] + 20)
    shown = page.run("""document.querySelector("#figure-loss .linear .read").innerText""")
    assert shown.startswith("step ")
    assert "one, training" in shown
    page.run("""document.querySelector(".runs input").click()""")
    assert page.run("""getComputedStyle(document.querySelector("path.run-0")).display""") == "none"
    page.run("""document.querySelector("#log-loss").click()""")
    assert page.run("""getComputedStyle(document.querySelector("#figure-loss .log")).display""") == "grid"
    assert page.complaints == []


def test_the_page_works_without_its_script(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["one"], width=390, script=False)
    assert len(page.screenshot(height=900)) > 10_000
    assert page.complaints == []


def test_the_checks_see_what_they_look_for(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><div style='width:900px'>x</div><script>missing()</script><img src='http://x.test/'>"
    )
    page = browser.open(bad, width=390)
    assert any("missing is not defined" in each for each in page.complaints)
    assert any("http://x.test/" in each for each in page.complaints)
    assert page.run("document.documentElement.scrollWidth") > 390
