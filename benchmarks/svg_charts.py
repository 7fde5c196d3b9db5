"""Charts as SVG text: the same numbers always give the same bytes, and they are readable in light and dark.

    >>> svg = line_chart("Milliseconds per step", {"fdp": {512: 31.2, 1024: 54.1}}, x_label="tokens", colors={"fdp": 0})
    >>> svg = dot_chart("Test accuracy", {"DP-SGD": [0.96, 0.93]}, show="{:.3f}")

Axes of a line chart are logarithmic, since times and sizes grow by factors. Every line ends in its name.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 760, 400
COLORS = ("#00897b", "#5e6ad2", "#c2410c", "#b45309", "#64748b", "#be185d")
DARK_COLORS = ("#4db6ac", "#a5b0ff", "#fb923c", "#fbbf24", "#a3b1c6", "#f472b6")
STYLE = """<style>
.card{fill:#fff;stroke:#d8dee4}.text{fill:#24292f}.soft{fill:#57606a}.grid{stroke:#e4e8ec}
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;font-size:13px}
.title{font-size:15px;font-weight:600}.line{fill:none;stroke-width:2}.strong{stroke-width:3.5}
%s
@media (prefers-color-scheme: dark){
.card{fill:#1e2129;stroke:#3a3f4b}.text{fill:#e6e8ee}.soft{fill:#a9afbd}.grid{stroke:#343945}
%s
}
</style>"""
Series = Mapping[str, Mapping[float, float]]


def _style() -> str:
    def rules(colors: Sequence[str]) -> str:
        each = (f".s{i}{{stroke:{color}}}.f{i}{{fill:{color}}}" for i, color in enumerate(colors))
        return "".join(each)

    return STYLE % (rules(COLORS), rules(DARK_COLORS))


def _open(title: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        _style(),
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="text title" x="20" y="30">{escape(title)}</text>',
    ]


def line_chart(title: str, series: Series, *, x_label: str, colors: Mapping[str, int], strong: str = "") -> str:
    """Return lines over two logarithmic axes; ``colors`` gives each series a colour, ``strong`` a thicker line."""
    left, right, top, bottom = 66, 250, 52, 50
    xs = sorted({x for points in series.values() for x in points})
    ys = [y for points in series.values() for y in points.values()]
    low, high = math.log10(min(ys)) - 0.06, math.log10(max(ys)) + 0.06

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log2(x / xs[0]) / math.log2(xs[-1] / xs[0])
        up = (math.log10(y) - low) / (high - low)
        return left + across * (WIDTH - left - right), HEIGHT - bottom - up * (HEIGHT - top - bottom)

    parts = _open(title, HEIGHT)
    for tick in _ticks(low, high):
        y = at(xs[0], tick)[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="soft" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    for x in xs:
        place = at(x, 10**low)[0]
        parts.append(
            f'<text class="soft" x="{place:.1f}" y="{HEIGHT - bottom + 20}" text-anchor="middle">{x:,g}</text>'
        )
    middle = (left + WIDTH - right) / 2
    parts.append(f'<text class="soft" x="{middle:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    ends = []
    for name, points in series.items():
        places = [at(x, y) for x, y in sorted(points.items())]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        wide = " strong" if name == strong else ""
        parts.append(f'<polyline class="line s{colors[name]}{wide}" points="{path}"/>')
        parts += [f'<circle class="f{colors[name]}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        ends.append((places[-1][1], name))
    for y, name in _apart(ends):
        bold = ' font-weight="600"' if name == strong else ""
        parts.append(
            f'<text class="f{colors[name]}" x="{WIDTH - right + 10}" y="{y + 4:.1f}"{bold}>{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def dot_chart(title: str, groups: Mapping[str, Sequence[float]], *, show: str) -> str:
    """Return one row per group: a dot per value, a bar at the mean, and the mean and deviation as text."""
    left, right, top, row = 250, 130, 56, 34
    height = top + row * len(groups) + 18
    values = [value for group in groups.values() for value in group]
    margin = 0.08 * (max(values) - min(values) or 1.0)
    low, high = min(values) - margin, max(values) + margin

    def at(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - left - right)

    parts = _open(title, height)
    for index, (name, group) in enumerate(groups.items()):
        y, mean = top + row * index + row / 2, statistics.mean(group)
        parts.append(f'<text class="text" x="20" y="{y + 4:.1f}">{escape(name)}</text>')
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts += [
            f'<circle class="f0" cx="{at(value):.1f}" cy="{y:.1f}" r="4.5" fill-opacity="0.55"/>' for value in group
        ]
        parts.append(f'<rect class="f2" x="{at(mean) - 1.5:.1f}" y="{y - 10:.1f}" width="3" height="20"/>')
        text = show.format(mean) + (f" ± {show.format(statistics.stdev(group))}" if len(group) > 1 else "")
        parts.append(f'<text class="text" x="{WIDTH - 20}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def bar_chart(title: str, bars: Mapping[str, float], *, show: str, strong: str = "") -> str:
    """Return one horizontal bar per entry, from 0."""
    left, right, top, row = 330, 80, 52, 30
    height = top + row * len(bars) + 16
    longest = max(bars.values())
    parts = _open(title, height)
    for index, (name, value) in enumerate(bars.items()):
        y, length = top + row * index, value / longest * (WIDTH - left - right)
        color = "f0" if name == strong else "f4"
        parts.append(f'<text class="text" x="{left - 10}" y="{y + 17}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="{color}" x="{left}" y="{y + 3}" width="{length:.1f}" height="20" rx="3"/>')
        parts.append(f'<text class="text" x="{left + length + 8:.1f}" y="{y + 17}">{show.format(value)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5 times powers of ten between two logarithms; only powers and halves if there are many."""
    steps = (1, 2, 5) if high - low < 2.2 else (1, 3)
    found = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [tick for tick in found if low <= math.log10(tick) <= high]


def _apart(ends: Sequence[tuple[float, str]], distance: float = 17) -> list[tuple[float, str]]:
    """Return labels by height, moved down where two would touch."""
    placed: list[tuple[float, str]] = []
    for y, name in sorted(ends):
        placed.append((max(y, placed[-1][0] + distance) if placed else y, name))
    return placed
