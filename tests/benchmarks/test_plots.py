"""The plots in docs/images are those that the results give, and are well-formed."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.plots import FOLDER, PLOTS
from benchmarks.svg_charts import bar_chart, dot_chart, line_chart


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_drawn_from_the_results(name: str) -> None:
    drawn = PLOTS[name]()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "run: python -m benchmarks.plots"
    assert drawn == PLOTS[name]()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_well_formed_has_a_title_and_adapts_to_dark(path) -> None:
    root = ElementTree.fromstring(path.read_text())
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in path.read_text()
    assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", "")


def test_labels_of_lines_do_not_touch() -> None:
    svg = line_chart("t", {"a": {1: 10, 2: 20}, "b": {1: 10, 2: 20.1}}, x_label="x", colors={"a": 0, "b": 1})
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    places = {text.text: float(text.get("y", "0")) for text in texts}
    assert abs(places["a"] - places["b"]) >= 15


def test_charts_show_their_numbers() -> None:
    assert "0.950 ± 0.014" in dot_chart("t", {"a": [0.96, 0.94]}, show="{:.3f}")
    assert ">0.91<" in bar_chart("t", {"a": 0.909}, show="{:.2f}")
