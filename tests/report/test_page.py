"""The report page: self-contained, escaped, below 1 MB, for every kind of run."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fdp.cli.report import read_runs
from fdp.report.charts import Chart, Line, Scale, draw, tick_label
from fdp.report.contents import State, as_json
from fdp.report.curves import Curve
from fdp.report.markup import Html, data_block, element, join
from fdp.report.page import NOT_PRIVATE, NOT_TO_SHARE, make_page
from fdp.report.sections import duration, size
from fdp.run.step_record import StepRecord
from tests.report.run_folders import make_records, write_run

EVIL = '<script>alert("run")</script><img src=x onerror=alert(1)>'
VOID = {"meta", "input", "br", "img", "path"}


class Reader(HTMLParser):
    """The elements, attributes and text of a page; raises if an element is not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(*folders: Path) -> Reader:
    """Return the page of these runs, after the checks that every page passes."""
    page = make_page(read_runs(folders))
    assert len(page.encode()) < 1_000_000
    reader = Reader(page)
    assert len(reader.all("script")) == 2
    assert not {"link", "img", "iframe", "object", "base", "form"} & {name for name, _ in reader.elements}
    assert "http://" not in page
    assert "https://" not in page
    for drawing in reader.all("svg"):
        assert drawing["role"] == "img"
        assert drawing["aria-label"]
    for path in reader.all("path"):
        assert all(math.isfinite(float(each)) for each in re.findall(r"-?[\d.]+", path["d"] or ""))
        assert not re.search("[ni]", path["d"] or ""), "nan or inf"
    return reader


def figures(reader: Reader) -> list[str]:
    return [str(each["id"]).removeprefix("figure-") for each in reader.all("figure")]


def test_a_private_run_with_evaluation_shows_everything(tmp_path: Path) -> None:
    records = make_records(60, evaluate_every=10, texts=("once upon a time",))
    reader = page_of(write_run(tmp_path / "run", records, batch_size=128))
    expected = "loss epsilon norms clipped throughput memory learning-rate parameters"
    assert figures(reader) == expected.split()
    text = " ".join(" ".join(reader.text).split())
    for words in (
        NOT_TO_SHARE,
        "gpt-nano on stdlib",
        "finished",
        "Held-out loss",
        "perplexity",
        "8.000 of 8.000 at delta 1e-06; 0.000 left",
        "once upon a time",
        "--batch-size 128 32",
        "blocks.*.qkv",
        "Unit: one window of 129 tokens",
        "checkpoints/, which hold the key of the noise",
    ):
        assert words in text, words
    assert text.index("--batch-size") < text.index("--max-norm"), "settings that were changed come first"


def test_every_figure_says_if_the_budget_covers_it(tmp_path: Path) -> None:
    records = make_records(20, evaluate_every=5, cost="outside")
    page = make_page(read_runs([write_run(tmp_path / "run", records)]))
    marks = {}
    for figure in re.findall(r"<figure.*?</figcaption>", page, re.DOTALL):
        name = re.search(r'id="figure-([\w-]+)"', figure)
        assert name is not None
        marks[name[1]] = re.findall(r'class="badge \w+"[^>]*>([^<]+)<', figure)
    assert marks.pop("loss") == ["not covered", "outside the guarantee"]
    assert {name for name, words in marks.items() if words == ["covered"]} == {"epsilon", "parameters"}
    assert {name for name, words in marks.items() if words == ["public"]} == {"learning-rate"}
    assert {name for name, words in marks.items() if words == ["not covered"]} == {
        "norms", "clipped", "throughput", "memory"
    }  # fmt: skip


@pytest.mark.parametrize(("cost", "words"), [("public", "public"), ("outside", "outside"), ("noised", "covered")])
def test_held_out_figures_are_marked_by_their_cost(tmp_path: Path, cost: str, words: str) -> None:
    reader = page_of(write_run(tmp_path / "run", make_records(20, evaluate_every=5, cost=cost)))
    badges = [each for each in reader.all("span") if "badge" in str(each.get("class"))]
    assert any(str(each["title"]).startswith(("Computed on public", "On held-out", "Released with")) for each in badges)
    assert words in " ".join(reader.text)


def test_held_out_figures_say_how_many_of_their_samples_are_trained_on(tmp_path: Path) -> None:
    records = make_records(20, evaluate_every=5, cost="outside")
    both = [each._replace(evaluation=each.evaluation and each.evaluation._replace(shared=3)) for each in records]
    said = "3 of the samples are trained on too"
    one, other = write_run(tmp_path / "both", both), write_run(tmp_path / "apart", records)
    assert said in " ".join(page_of(one).text)
    assert "trained on too" not in " ".join(page_of(other).text)
    assert " ".join(page_of(one, other).text).count(said) == 1


def test_runs_without_privacy_without_evaluation_unfinished_or_without_steps(tmp_path: Path) -> None:
    plain = page_of(write_run(tmp_path / "plain", make_records(20, private=False), method="none"))
    assert "epsilon" not in figures(plain)
    assert "norms" not in figures(plain)
    text = " ".join(plain.text)
    assert NOT_PRIVATE in text
    assert "This run is not private" in text

    half = page_of(write_run(tmp_path / "half", make_records(10), planned=40, finished=False))
    assert "10 of 40" in " ".join(half.text) or "of 40, not finished" in " ".join(half.text)
    assert "The run has not" in " ".join(half.text)

    stopped = read_runs([write_run(tmp_path / "stopped", make_records(10), planned=40)])
    assert stopped[0].state is State.STOPPED

    none = page_of(write_run(tmp_path / "none", [], planned=40, finished=False))
    assert figures(none) == ["learning-rate"]
    one = page_of(write_run(tmp_path / "one", make_records(1)))
    assert "loss" in figures(one)


def test_a_run_of_an_older_version_has_a_page(tmp_path: Path) -> None:
    """It lacks plan.json, peak memory, planned epsilon, and has an option that is gone."""
    records = [each._replace(peak_memory_bytes=None, parameter_norm=None) for each in make_records(5)]
    folder = write_run(tmp_path / "run", records, finished=False, gone_option=3)
    (folder / "plan.json").unlink()
    config = (folder / "config.json").read_text().replace('"epsilon_planned": 8.0, ', "")
    (folder / "config.json").write_text(config)
    reader = page_of(folder)
    assert "memory" not in figures(reader)
    assert "--gone-option" in " ".join(reader.text)
    assert "no plan.json" in " ".join(reader.text)


def test_missing_and_infinite_values_leave_gaps(tmp_path: Path) -> None:
    records = make_records(30)
    records[3] = records[3]._replace(loss=None, norm_q10=None, norm_q50=None, norm_q90=None)
    records[4] = records[4]._replace(norm_q10=0.0)
    page_of(write_run(tmp_path / "run", records))
    constant = [each._replace(loss=2.0, samples=0, seconds=0.0) for each in make_records(3)]
    page_of(write_run(tmp_path / "constant", constant))


@pytest.mark.long
def test_thousands_of_steps_and_many_runs_stay_below_a_megabyte(tmp_path: Path) -> None:
    long = write_run(tmp_path / "long", make_records(5000, evaluate_every=10, texts=("x" * 5000,)))
    page_of(long)
    many = [write_run(tmp_path / f"run-{i}", make_records(600, evaluate_every=20)) for i in range(12)]
    reader = page_of(long, *many)
    assert "13 runs" in " ".join(reader.text)


def test_a_name_with_markup_is_harmless(tmp_path: Path) -> None:
    records = make_records(10, evaluate_every=5, texts=(EVIL, "</script><script>alert(2)</script>"))
    first = write_run(tmp_path / EVIL.replace("/", "_"), records, model=EVIL, data=f"a{EVIL}b")
    second = write_run(tmp_path / "other", records, train_only=EVIL)
    for reader in (page_of(first), page_of(first, second)):
        assert not reader.all("img")
        assert any("onerror" in text for text in reader.text), "it is shown as text"
        assert all(not name.startswith("on") for _, attributes in reader.elements for name in attributes)


def test_markup_escapes_text_and_attributes() -> None:
    assert element("p", "a<b", element("i", '"'), None, title='"x"', hidden=True, open=False) == (
        '<p title="&quot;x&quot;" hidden>a&lt;b<i>&quot;</i></p>'
    )
    assert join(["&", Html("&amp;")]) == "&amp;&amp;"
    assert "</script><" not in data_block({"a": "</script><b>&"}, name="x").removesuffix("</script>")


def test_several_runs_are_compared(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", make_records(40, evaluate_every=10), lr=4e-3),
        write_run(tmp_path / "b", make_records(20), planned=40, finished=False, lr=8e-3),
        write_run(tmp_path / "c", make_records(40, private=False), method="none"),
    ]
    reader = page_of(*folders)
    text = " ".join(" ".join(reader.text).split())
    assert "--lr 0.004 0.008 0.004" in text
    assert "not finished, 20 of 40 steps" in text
    assert "not private" in text
    found = as_json(read_runs(folders))
    assert found["differing_settings"]["lr"] == [0.004, 0.008, 0.004]
    assert [run["state"] for run in found["runs"]] == ["finished", "not finished", "finished"]


def test_a_page_and_its_json_agree_with_the_records(tmp_path: Path) -> None:
    records: list[StepRecord] = make_records(100, evaluate_every=20)
    (run,) = read_runs([write_run(tmp_path / "run", records)])
    found = run.as_json()
    assert found["results"]["loss_last"] == pytest.approx(records[-1].loss)
    assert found["results"]["epsilon_left"] == pytest.approx(0.0, abs=1e-9)
    assert found["curves"]["epsilon"]["value"][-1] == pytest.approx(8.0)
    assert found["curves"]["held_out_loss"]["step"] == [20, 40, 60, 80, 100]
    assert found["curves"]["learning_rate"]["value"][9] == pytest.approx(4e-3)
    assert records[-1].loss is not None
    assert found["results"]["held_out_perplexity"] == pytest.approx(math.exp(records[-1].loss + 0.1))


def test_a_page_shows_the_perplexity_of_the_tokens_as_the_run_does(tmp_path: Path) -> None:
    records: list[StepRecord] = make_records(20, evaluate_every=20)
    evaluation = records[-1].evaluation
    assert evaluation is not None
    records[-1] = records[-1]._replace(evaluation=evaluation._replace(token_loss=2.0))
    (run,) = read_runs([write_run(tmp_path / "run", records)])
    assert run.results["held_out_perplexity"] == pytest.approx(math.exp(2.0))


@pytest.mark.parametrize(
    ("low", "high", "log", "shown"),
    [
        (0.0, 8.6, False, ["0", "2", "4", "6", "8"]),
        (0.0, 1.1, False, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (2.9, 5.1, False, ["3.0", "3.5", "4.0", "4.5", "5.0"]),
        (0.0, 0.0045, False, ["0", "0.001", "0.002", "0.003", "0.004"]),
        (0.0, 4.5e-5, False, ["0", "1e-5", "2e-5", "3e-5", "4e-5"]),
        (0.4, 300.0, True, ["1", "10", "100"]),
        (0.8, 4.2, True, ["1.0", "2.0", "3.0"]),
        (1.0, 12_000_000.0, False, ["2e6", "4e6", "6e6", "8e6", "1e7", "1.2e7"]),
    ],
)
def test_axes_have_round_ticks(low: float, high: float, log: bool, shown: list[str]) -> None:
    scale = Scale(low, high, log)
    ticks = scale.ticks()
    labels = [tick_label(tick, ticks) for tick in ticks]
    assert labels == shown or (log and len(labels) >= 3 and set(shown) <= set(labels))
    places = scale.place(np.array(ticks))
    assert ((places >= -1e-9) & (places <= 1 + 1e-9)).all()


def test_a_chart_with_one_value_and_a_chart_without() -> None:
    one = Chart("x", "X", "unit", (Line("a", Curve(np.array([3.0]), np.array([0.0])), "c0"),), (), "")
    assert "<svg" in draw(one)
    assert "no values yet" in draw(one._replace(lines=()))


def test_sizes_and_times_have_units() -> None:
    assert [size(each) for each in (0, 512, 2048, 3 * 2**20, 5.5 * 2**30)] == [
        "0 B",
        "512 B",
        "2 KiB",
        "3 MiB",
        "5.5 GiB",
    ]
    assert [duration(each) for each in (3.21, 75, 3700)] == ["3.2 s", "1 min 15 s", "1 h 01 min"]
