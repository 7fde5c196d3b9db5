"""Charts as inline SVG: scales, ticks, lines, bands and dots.

    x -> 1000 (x - low) / (high - low)        y -> 400 (high - y) / (high - low), or the same of log y

The drawing is stretched to the width of its place, while strokes keep their width and labels, which are HTML beside the
drawing, keep their size: a chart reads the same on a phone and on a screen. Coordinates are always finite.

    >>> chart = Chart("loss", "Loss of a sample", "nats", (Line("training", loss, "c0"),), badge=badge)
    >>> draw(chart)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fdp.report.curves import Curve
from fdp.report.markup import Html, element, join

WIDTH, HEIGHT = 1000, 400
"""The units of a drawing; how large it is shown depends on the page."""


class Line(NamedTuple):
    """A curve to draw. ``css`` are classes: a colour ``c0``..``c7`` and a style: ``faint``, ``dashed``, ``dots``.

    ``run`` is the number of the run it belongs to. A ``label`` of None is not read out.
    """

    label: str | None
    curve: Curve
    css: str
    run: int = 0


class Band(NamedTuple):
    """The area between two curves of the same steps."""

    low: Curve
    high: Curve
    css: str
    run: int = 0


class Chart(NamedTuple):
    """One chart. ``from_zero`` starts the axis at 0; ``logarithmic`` draws a logarithmic version, as the first if 2.

    ``summary`` says in words what is seen, for readers who do not see it. ``keys`` are (css, label) of the legend.
    ``last_step`` extends the axis to steps that are planned.
    """

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    badges: tuple[Html, ...]
    summary: str
    bands: tuple[Band, ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    from_zero: bool = False
    logarithmic: int = 0
    last_step: int = 1
    top: float | None = None
    wide: bool = False


class Scale(NamedTuple):
    """An axis: the values at its ends, and whether it is logarithmic."""

    low: float
    high: float
    log: bool = False

    def place(self, values: np.ndarray) -> np.ndarray:
        """Return positions between 0 and 1; NaN for values that a logarithmic axis cannot show."""
        if not self.log:
            return (values - self.low) / (self.high - self.low)
        with np.errstate(invalid="ignore", divide="ignore"):
            shown = np.where(values > 0, np.log(np.where(values > 0, values, 1.0)), math.nan)
        return (shown - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def ticks(self) -> list[float]:
        """Return 3 to 7 round values on the axis."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def draw(chart: Chart) -> Html:
    """Return the chart as a ``figure``: title, badges, legend and one or two drawings."""
    classes = "chart wide" if chart.wide else "chart"
    head = element(
        "figcaption",
        element("h3", chart.title, " ", element("small", chart.unit)),
        element("span", *chart.badges, class_="badges"),
    )
    keys = [element("li", element("i", class_=f"key {css}"), label) for css, label in chart.keys]
    legend = element("ul", *keys, class_="keys") if keys else None
    views = _views(chart)
    switch = f"log-{chart.name}"
    box = element("input", type="checkbox", id=switch, class_="log-switch", checked=chart.logarithmic == 2)
    label = element("label", "logarithmic", for_=switch)
    several = len(views) > 1
    row = element("div", legend, label if several else None, class_="row") if several or legend else None
    return element("figure", head, box if several else None, row, *views, class_=classes, id=f"figure-{chart.name}")


def _views(chart: Chart) -> list[Html]:
    """Return the drawing, and where it is offered a logarithmic one; the page shows one of them, without a script."""
    present = np.concatenate([each.present for each in _curves(chart)] or [np.array([])])
    if not len(present):
        return [element("p", "no values yet", class_="empty")]
    if not chart.logarithmic or present.min() <= 0:
        return [_plot(chart, _value_scale(chart, present, log=False), "only")]
    return [_plot(chart, _value_scale(chart, present, log=log), "log" if log else "linear") for log in (False, True)]


def _plot(chart: Chart, scale: Scale, view: str) -> Html:
    across = Scale(1 if chart.last_step > 1 else 0, max(2, chart.last_step) if chart.last_step > 1 else 2)
    x_ticks = [tick for tick in across.ticks() if float(tick).is_integer()]
    y_ticks = scale.ticks()
    left = [_tick(tick_label(value, y_ticks), 1 - p, "top") for value, p in _placed(y_ticks, scale)]
    below = [_tick(tick_label(value, x_ticks), p, "left") for value, p in _placed(x_ticks, across)]
    grid = "".join(f"M0 {_round(HEIGHT * (1 - p))}H{WIDTH}" for _, p in _placed(y_ticks, scale))
    shapes = [element("path", d=grid, class_="grid")] if grid else []
    shapes += [_draw_band(band, across, scale) for band in chart.bands]
    shapes += [_draw_line(line, across, scale) for line in chart.lines]
    drawing = element(
        "svg",
        element("title", chart.summary),
        *shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{chart.title}. {chart.summary}",
    )
    return element(
        "div",
        element("div", *left, class_="y-axis", aria_hidden="true"),
        element("div", drawing, class_="canvas"),
        element("div", *below, class_="x-axis", aria_hidden="true"),
        element("div", "step", class_="x-name", aria_hidden="true"),
        class_=f"plot {view}",
        data_chart=chart.name,
        data_low=f"{across.low:g}",
        data_high=f"{across.high:g}",
    )


def tick_label(value: float, ticks: Sequence[float]) -> str:
    """Return a value of an axis in as many digits as tell its ticks apart."""
    if value == 0:
        return "0"
    largest = max(abs(tick) for tick in ticks)
    if largest >= 1e6 or largest < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    decimals = next((n for n in range(6) if all(math.isclose(round(tick, n), tick) for tick in ticks)), 6)
    return f"{value:,.{decimals}f}"


def _curves(chart: Chart) -> list[Curve]:
    return [line.curve for line in chart.lines] + [each for band in chart.bands for each in (band.low, band.high)]


def _value_scale(chart: Chart, present: np.ndarray, *, log: bool) -> Scale:
    """Return an axis that holds all values with a little room."""
    low, high = float(present.min()), float(present.max())
    if log:
        room = max((high / low) ** 0.05, 1.02)
        return Scale(low / room, high * room, log=True)
    high = high if chart.top is None else max(high, chart.top)
    low = min(0.0, low) if chart.from_zero else low
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low if chart.from_zero and low == 0 else low - room, high if chart.top == high else high + room)


def _linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        every = max(1, len(decades) // 7) if multiples == (1,) else 1
        ticks = [m * 10.0**d for d in decades if d % every == 0 for m in multiples]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks
    return _linear_ticks(low, high)


def _placed(ticks: Sequence[float], scale: Scale) -> list[tuple[float, float]]:
    return list(zip(ticks, scale.place(np.array(ticks, dtype=float)).tolist()))


def _tick(text: str, position: float, side: str) -> Html:
    return element("span", text, style=f"{side}:{100 * position:.2f}%")


def _draw_line(line: Line, across: Scale, scale: Scale) -> Html:
    """Return a path with a gap at every missing value; a point between two gaps is a dot."""
    xs, ys = WIDTH * across.place(line.curve.steps), HEIGHT * (1 - scale.place(line.curve.values))
    parts, pen = [], False
    dots = "dots" in line.css.split()
    for x, y in zip(xs.tolist(), ys.tolist()):
        if not math.isfinite(y):
            pen = False
            continue
        parts.append(f"{'L' if pen else 'M'}{_round(x)} {_round(y)}")
        parts += [] if pen else ["h0"]
        pen = True
    path = element("path", d="".join(parts), class_=f"line {line.css} run-{line.run}")
    if not dots:
        return path
    marks = [f"M{_round(x)} {_round(y)}h0" for x, y in zip(xs.tolist(), ys.tolist()) if math.isfinite(y)]
    return join([path, element("path", d="".join(marks), class_=f"marks {line.css} run-{line.run}")])


def _draw_band(band: Band, across: Scale, scale: Scale) -> Html:
    """Return the area as one shape per run of steps at which both curves are present."""
    xs = (WIDTH * across.place(band.low.steps)).tolist()
    lows = (HEIGHT * (1 - scale.place(band.low.values))).tolist()
    highs = (HEIGHT * (1 - scale.place(band.high.values))).tolist()
    shapes, part = [], []
    for x, low, high in [*zip(xs, lows, highs), (math.nan,) * 3]:
        if math.isfinite(low) and math.isfinite(high):
            part.append((x, low, high))
            continue
        if len(part) > 1:
            corners = [(x, high) for x, _, high in part] + [(x, low) for x, low, _ in reversed(part)]
            shapes.append("M" + "L".join(f"{_round(x)} {_round(y)}" for x, y in corners) + "Z")
        part = []
    return element("path", d="".join(shapes), class_=f"band {band.css} run-{band.run}")


def _round(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
