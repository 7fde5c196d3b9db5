"""``fdp epsilon``: the epsilon of a mechanism, the noise for a budget, and what is printed."""

from __future__ import annotations

import json
import math
import re

import pytest
import typer
from typer.testing import CliRunner

from fdp.cli.configure import make_clip_style
from fdp.cli.epsilon import epsilon_command
from fdp.cli.train_options import PrivacyOptions
from fdp.privacy import accounting
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson
from fdp.privacy.shown_numbers import round_up
from fdp.types import FdpError

SETTING = "--delta 1e-5 --population 10000 --batch-size 400 --steps 200"


@pytest.fixture
def run():
    app = typer.Typer()
    app.command("epsilon")(epsilon_command)
    return lambda words: CliRunner().invoke(app, words.split(), env={"COLUMNS": "200"})


def result(answer) -> dict:
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout.strip().splitlines()[-1])


def test_noise_gives_epsilon(run):
    answer = run(f"--noise-multiplier 1.5 {SETTING} --json")
    got = result(answer)
    mechanism = Mechanism(poisson(10_000, expected_batch_size=400), flat(max_norm=1.0), 1.5)
    pld, rdp = (accounting.epsilon(mechanism, steps=200, delta=1e-5, accountant=a) for a in accounting.Accountant)
    assert got["epsilon"] == got["epsilon_pld"] == pld
    assert got["epsilon_rdp"] == rdp
    assert (got["noise_multiplier"], got["delta"], got["steps"]) == (1.5, 1e-5, 200)
    assert got["sampling_rate"] == 0.04
    for words in ("PLD", "RDP", "100", round_up(pld, 4), round_up(rdp, 4), "after 200 steps"):
        assert words in answer.stdout


def test_epsilon_gives_noise(run):
    got = result(run(f"--epsilon 2 {SETTING} --json"))
    assert 1.98 <= got["epsilon"] <= 2.0
    again = result(run(f"--noise-multiplier {got['noise_multiplier']!r} {SETTING} --json"))
    assert again["epsilon"] == got["epsilon"]


def test_printed_numbers_are_rounded_to_the_safe_side(run):
    """Noise copied from the screen keeps within the budget, and the epsilon shown is not below the true one."""
    for target in (0.7, 1.3, 2, 5):
        answer = run(f"--epsilon {target} {SETTING} --json")
        [(noise, spent)] = re.findall(r"noise multiplier (\S+): epsilon (\S+) at", answer.stdout)
        assert float(noise) >= result(answer)["noise_multiplier"]
        assert target >= float(spent) >= result(answer)["epsilon"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.41123, "0.4113"), (2.99961, "3"), (9.9991, "10"), (1.5, "1.5"), (0.1, "0.1"), (0.0, "0"), (math.inf, "inf")],
)
def test_rounding_up_never_lowers_and_keeps_round_numbers(value, shown):
    assert round_up(value, 4) == shown


def test_the_named_accountant_gives_the_result(run):
    got = result(run(f"--epsilon 2 --accountant rdp {SETTING} --json"))
    assert got["accountant"] == "rdp"
    assert got["epsilon"] == got["epsilon_rdp"] <= 2.0
    assert got["epsilon_pld"] < got["epsilon_rdp"]


def test_truncation_and_count_noise_reach_the_accountant(run):
    plain = result(run(f"--noise-multiplier 1.5 {SETTING} --json"))
    cut = result(run(f"--noise-multiplier 1.5 --max-batch-size 410 {SETTING} --json"))
    counted = result(run(f"--noise-multiplier 1.5 --count-noise 2 {SETTING} --json"))
    assert cut["epsilon"] > plain["epsilon"]
    assert cut["epsilon_rdp"] is None
    assert counted["epsilon"] > plain["epsilon"]
    assert counted["effective_noise_multiplier"] < 1.5


def test_quantile_clipping_is_accounted_as_fdp_train_does(run):
    words = f"--noise-multiplier 1.5 {SETTING}"
    plain, counted = (result(run(f"{words} {more} --json")) for more in ("", "--clip quantile"))
    clip = make_clip_style(PrivacyOptions(clip="quantile"), batch_size=plain["expected_batch_size"])
    assert counted["count_noise"] == clip.count_noise is not None
    assert counted["epsilon"] > plain["epsilon"], "Mutation: without the noised count it would be too low"
    assert counted["epsilon"] == result(run(f"{words} --count-noise {clip.count_noise} --json"))["epsilon"]
    assert "this includes the count of quantile clipping" in run(f"{words} --clip quantile").stdout
    assert result(run(f"{words} --clip flat --json"))["epsilon"] == plain["epsilon"]
    wrong = run(f"{words} --clip quantiles")
    assert isinstance(wrong.exception, FdpError)
    assert "--clip: expected one of flat, per-layer, automatic, quantile, got quantiles" in str(wrong.exception)


def test_no_noise_is_null_in_json(run):
    assert result(run(f"--noise-multiplier 0 {SETTING} --json"))["epsilon"] is None


def test_the_plot_is_a_png(run, tmp_path):
    file = tmp_path / "budget.png"
    answer = run(f"--noise-multiplier 1.5 {SETTING} --plot {file}")
    assert answer.exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "{" not in answer.stdout


def test_a_delta_too_large_for_the_data_is_pointed_out(run):
    words = "--noise-multiplier 1.5 --population 1000 --batch-size 40 --steps 20 --delta"
    assert "publishing one sample" in run(f"{words} 1e-3").stdout
    assert "publishing one sample" not in run(f"{words} 1e-4").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (SETTING, "exactly one of --noise-multiplier and --epsilon, got neither"),
        (f"--noise-multiplier 1 --epsilon 1 {SETTING}", "got both"),
        (f"--noise-multiplier 1 {SETTING} --plot nowhere/to/be/found.png", "--plot"),
        (f"--noise-multiplier 1 {SETTING} --plot figure.pdf", "--plot"),
        ("--noise-multiplier 1 --delta 2 --population 100 --batch-size 4 --steps 2", "delta"),
        ("--noise-multiplier 1 --delta 1e-5 --population 100 --batch-size 400 --steps 2", "batch larger"),
        (f"--epsilon 2 --accountant rdp --max-batch-size 450 {SETTING}", "no Renyi bound"),
    ],
)
def test_mistakes_are_explained(run, words, message):
    answer = run(words)
    assert answer.exit_code != 0
    assert isinstance(answer.exception, FdpError)
    assert message in str(answer.exception)
