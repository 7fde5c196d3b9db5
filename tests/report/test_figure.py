"""``report.png``: titles that do not touch, the held-out loss, and what is left of epsilon."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fdp.gradients.plan import Method
from fdp.report.figure import draw_report
from tests.report.run_folders import make_records


def make_run(*, private: bool = True, steps: int = 40) -> Any:
    """Return the parts of a run that the figure reads."""
    config = SimpleNamespace(before=(), steps=steps, delta=1e-6, method=Method.AUTO if private else Method.NONE)
    return SimpleNamespace(config=config, epsilons=[8.0] if private else None)


def texts_of(figure: Any) -> list[Any]:
    """Return the titles, the labels of axes and ticks, and the note below, as far as they are shown."""
    found = [figure._suptitle, figure._supxlabel]
    for axes in figure.axes:
        found += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
    return [text for text in found if text.get_text()]


@pytest.mark.parametrize("title", ["gpt-nano on stdlib", "a-model-with-a-long-name/" * 10, r"$x_{$ on {y}\frac"])
@pytest.mark.parametrize("private", [True, False])
def test_titles_do_not_touch(title: str, private: bool) -> None:
    records = make_records(40, private=private, evaluate_every=10)
    figure = draw_report(make_run(private=private), records, title=title)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts_of(figure)]
    assert len(boxes) >= 11
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    width, height = canvas.get_width_height()
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes)


def test_the_figure_shows_held_out_loss_and_what_is_left() -> None:
    figure = draw_report(make_run(), make_records(40, evaluate_every=10, cost="outside"), title="run")
    loss, epsilon, norms = ([text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes)
    assert loss == ["training", "held out (outside the guarantee)"]
    assert epsilon == ["spent", "of all 40 steps", "left"]
    assert norms == ["10 % to 90 %", "median", "C"]


def test_a_run_without_steps_or_finite_norms_is_drawn() -> None:
    draw_report(make_run(), [], title="run")
    bare = [record._replace(norm_q10=None, norm_q50=None, norm_q90=None) for record in make_records(2)]
    draw_report(make_run(), bare, title="run")
