"""The report page: one HTML file with everything in it, for one run or several side by side.

The page loads nothing from anywhere, and its policy forbids it to. It shows metrics of private data, so it is written
with mode 0600 and says so.

    >>> write_private(Path("report.html"), make_page(runs))
"""

from __future__ import annotations

from collections.abc import Sequence

from fdp.report.charts import Chart, draw
from fdp.report.contents import Contents
from fdp.report.markup import Html, data_block, element, join
from fdp.report.panels import badge, colour, coverage, make_charts
from fdp.report.promise import BULLET
from fdp.report.sections import (
    show_coverage,
    show_differences,
    show_plan,
    show_results,
    show_settings,
    show_state,
    show_texts,
    show_tiles,
)
from fdp.report.style import CSS, SCRIPT, script_hash

MARK = "<!-- made by fdp report -->"
"""The second line of every page, by which a page may be replaced and another file may not."""
NOT_TO_SHARE = (
    "This page is not covered by the privacy budget. Its losses, norms, counts and times are computed on private data "
    "without noise: guard it as you guard the data. Each figure is marked."
)
NOT_PRIVATE = "This run is not private: neither the parameters nor this page are protected."
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src '{hash}'; img-src data:; base-uri 'none'"


def make_page(runs: Sequence[Contents]) -> str:
    """Return the page of these runs as HTML."""
    charts = make_charts(runs)
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY.format(hash=script_hash())),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="robots", content="noindex"),
        element("title", f"{title}: fdp report"),
        Html(f"<style>{CSS}</style>"),
    )
    body = element(
        "body",
        element(
            "main", _head(runs), *(_one(runs[0], charts) if len(runs) == 1 else _several(runs, charts)), _foot(runs)
        ),
        data_block({chart.name: _read_outs(chart) for chart in charts}, name="chart-data"),
        Html(f"<script>{SCRIPT}</script>"),
    )
    return f"<!doctype html>\n{MARK}\n" + element("html", head, body, lang="en") + "\n"


def _head(runs: Sequence[Contents]) -> Html:
    private = any(run.private for run in runs)
    note = element("p", NOT_TO_SHARE if private else NOT_PRIVATE, class_="warn")
    if len(runs) == 1:
        (run,) = runs
        count = run.results["parameter_count"]
        about = [run.path, f"{count:,} parameters" if count else None, run.results["device"]]
        return element(
            "header",
            element("h1", run.title),
            element("p", " · ".join(str(each) for each in about if each), " ", show_state(run), class_="sub"),
            note,
        )
    entries = [
        element(
            "li",
            element(
                "label",
                element("input", type="checkbox", value=str(i), checked=True),
                element("i", class_=f"swatch {colour(i)}"),
                element("span", run.name, " ", element("small", run.title, class_="dim")),
            ),
        )
        for i, run in enumerate(runs)
    ]
    return element(
        "header", element("h1", f"{len(runs)} runs"), note, element("ul", *entries, class_="runs", aria_label="runs")
    )


def _one(run: Contents, charts: Sequence[Chart]) -> list[Html]:
    public, covered = badge("free", "public", "Shapes and settings alone."), coverage([run], covered=True)
    texts = show_texts(run)
    return [
        show_tiles(run),
        _section("Figures", element("div", *map(draw, charts), class_="charts") if charts else _nothing()),
        _section("What is promised", _statement(run)),
        _section("What the budget covers", element("div", show_coverage([run]), class_="card")),
        *([] if texts is None else [_section("Generated texts", element("div", texts, class_="card"), covered)]),
        _section("Configuration", element("div", show_settings(run), class_="card"), public),
        _section("Plan per layer", element("div", show_plan(run), class_="card"), public),
    ]


def _several(runs: Sequence[Contents], charts: Sequence[Chart]) -> list[Html]:
    def fold(run: Contents, content: Html | None, i: int) -> Html | None:
        if content is None:
            return None
        swatch = element("i", class_=f"swatch {colour(i)}")
        return element("details", element("summary", swatch, " ", run.name), content, class_=f"fold run-{i}")

    statements = [fold(run, _words(run), i) for i, run in enumerate(runs)]
    texts = [fold(run, show_texts(run), i) for i, run in enumerate(runs)]
    public = badge("free", "public", "Shapes and settings alone.")
    return [
        _section("Results", element("div", show_results(runs), class_="card")),
        _section("Settings that differ", element("div", show_differences(runs), class_="card"), public),
        _section("Figures", element("div", *map(draw, charts), class_="charts") if charts else _nothing()),
        _section("What is promised", _card(statements, "statement")),
        _section("What the budget covers", element("div", show_coverage(runs), class_="card")),
        *([_section("Generated texts", _card(texts), coverage(runs, covered=True))] if any(texts) else []),
        _section("Configuration", _card([fold(run, show_settings(run), i) for i, run in enumerate(runs)]), public),
        _section("Plan per layer", _card([fold(run, show_plan(run), i) for i, run in enumerate(runs)]), public),
    ]


def _section(title: str, content: Html, mark: Html | None = None) -> Html:
    return element("section", element("h2", title, " ", mark), content)


def _card(parts: Sequence[Html | None], more: str = "") -> Html:
    return element("div", *parts, class_=f"card {more}".strip())


def _nothing() -> Html:
    return element("p", "No step has been made yet.", class_="card")


def _statement(run: Contents) -> Html:
    warning = run.results["warning"]
    return element(
        "div", _words(run), element("p", warning, class_="warn") if warning else None, class_="card statement"
    )


def _words(run: Contents) -> Html:
    """Return the statement; lines that begin with a bullet are a list."""
    parts = []
    for paragraph in run.statement.split("\n\n"):
        lines = paragraph.splitlines()
        if lines and all(line.startswith(BULLET) for line in lines):
            parts.append(element("ul", *[element("li", line.removeprefix(BULLET)) for line in lines]))
        elif lines:
            parts.append(element("p", paragraph))
    return join(parts)


def _foot(runs: Sequence[Contents]) -> Html:
    versions = runs[0].config.get("versions") or {}
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    return element("footer", f"Made by fdp report. {words}")


def _read_outs(chart: Chart) -> list[dict[str, object]]:
    """Return the values that the page reads out under the pointer."""
    return [
        {"label": line.label, "run": line.run, "colour": line.css.split()[0], **line.curve.as_json()}
        for line in chart.lines
        if line.label is not None
    ]
