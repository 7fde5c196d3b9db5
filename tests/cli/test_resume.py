"""``fdp train`` after an interruption: it resumes the same run bit-equal, and refuses another run."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

from fdp.cli import display, resume
from fdp.cli.configure import configure
from fdp.cli.options import Effect, options_of, to_dict
from fdp.cli.train_options import TrainOptions
from fdp.privacy import accounting, clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson
from fdp.privacy.shown_numbers import shown_epsilon
from fdp.run.prepare_run import prepare
from fdp.storage.checkpoint_record import Verified
from fdp.types import FdpError
from tests.cli.train_runs import FILES, interrupt_after, last_json, small_options, train


def test_metrics_of_a_resumed_run_are_readable_by_their_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert train(out, "--save-every", "1", steps=3) == 130
    (out / "metrics.jsonl").chmod(0o644)
    assert train(out, "--save-every", "1", steps=3) == 0
    assert stat.S_IMODE((out / "metrics.jsonl").stat().st_mode) == 0o600


def test_every_option_changes_the_result_or_only_the_execution() -> None:
    """A run is resumed only with the same options of the first kind: another rate would have another budget."""
    how = "as_json checkpoint_activations compile cuda_graph device keep kfac_distribution memory_budget mesh offload "
    how += "nproc out quiet repeatable reduce reduce_dtype replicate_data save_every stored_dtype timeout zero"
    how += " hours ledger on_divergence recipe sample sample_tokens tensorboard wandb wandb_online"
    assert set(resume.options_with(Effect.EXECUTION)) == set(how.split())
    assert resume.options_with(Effect.KFAC_RESULT) == ("microbatch",)
    deciding = set(resume.options_with(Effect.RESULT))
    assert deciding | set(how.split()) | {"microbatch"} == set(options_of(TrainOptions))


@pytest.mark.parametrize("seed", [["--seed", "3"], []], ids=["seed", "entropy"])
def test_an_interrupted_run_that_saves_resumes_bit_equal(
    seed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--json", "--save-every", "2", "--optimizer", "adamw", "--clip", "quantile", *seed]
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        assert train(out, *words, steps=6) == 130
    assert "the same command resumes" in capsys.readouterr().out
    begun = {"config.json", "config.toml", "plan.json", "fdp_privacy.json", "metrics.jsonl"}
    assert {path.name for path in out.iterdir()} == begun | {"checkpoints"}
    assert train(out, *words, "--microbatch", "16", steps=6) == 0
    text = capsys.readouterr().out
    assert "resumed after step 3" in text
    summary = last_json(text)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert summary["steps"] == 6
    if seed:
        assert train(tmp_path / "whole", *words, steps=6) == 0
        whole = last_json(capsys.readouterr().out)
        assert whole["parameter_sha256"] == summary["parameter_sha256"]
        assert whole["epsilon"] == summary["epsilon"]
    assert train(out, *words, steps=6) == 2  # it is finished now
    assert "already holds a run" in last_json(capsys.readouterr().out)["error"]


def test_an_interruption_right_after_a_save_and_a_torn_line_do_no_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, out = ["--json", "--save-every", "2", "--seed", "3"], tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert train(out, *words, steps=4) == 130
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text(lines[0] + lines[1][:20])  # as after a power failure
    assert train(out, *words, steps=4) == 0
    got = last_json(capsys.readouterr().out)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 3, 4]
    assert train(tmp_path / "whole", *words, steps=4) == 0
    assert last_json(capsys.readouterr().out)["parameter_sha256"] == got["parameter_sha256"]


def test_result_files_of_a_run_cut_short_at_its_end_are_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, out = ["--json", "--save-every", "2", "--seed", "3"], tmp_path / "run"
    assert train(out, *words, steps=4) == 0
    first = last_json(capsys.readouterr().out)
    (out / "summary.json").unlink()  # it is written last
    assert train(out, *words, steps=4) == 0
    again = last_json(capsys.readouterr().out)
    assert (again["steps"], again["parameter_sha256"]) == (4, first["parameter_sha256"])
    assert {path.name for path in out.iterdir()} == FILES | {"checkpoints"}


def test_a_run_that_saved_nothing_starts_again_with_its_present_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, out = ["--json", "--save-every", "2", "--seed", "3"], tmp_path / "run"
    assert train(out, *words, steps=4) == 0
    first = last_json(capsys.readouterr().out)
    shutil.rmtree(out / "checkpoints")
    (out / "summary.json").unlink()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"population": 7}))
    assert train(out, *words, steps=4) == 0
    assert last_json(capsys.readouterr().out)["parameter_sha256"] == first["parameter_sha256"]
    assert json.loads((out / "config.json").read_text())["population"] == config["population"]


def test_noise_drawn_for_other_data_is_not_used_again() -> None:
    run, state = prepare(configure(small_options()))
    meta = resume.checkpoint_meta(run, to_dict(small_options()), state)
    resume.check_same_run(resume.ResumedRun(Verified(Path("run"), {"meta": meta}), run.root), run)
    for field, other in (("data", "0" * 64), ("samples", 3)):
        changed = meta | {"sampler": meta["sampler"] | {field: other}}
        with pytest.raises(FdpError, match=r"expected the same run, got another .*must not be used again") as caught:
            resume.check_same_run(resume.ResumedRun(Verified(Path("run"), {"meta": changed}), run.root), run)
        assert run.data_digest not in str(caught.value)
        assert str(len(run.config.dataset)) not in str(caught.value)
        assert str(other) not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "other", "message"),
    [
        ("noise_multiplier", 0.1, "noise multiplier"),
        ("sampling_rate", 0.9, "sampling rate"),
        ("clip", "flat", "clip"),
        ("delta", 0.1, "delta"),
        ("epsilon", 1e-3, "epsilon spent so far"),
    ],
)
def test_a_checkpoint_of_another_mechanism_is_refused(field: str, other: object, message: str) -> None:
    run, state = prepare(configure(small_options()))
    state = state._replace(step=state.step + 2)
    meta = resume.checkpoint_meta(run, to_dict(small_options()), state)
    changed = meta | {"accountant": meta["accountant"] | {field: other}}
    with pytest.raises(FdpError, match=f"as its {message}, not {other}"):
        resume.check_same_run(resume.ResumedRun(Verified(Path("run"), {"meta": changed}), run.root), run)


def test_a_checkpoint_of_another_run_is_refused_and_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        assert train(out, "--save-every", "2", "--seed", "3", steps=6) == 130
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for words, message in (
        (["--save-every", "2", "--seed", "4"], "--seed 3 there, 4 here"),
        (["--save-every", "2", "--seed", "3", "--lr", "0.5"], "--lr 0.008 there, 0.5 here"),
        (["--seed", "3"], "with --save-every"),
    ):
        capsys.readouterr()
        assert train(out, "--json", *words, steps=6) == 2
        assert message in last_json(capsys.readouterr().out)["error"]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_an_interrupted_run_keeps_the_steps_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(2, monkeypatch)
    out = tmp_path / "run"
    assert train(out, "--json", steps=5) == 130
    text = capsys.readouterr().out
    summary = last_json(text)
    assert summary["steps"] == 2
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    config = json.loads((out / "config.json").read_text())
    sampling = poisson(1437, expected_batch_size=32, population=config["population"])
    mechanism = Mechanism(sampling, clipping.flat(max_norm=1.0), 1.0)
    planned, made = (accounting.epsilon(mechanism, steps=steps, delta=summary["delta"]) for steps in (5, 2))
    assert summary["steps_planned"] == 5
    assert summary["epsilon"] == planned, "a stop decided by the metrics has used the data"
    assert summary["epsilon_if_stop_was_decided_in_advance"] == lines[-1]["epsilon"] == pytest.approx(made, rel=2e-3)
    less = shown_epsilon(summary["epsilon_if_stop_was_decided_in_advance"])
    assert display.EARLY_STOP.format(**summary, less=less, part="") in " ".join(text.replace("│", " ").split())
    assert {path.name for path in out.iterdir()} == FILES


def test_an_interrupted_step_that_writes_in_place_is_saved_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, words = tmp_path / "run", ["--offload", "all", "--save-every", "9", "--seed", "3"]
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert train(out, *words, steps=5) == 130
    assert not (out / "summary.json").exists()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    assert train(out, *words, steps=5) == 0
    assert train(tmp_path / "whole", *words, steps=5) == 0
    hashes = [json.loads((path / "summary.json").read_text())["parameter_sha256"] for path in (out, tmp_path / "whole")]
    assert hashes[0] == hashes[1]


def test_an_out_that_holds_an_interrupted_run_is_not_called_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(2, monkeypatch)
    assert train(tmp_path / "run", steps=4) == 130
    assert train(tmp_path / "run", "--json", steps=4) == 2
    said = last_json(capsys.readouterr().out)["error"]
    assert "already holds a run" in said
    assert "finished" not in said
