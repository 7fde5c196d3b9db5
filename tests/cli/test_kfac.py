"""``fdp train --optimizer kfac``: training, resuming, privacy of the curvature, and mistakes."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fdp import tree
from fdp.cli import resume
from fdp.cli.configure import LEARNING_RATES, configure, learning_rate
from fdp.cli.configure_kfac import make_kfac_config
from fdp.cli.kfac_options import KfacOptions
from fdp.cli.main import main
from fdp.cli.options import Effect, build, options_of, parse_value, to_dict
from fdp.cli.train_options import TrainingOptions, TrainOptions
from fdp.fingerprint import fingerprint
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.form_policy import everything
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.measure.estimator import Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.private.curvature_sources import EPSILON_SHARE, KfacOptimizer, Noised, Synthetic, make_statistics
from fdp.kfac.private.public_data import Public
from fdp.kfac.private.refresh import sides_of
from fdp.privacy import accounting
from fdp.privacy.clipping import flat
from fdp.privacy.guarantee import default_delta
from fdp.privacy.mechanism import Mechanism, statistics
from fdp.privacy.sampling import poisson
from fdp.run import flight
from fdp.run import training_run as runs
from fdp.run.prepare_run import prepare
from fdp.run.run_config import RunConfig
from fdp.run.training_run import draw_batch, refresh_curvature
from fdp.storage.checkpoint_record import Verified
from fdp.types import FdpError

SMALL = shlex.split(
    "train --model mlp --data digits --optimizer kfac --method none --batch-size 32 --microbatch 32 --warmup 1 --seed 1"
)
PRIVATE = ("--method", "auto", "--steps", "5", "--kfac-period", "2")
BATCHES, CLIP, DELTA = poisson(1437, expected_batch_size=32), flat(max_norm=1.0), default_delta(1500)


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main([*SMALL, *words])
    return int(caught.value.code or 0)


def private_config(*words: str) -> tuple[RunConfig, dict[str, Any]]:
    """Return the run of a private command line, and its settings."""
    given = [*SMALL[1:], *PRIVATE, *words]
    pairs = {name[2:].replace("-", "_"): value for name, value in zip(given[::2], given[1::2], strict=True)}
    known = options_of(TrainOptions)
    values = {key: parse_value(text, known[key].value_type, where="test", name=key) for key, text in pairs.items()}
    options = build(TrainOptions, values)
    return configure(options), to_dict(options)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_it_trains_and_shows_the_forms_of_its_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--steps", "21", "--kfac-policy", "all", "--out", str(tmp_path / "run")) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "21 steps of kfac, learning rate 0.1 (cosine)" in text
    assert (
        "sampled Fisher information, damping 0.03, every 10 steps; layers: 1 dense x dense, 1 softmax x dense" in text
    )
    found = summary(tmp_path / "run")
    assert found["loss_last"] < 0.3 * found["loss_first"]
    assert (found["kfac_measured"], found["kfac_failures"], found["private"]) == (7, 0, False)
    assert {line["kfac_failures"] for line in lines_of(tmp_path / "run")} == {0}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_failures_are_in_the_metrics_of_their_step(tmp_path: Path) -> None:
    """With half a sample expected per step, most batches are empty; a layer without a measurement keeps its last."""
    words = "--steps 8 --kfac-period 1 --batch-size 1 --population 3000 --microbatch 1 --kfac-kl-clip 0.001"
    assert call(*shlex.split(words), "--out", str(tmp_path / "run")) == 0
    lines, found = lines_of(tmp_path / "run"), 0
    for line in lines:
        found += 2 * (line["samples"] == 0)  # both layers
        assert line["kfac_failures"] == found
    assert 0 < found < 16
    assert summary(tmp_path / "run")["kfac_failures"] == found


def test_every_option_of_kfac_trains(tmp_path: Path) -> None:
    words = (
        "--steps 3 --kfac-sharing reduce --kfac-momentum 0 --kfac-kl-clip 0 --kfac-max-condition 100 --kfac-rho 9 "
        "--kfac-cap 8 --kfac-damping 1"
    )
    assert call(*shlex.split(words), "--out", str(tmp_path / "run")) == 0
    assert call("--steps", "3", "--kfac-damping", "1", "--out", str(tmp_path / "plain")) == 0
    other, plain = summary(tmp_path / "run"), summary(tmp_path / "plain")
    assert (other["kfac_failures"], plain["kfac_failures"]) == (0, 0)
    assert other["parameter_sha256"] != plain["parameter_sha256"]


@pytest.mark.parametrize(
    "more",
    [
        "--method none",
        "--method auto --noise-multiplier 1 --kfac-data noised",
        pytest.param("--method auto --noise-multiplier 1 --kfac-data synthetic", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_resumes_bit_equal(more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*shlex.split(more), "--steps", "5", "--kfac-period", "2", "--save-every", "1", "--quiet")
    assert call(*words, "--out", str(tmp_path / "whole")) == 0
    real, made = flight.make_step_record, []

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        if len(made) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(flight, "make_step_record", interrupting)
    assert call(*words, "--out", str(tmp_path / "halves")) == 130
    monkeypatch.setattr(flight, "make_step_record", real)
    assert call(*words, "--out", str(tmp_path / "halves")) == 0
    whole, halves = summary(tmp_path / "whole"), summary(tmp_path / "halves")
    assert whole["parameter_sha256"] == halves["parameter_sha256"]
    assert whole["kfac_measured"] == halves["kfac_measured"] == (3 if "noised" in more else 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kfac-damping 0", "--kfac-damping: expected a finite number above 0"),
        ("--kfac-damping -1", "--kfac-damping: expected a finite number above 0"),
        ("--kfac-momentum 1", "--kfac-momentum: expected a decay rate in [0, 1), got 1.0"),
        ("--kfac-kl-clip -1", "--kfac-kl-clip: expected a finite number above 0"),
        ("--kfac-max-condition 1", "--kfac-max-condition: expected a finite number above 1"),
        ("--kfac-rho -1", "--kfac-rho: expected 0 (skip everything) or more, got -1.0"),
        ("--kfac-cap 0", "--kfac-cap: expected at least 1 column, got 0"),
        (
            "--kfac-sharing expandd",
            "--kfac-sharing: expected one of expand, reduce; got 'expandd'. Did you mean 'expand'",
        ),
        (
            "--kfac-policy all --kfac-rho 2",
            "--kfac-rho: expected --optimizer kfac --method none --kfac-policy auto to go",
        ),
        (
            "--kfac-policy all --kfac-distribution ring --kfac-cap 9",
            "--kfac-cap: expected --optimizer kfac --method none, and",
        ),
        ("--kfac-distribution ring --kfac-max-condition 9", "expected gather or owner with --kfac-max-condition"),
        ("--clip-value 1", "--clip-value: expected another --optimizer than kfac, whose updates --kfac-kl-clip bounds"),
        ("--optimizer adagrad --clip-value 0", "--clip-value: expected a finite number above 0, got 0"),
        ("--kfac-period 0", "--kfac-period: expected at least 1 step, got 0"),
        ("--kfac-policy auot", "--kfac-policy: expected one of auto, all; got 'auot'. Did you mean 'auto'?"),
        ("--kfac-fisher true", "--kfac-fisher: expected one of empirical, sampled, exact"),
        ("--kfac-distribution gram", "--kfac-distribution: expected one of gather, ring, owner"),
    ],
)
def test_mistakes_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert call("--out", str(tmp_path / "run"), *shlex.split(words)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--method ghost_bk --noise-multiplier 1",
            "expected a source of curvature in a private run, got none: factors measured on the private",
        ),
        ("--method none --kfac-data synthetic", "expected no --kfac-data without privacy (method none)"),
        ("--method auto --kfac-data digits --noise-multiplier 1", "got the private dataset"),
        ("--method auto --kfac-data nowhere.txt", "a path that exists, got 'nowhere.txt'"),
        ("--method auto --kfac-data synthetic --optimizer adamw", "--kfac-data: expected --optimizer kfac"),
        ("--method auto --kfac-data synthetic --kfac-noise 1", "--kfac-noise: expected --kfac-data noised"),
        ("--method auto --kfac-data noised --kfac-max-norm 0", "--kfac-max-norm: expected"),
        ("--method auto --kfac-data noised --kfac-noise 0", "--kfac-noise: expected a finite number above 0"),
        (
            "--method auto --kfac-data noised --noise-multiplier 0",
            "--noise-multiplier: expected a finite number above 0",
        ),
        (
            "--method auto --kfac-data noised --noise-multiplier 1 --kfac-fisher exact",
            "--kfac-fisher: expected sampled or",
        ),
        (
            "--method auto --kfac-data noised --noise-multiplier 1 --kfac-sharing reduce",
            "--kfac-sharing: expected expand",
        ),
        (
            "--method auto --kfac-data synthetic --noise-multiplier 1 --kfac-cap 9",
            "--kfac-cap: expected --optimizer kfac",
        ),
        (
            "--method auto --kfac-data synthetic --noise-multiplier 1 --kfac-policy all",
            "kfac --method none to go with it",
        ),
        (
            "--method auto --kfac-data synthetic --noise-multiplier 1 --kfac-distribution ring",
            "--kfac-distribution: expected gather or owner with --kfac-data: a private run takes the roots",
        ),
    ],
)
def test_sources_that_reveal_the_data_or_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert call("--steps", "4", "--out", str(tmp_path / "run"), *shlex.split(words)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_synthetic_curvature_spends_no_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert call(*PRIVATE, "--noise-multiplier", "1", "--kfac-data", "synthetic", "--out", str(out)) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "every 2 steps on synthetic data; layers: 2 dense x dense, 2 diagonal x skip" in text
    found = summary(out)
    assert found["epsilon"] == accounting.epsilon(Mechanism(BATCHES, CLIP, 1.0), steps=5, delta=DELTA)
    assert (found["kfac_measured"], found["kfac_failures"], found["private"]) == (4, 0, True)
    assert (found["kfac_data"], found["kfac_noise_multiplier"]) == ("synthetic", None)
    assert found["loss_last"] < found["loss_first"]
    assert json.loads((out / "config.json").read_text())["statistics"] is None


@pytest.mark.long
def test_noised_statistics_are_paid_for_out_of_the_same_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "run", ("--epsilon", "2", "--kfac-data", "noised", "--kfac-noise", "0.8")
    assert call(*PRIVATE, *words, "--out", str(out)) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "a separate draw every 2 steps, clipped to 1, noise 0.8 x that; the budget includes it" in text
    found, config = summary(out), json.loads((out / "config.json").read_text())
    more = statistics(BATCHES, max_norm=1.0, noise_multiplier=0.8, period=2)
    both = Mechanism(BATCHES, CLIP, found["noise_multiplier"], more)
    assert found["epsilon"] == accounting.epsilon(both, steps=5, delta=DELTA) <= 2
    assert found["epsilon"] > accounting.epsilon(both._replace(statistics=None), steps=5, delta=DELTA) * 1.01
    without = accounting.noise_multiplier_for(BATCHES, CLIP, epsilon=2.0, delta=DELTA, steps=5)
    assert found["noise_multiplier"] > without * 1.01
    assert config["statistics"] == {
        "sampling_rate": BATCHES.rate,
        "max_norm": 1.0,
        "noise_multiplier": 0.8,
        "period": 2,
    }
    assert (found["kfac_measured"], found["kfac_failures"]) == (3, 0)
    assert (found["kfac_data"], found["kfac_noise_multiplier"]) == ("noised private", 0.8)
    assert math.isfinite(found["loss_last"])


def test_the_noise_of_statistics_is_computed_from_the_budget_unless_given() -> None:
    optimizer = KfacOptimizer(0.1, KfacConfig(factor_period=2, inverse_period=2), Noised(0.5, None))
    budget: Any = {"steps": 5, "delta": DELTA}
    more = make_statistics(optimizer, BATCHES, epsilon=8.0, noise_multiplier=None, **budget)
    assert more is not None
    alone = Mechanism(BATCHES, CLIP, more.noise_multiplier)
    assert 0.98 * 8 * EPSILON_SHARE < accounting.epsilon(alone, steps=3, delta=DELTA) <= 8 * EPSILON_SHARE
    assert (more.max_norm, more.period, more.sampling) == (0.5, 2, BATCHES)
    same = make_statistics(optimizer, BATCHES, epsilon=None, noise_multiplier=1.25, **budget)
    given = optimizer._replace(source=Noised(0.5, 3.0))
    explicit = make_statistics(given, BATCHES, epsilon=8.0, noise_multiplier=None, **budget)
    assert same is not None
    assert explicit is not None
    assert (same.noise_multiplier, explicit.noise_multiplier) == (1.25, 3.0)
    assert (
        make_statistics(optimizer._replace(source=Synthetic()), BATCHES, epsilon=8.0, noise_multiplier=None, **budget)
        is None
    )
    apart = optimizer._replace(config=KfacConfig(factor_period=2, inverse_period=4))
    with pytest.raises(FdpError, match="inverse_period"):
        make_statistics(apart, BATCHES, epsilon=8.0, noise_multiplier=None, **budget)


def test_public_text_is_a_source_and_the_private_text_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (("private", "one two three four five "), ("copy", ""), ("public", "six seven eight nine ")):
        (tmp_path / f"{name}.txt").write_text((words or "one two three four five ") * 40)
    words = ("--model", "gpt-nano", "--context", "8", "--batch-size", "8", "--microbatch", "8", "--steps", "2")
    words += ("--data", str(tmp_path / "private.txt"), "--method", "auto", "--noise-multiplier", "1", "--delta", "1e-4")
    assert call(*words, "--kfac-data", str(tmp_path / "copy.txt"), "--out", str(tmp_path / "run")) == 2
    assert "got the private dataset" in " ".join(capsys.readouterr().err.split())
    assert call(*words, "--kfac-data", str(tmp_path / "public.txt"), "--out", str(tmp_path / "run")) == 0
    assert "on public data" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    found = summary(tmp_path / "run")
    assert (found["kfac_data"], found["kfac_measured"], found["kfac_failures"]) == ("public", 2, 0)
    assert math.isfinite(found["loss_last"])


@pytest.mark.parametrize("source", ["synthetic", "noised"])
def test_curvature_never_sees_the_batch_of_a_step(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``refresh_curvature`` is not given the batch, and uses another key if it draws."""
    run, state = prepare(private_config("--kfac-data", source, "--noise-multiplier", "1")[0])
    real, used = runs.sample_batch, []

    def watched(dataset: Any, sampling: Any, key: Tensor, **options: Any) -> Any:
        batch = real(dataset, sampling, key, **options)
        assert batch.drawn is not None
        used.append((batch.drawn.stamp.purpose, batch.data["image"][batch.mask > 0].tolist()))
        return batch

    monkeypatch.setattr(runs, "sample_batch", watched)
    nothing: Any = None
    after = refresh_curvature(run, state, nothing, 0)
    again = refresh_curvature(run, state, nothing, 0)
    assert len(used) == (2 if source == "noised" else 0)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(after), tree.leaves(again)))
    draw_batch(run, 0)
    purpose, samples = used[-1]
    assert all(purpose != other and samples != theirs for other, theirs in used[:-1])
    maps = run.stages.preconditioners(after)
    assert sorted(maps) == sorted(run.config.model.trainable)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(maps), tree.leaves(sides_of(after)), strict=True))
    assert (refresh_curvature(run, state, nothing, 1) is state) == (source == "noised")
    assert refresh_curvature(run, state, nothing, 3) is state


def test_other_public_data_or_other_statistics_are_not_the_same_run() -> None:
    config, settings = private_config("--kfac-data", "noised", "--noise-multiplier", "1")
    run, state = prepare(config)
    taken = resume.ResumedRun(Verified(Path("there"), {"meta": resume.checkpoint_meta(run, settings, state)}))
    resume.check_same_run(taken, run)
    more = run.mechanism.statistics
    assert more is not None
    other = run.mechanism._replace(statistics=more._replace(noise_multiplier=0.5))
    with pytest.raises(FdpError, match="as its statistics"):
        resume.check_same_run(taken, run._replace(mechanism=other))
    public_run = run._replace(feed=Public(config.dataset, "a digest"))
    taken = resume.ResumedRun(Verified(Path("there"), {"meta": resume.checkpoint_meta(public_run, settings, state)}))
    resume.check_same_run(taken, public_run)
    with pytest.raises(FdpError, match="got another content of the public data"):
        resume.check_same_run(taken, run._replace(feed=Public(config.dataset, "another")))


def test_another_microbatch_is_not_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Curvature is measured on a microbatch; with noised statistics another one would reuse noise."""
    out = tmp_path / "run"
    words = ("--steps", "2", "--save-every", "1", "--quiet", "--out", str(out))
    assert call(*words) == 0
    (out / "summary.json").unlink()  # as if it had not finished
    assert call(*words, "--microbatch", "16") == 2
    assert "(--microbatch 32 there, 16 here)" in " ".join(capsys.readouterr().err.split())
    assert call(*words, "--microbatch", "32") == 0
    config, settings = private_config("--kfac-data", "noised", "--noise-multiplier", "1")
    run, state = prepare(config)
    assert run.kfac is not None
    found = resume.checkpoint_meta(run, settings, state)
    assert found["measured"] == resume.kfac_microbatch_size(run) == 32
    odd = resume.ResumedRun(Verified(Path("there"), {"meta": found | {"measured": 33}}))  # as on three ranks
    with pytest.raises(FdpError, match="measures curvature on 33 samples of all ranks, got 32"):
        resume.check_same_run(odd, run)
    assert resume.kfac_microbatch_size(run._replace(kfac=None)) is None


def test_without_kfac_another_microbatch_is_the_same_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--optimizer", "sgd", "--steps", "2", "--save-every", "1", "--quiet", "--out", str(out))
    assert call(*words) == 0
    (out / "summary.json").unlink()
    assert call(*words, "--microbatch", "16") == 0


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(("--epsilon", "2"), marks=pytest.mark.long),
        ("--epsilon", "2", "--kfac-noise", "0.8"),
        ("--noise-multiplier", "1"),
    ],
)
def test_fdp_epsilon_agrees_with_a_run_with_noised_statistics(
    budget: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    source = ("--kfac-data", "noised", "--kfac-period", "2")
    run, _ = prepare(private_config(*source[:2], *budget)[0])
    assert run.epsilons is not None
    counts = ("--population", "1500", "--batch-size", "32", "--steps", "5", "--delta", repr(DELTA), "--json")
    with pytest.raises(SystemExit) as caught:
        main(["epsilon", *counts, *source, *budget])
    assert not caught.value.code
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["epsilon"] == run.epsilons[-1]
    assert printed["noise_multiplier"] == run.mechanism.noise_multiplier
    assert run.mechanism.statistics is not None
    assert printed["kfac_noise_multiplier"] == run.mechanism.statistics.noise_multiplier
    without = accounting.epsilon(run.mechanism._replace(statistics=None), steps=5, delta=DELTA)
    assert printed["epsilon"] > 1.001 * without


def test_fdp_epsilon_charges_nothing_for_public_curvature(capsys: pytest.CaptureFixture[str]) -> None:
    counts = shlex.split("--population 1500 --batch-size 32 --steps 5 --delta 1e-5 --noise-multiplier 1 --json")
    found = []
    for words in ((), ("--kfac-data", "synthetic")):
        with pytest.raises(SystemExit):
            main(["epsilon", *counts, *words])
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found[0] == found[1]
    for words, message in (
        (("--kfac-noise", "1"), "--kfac-noise: expected --kfac-data noised to go with it"),
        (("--kfac-data", "noised", "--kfac-period", "0"), "period: expected"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["epsilon", *counts, *words])
        assert caught.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("source", ["synthetic", "noised"])
def test_a_private_run_on_two_ranks_equals_one_rank(source: str) -> None:
    words = ["--model", "mlp", "--data", "digits", "--optimizer", "kfac", "--steps", "3", "--batch-size", "16"]
    options = f"kfac-data={source},kfac-period=2"
    with pytest.raises(SystemExit) as caught:
        main(["compare", options, f"ranks=2,{options}", *words, "--microbatch", "16", "--tolerance", "1e-4"])
    assert not caught.value.code


def test_options_become_settings_and_the_rest_has_its_default() -> None:
    given = KfacOptions(
        damping=0.5,
        period=3,
        policy="all",
        fisher="exact",
        distribution="owner",
        sharing="reduce",
        momentum=0.5,
        kl_clip=0.0,
        max_condition=1e4,
        rho=0.5,
        cap=77,
    )
    config = make_kfac_config(given, weight_decay=0.25)
    assert (config.damping, config.factor_period, config.inverse_period, config.weight_decay) == (0.5, 3, 3, 0.25)
    assert (config.fisher, config.distribution) == (Fisher.EXACT, Distribution.OWNER)
    assert (config.cap, config.kl_clip, config.momentum) == (77, None, 0.5)
    assert (config.sharing, config.max_condition, config.via) == (Sharing.REDUCE, 1e4, Via.EIGEN)


def test_the_defaults_of_the_command_line_are_those_of_the_library() -> None:
    ours, theirs = make_kfac_config(KfacOptions(policy="all"), weight_decay=0.0), KfacConfig(policy=everything())
    same = [name for name, value in theirs.settings if name != "policy" and getattr(ours, name) == value]
    assert len(same) == len(theirs.settings) - 1
    assert fingerprint(make_kfac_config(KfacOptions(), weight_decay=0.0)) == fingerprint(KfacConfig())


def test_other_settings_of_kfac_give_other_noise_and_another_run() -> None:
    others = {"kfac_rho": 0.5, "kfac_cap": 9, "kfac_momentum": 0.5, "kfac_kl_clip": 1.0, "kfac_sharing": "reduce"}
    others["kfac_max_condition"] = 9.0
    configs = [make_kfac_config(build(KfacOptions, {key: value}), weight_decay=0.0) for key, value in others.items()]
    assert len({fingerprint(config) for config in configs} - {fingerprint(KfacConfig())}) == len(others)
    assert set(others) < set(resume.options_with(Effect.RESULT))


def test_the_learning_rate_is_the_optimizers_own_unless_given() -> None:
    assert learning_rate(TrainingOptions(optimizer="kfac")) == LEARNING_RATES["kfac"]
    assert learning_rate(TrainingOptions(optimizer="adamw")) == 8e-3
    assert learning_rate(TrainingOptions(optimizer="kfac", lr=0.5)) == 0.5
