"""The parts of a report page besides its charts: tiles, tables, the plan, the settings, texts and the statement.

>>> show_tiles(run), show_settings(runs), show_plan(run)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.report.contents import Contents, Setting, State, differing_settings
from fdp.report.markup import Html, element, join
from fdp.report.panels import badge, colour, cost_badge, coverage

COVERED = (
    ("the parameters: model.safetensors or model/, and all that is computed from them alone", "good", "covered"),
    ("epsilon, the norm of the parameters, and the clipping bound C at every step", "good", "covered"),
    ("settings, plan and learning rate: config.json, plan.json", "free", "public"),
    ("losses, gradient norms, clipped shares, numbers of samples, times and memory: metrics.jsonl, summary.json, "
     "report.png, tensorboard/, wandb/ and this page", "bad", "not covered"),
    ("checkpoints/, which hold the key of the noise", "bad", "not covered"),
    ("the choice of settings, if it was made by looking at results on this data", "bad", "not covered"),
)  # fmt: skip
"""What the budget covers and what it does not, with a badge each."""


def show_tiles(run: Contents) -> Html:
    """Return the main figures of one run."""
    return element("div", *[tile for tile in _tiles(run) if tile is not None], class_="tiles")


def _tiles(run: Contents) -> list[Html | None]:
    found, not_covered, several = run.results, coverage([run], covered=False), run.results["world_size"] or 1
    done, planned = found["steps"], found["steps_planned"]
    left = f"{number(found['seconds_per_step'])} s per step" if found["seconds_per_step"] else None
    speed = found["samples_per_second"]
    ranks = "first rank" if several > 1 else str(found["device"] or "")
    memory = found["peak_memory_bytes"]
    first = None if found["loss_first"] is None else f"from {found['loss_first']:.3f} at the first step"
    return [
        _tile("Training loss", decimals(found["loss_last"], 3), first, not_covered),
        _held_out_tile(run),
        _accuracy_tile(run),
        _epsilon_tile(run),
        _tile("Steps", f"{done:,}", f"of {planned:,}, {run.state.value}", None, share=done / planned),
        _tile("Time", duration(found["seconds"]), left, not_covered) if done else None,
        _tile("Clipped samples", percent(found["clipped_fraction"]), "mean over the steps", not_covered)
        if found["clipped_fraction"] is not None
        else None,
        _tile("Throughput", number(speed), "samples per second", not_covered) if speed else None,
        _tile("Peak memory", f"{memory / 2**30:.2f} GiB", ranks, not_covered) if memory else None,
    ]


def _held_out_tile(run: Contents) -> Html | None:
    loss, best = run.results["held_out_loss_last"], run.results["held_out_loss_best"]
    if loss is None or run.cost is None:
        return None
    perplexity = run.results["held_out_perplexity"]
    more = [] if perplexity is None else [f"perplexity {number(perplexity)}"]
    if best < loss:
        more.append(f"best {best:.3f} at step {run.results['held_out_loss_best_step']}")
    more += _trained_too(run)
    return _tile("Held-out loss", f"{loss:.3f}", "; ".join(more), cost_badge(run.cost))


def _accuracy_tile(run: Contents) -> Html | None:
    accuracy = run.results["held_out_accuracy_last"]
    return (
        _tile("Held-out accuracy", percent(accuracy), "; ".join(_trained_too(run)), cost_badge(run.cost or ""))
        if accuracy is not None
        else None
    )


def _trained_too(run: Contents) -> list[str]:
    """Return what a held-out figure measures if samples of it are trained on; nothing if none is."""
    shared = run.results["held_out_samples_trained_on"]
    return [f"{shared:,} of the samples {'is' if shared == 1 else 'are'} trained on too"] if shared else []


def _epsilon_tile(run: Contents) -> Html:
    found, covered = run.results, coverage([run], covered=True)
    if not run.private or found["epsilon_planned"] is None:
        return _tile("Privacy", "none", "the parameters may reveal the data", covered)
    spent, budget = found["epsilon_spent"] or 0.0, found["epsilon_planned"]
    more = f"of {shown_epsilon(budget)} at delta {shown_delta(found['delta'])}; {found['epsilon_left']:.3f} left"
    if (covers := found["total_in_words"]) is not None:
        at = "" if found["epsilon_total"] is None else f"at delta {shown_delta(found['delta_total'])}, "
        part = f"this run alone: {shown_epsilon(spent)} {more}"
        return _tile("Epsilon of the model", _total(run), f"{at}{covers}; {part}", covered)
    return _tile("Epsilon spent", shown_epsilon(spent), more, covered, share=spent / budget if budget else 0.0)


def _total(run: Contents) -> str:
    """Return the epsilon of the model, with the runs that it started from and the search that chose it."""
    if run.results["total_in_words"] is None:
        return ""
    return "none" if run.results["epsilon_total"] is None else shown_epsilon(run.results["epsilon_total"])


def _tile(name: str, value: str, more: str | None, mark: Html | None, *, share: float | None = None) -> Html:
    width = None if share is None else element("i", style=f"width:{100 * min(1.0, max(0.0, share)):.1f}%")
    return element(
        "div",
        element("div", name, " ", mark, class_="name"),
        element("div", value, class_="value"),
        element("div", more, class_="more") if more else None,
        None if width is None else element("div", width, class_="meter"),
        class_="tile",
    )


def show_results(runs: Sequence[Contents]) -> Html:
    """Return the figures of several runs as a table, one row per run."""
    not_covered, covered = coverage(runs, covered=False), coverage(runs, covered=True)
    costs = dict.fromkeys(run.cost for run in runs if run.cost)
    heads = [("run", None), ("state", None), ("loss", not_covered), ("held-out loss", join(map(cost_badge, costs)))]
    chained = any(run.results["total_in_words"] is not None for run in runs)
    heads += [("perplexity", None), ("epsilon spent", covered), ("of", None)]
    heads += [("epsilon of the model, with earlier runs", covered)] if chained else []
    heads += [("clipped", not_covered), ("samples/s", not_covered), ("memory", not_covered)]
    rows = []
    for i, run in enumerate(runs):
        found = run.results
        name = element("th", element("i", class_=f"swatch {colour(i)}"), " ", run.name)
        spent, budget = found["epsilon_spent"], found["epsilon_planned"]
        memory = found["peak_memory_bytes"]
        cells = [
            decimals(found["loss_last"], 3),
            "; ".join([decimals(found["held_out_loss_last"], 3), *_trained_too(run)]),
            number(found["held_out_perplexity"]),
            "not private" if not run.private else shown_epsilon(spent or 0.0),
            "" if not run.private or budget is None else shown_epsilon(budget),
            *([_total(run)] if chained else []),
            percent(found["clipped_fraction"]),
            number(found["samples_per_second"]),
            f"{memory / 2**30:.2f} GiB" if memory else "",
        ]
        steps = f"{run.state.value}, {found['steps']:,} of {found['steps_planned']:,} steps"
        values = [element("td", cell, class_="number") for cell in cells]
        rows.append(element("tr", name, element("td", steps, class_="state"), *values, class_=f"run-{i}"))
    top = [
        element("th", name, None if mark is None else element("div", mark), class_="number" if i > 1 else None)
        for i, (name, mark) in enumerate(heads)
    ]
    return table(element("tr", *top), rows)


def show_differences(runs: Sequence[Contents]) -> Html:
    """Return the settings that differ between the runs."""
    rows = [
        element("tr", element("th", element("code", setting.flag)), *[element("td", shown(value)) for value in values])
        for setting, values in differing_settings(runs)
    ]
    if not rows:
        return element("p", "All settings are the same.", class_="dim")
    top = [element("th", element("i", class_=f"swatch {colour(i)}"), " ", run.name) for i, run in enumerate(runs)]
    return table(element("tr", element("th", "setting"), *top), rows)


def show_settings(run: Contents) -> Html:
    """Return the settings: those that differ from the defaults, then the others, folded."""
    changed = [each for each in run.settings if each.changed]
    others = [each for each in run.settings if not each.changed]
    first = _settings_table(changed, default=True) if changed else element("p", "Every setting is the default.")
    rest = element(
        "details", element("summary", f"{len(others)} settings with their defaults"), _settings_table(others)
    )
    return join([first, rest if others else None])


def _settings_table(settings: Sequence[Setting], *, default: bool = False) -> Html:
    rows = [
        element(
            "tr",
            element("th", element("code", each.flag)),
            element("td", shown(each.value)),
            element("td", shown(each.default), class_="dim") if default else None,
            element("td", each.group, class_="dim"),
        )
        for each in settings
    ]
    names = ["setting", "value", *(["default"] if default else []), "group"]
    return table(element("tr", *[element("th", name) for name in names]), rows)


def show_plan(run: Contents) -> Html:
    """Return how the norms and the sum of every layer are computed; equal layers of repeated blocks are one row."""
    plan = run.plan
    if plan is None:
        return element("p", "This run has no plan.json: it was made by an older version.", class_="dim")
    if not plan["rows"]:
        return element(
            "p", "Plain training: no sample's gradient is clipped, so there is nothing to plan.", class_="dim"
        )
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in plan["rows"]:
        pattern = re.sub(r"(?<=[./])\d+(?=[./])|^\d+(?=[./])", "*", str(row["leaf"]))
        same = (pattern, row["use"], *map(str, (row["shape"], row["input_shape"])), row["norm"], row["sum"])
        groups.setdefault(same, []).append(row)
    rows = [_plan_row(key, found) for key, found in groups.items()]
    names = ["layer", "times", "operation", "shape", "input", "norm by", "sum by", "stored"]
    numeric = {"times", "stored"}
    top = element("tr", *[element("th", name, class_="number" if name in numeric else None) for name in names])
    about = (
        f"Method {plan.get('method')}, {plan.get('microbatch')} samples at a time, {plan.get('dtype')}; "
        f"{size(plan.get('stored_bytes'))} are stored between the norms and the sum."
    )
    return join([element("p", about), table(top, rows, kind="plan")])


def _plan_row(key: tuple[Any, ...], rows: Sequence[dict[str, Any]]) -> Html:
    pattern, use, _, _, norm, how = key
    shape, inputs = (" x ".join(map(str, rows[0][name])) for name in ("shape", "input_shape"))
    stored = sum(row.get("stored_bytes") or 0.0 for row in rows)
    name = pattern if len(rows) > 1 else str(rows[0]["leaf"])
    cells = [element("td", text) for text in (use, shape, inputs, norm, how)]
    return element(
        "tr",
        element("th", element("code", name)),
        element("td", str(len(rows)), class_="number"),
        *cells,
        element("td", size(stored), class_="number"),
    )


def show_texts(run: Contents) -> Html | None:
    """Return the generated texts, the newest first and the earlier ones folded."""
    if not run.texts:
        return None
    newest, *earlier = [
        join(
            [element("p", f"after step {step}", class_="dim"), *[element("pre", text, class_="text") for text in texts]]
        )
        for step, texts in reversed(run.texts)
    ]
    folded = element("details", element("summary", f"{len(earlier)} earlier"), *earlier) if earlier else None
    return join([newest, folded])


def show_coverage(runs: Sequence[Contents]) -> Html:
    """Return the list of what the budget covers and what it does not."""
    if not any(run.private for run in runs):
        return element("p", "No run is private: the parameters, and everything else, may reveal the data.")
    rows = [element("tr", element("td", badge(kind, word, what)), element("td", what)) for what, kind, word in COVERED]
    return table(element("tr", element("th", "budget"), element("th", "what")), rows)


def show_state(run: Contents) -> Html:
    """Return a badge that says how far a run has come."""
    kind = {State.FINISHED: "good", State.STOPPED: "bad", State.UNFINISHED: "free", State.DIVERGED: "bad"}[run.state]
    return badge(kind, run.state.value, f"{run.results['steps']} of {run.results['steps_planned']} steps")


def table(head: Html, rows: Sequence[Html], *, kind: str | None = None) -> Html:
    """Return a table that scrolls by itself where it is too wide."""
    parts = element("table", element("thead", head), element("tbody", *rows), class_=kind)
    return element("div", parts, class_="scroll", tabindex="0")


def shown(value: Any) -> str:
    """Return the value of a setting as text."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: float | None) -> str:
    """Return about three digits, with separators; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def decimals(value: float | None, count: int) -> str:
    """Return a number with so many decimals; ``n/a`` for None."""
    return "n/a" if value is None else f"{value:.{count}f}"


def percent(share: float | None) -> str:
    """Return a share as per cent; nothing for None."""
    return "" if share is None else f"{100 * share:.3g} %"


def duration(seconds: float) -> str:
    """Return a time in hours, minutes and seconds."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"


def size(count: float | None) -> str:
    """Return a number of bytes with its unit."""
    if count is None or not math.isfinite(count):
        return ""
    power = min(3, max(0, int(math.log(count, 1024)))) if count >= 1 else 0
    return f"{count / 1024**power:,.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
