"""A resumed run has the noise that it had, with the scale that it had, or it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fdp.cli import resume, session
from fdp.cli.configure import configure
from fdp.gradients import plan as plans
from fdp.gradients.costs import CUDA_HALF, Choice, NormBy
from fdp.run.evaluation import make_evaluator
from fdp.run.prepare_run import NEW_RUN, EarlierNoise, Run, extra_noise, prepare
from fdp.run.same_noise import check_same_noise, earlier_noise, noise_record
from fdp.run.training_run import draw_batch
from fdp.storage import checkpoint
from fdp.types import ClippedSum, FdpError
from tests.cli.train_runs import interrupt_after, last_json, small_options, train

HERE = Path("run")


def small_run(earlier: EarlierNoise = NEW_RUN, **options: Any) -> Run:
    return prepare(configure(small_options(**options)), root=torch.arange(8), earlier=earlier)[0]


def test_a_run_is_resumed_with_the_noise_that_it_had() -> None:
    run = small_run()
    check_same_noise({"noise": noise_record(run)}, run, HERE)
    check_same_noise({}, run, HERE)  # a checkpoint of an older version


@pytest.mark.parametrize("options", [{"lr": 0.5}, {"max_norm": 2.0}])
def test_another_key_of_noise_is_refused(options: dict[str, float]) -> None:
    meta = {"noise": noise_record(small_run())}
    with pytest.raises(FdpError, match="other noise would be released and not counted"):
        check_same_noise(meta, small_run(NEW_RUN, **options), HERE)


def test_a_run_that_needs_less_slack_keeps_what_it_had_and_one_that_needs_more_is_refused() -> None:
    run = small_run()
    meta = {"noise": noise_record(run) | {"slack": 0.25}}
    assert extra_noise(run) == 0
    assert earlier_noise(meta) == EarlierNoise(0.25, ())
    assert earlier_noise({}) == NEW_RUN._replace(rounded=()), "an older fdp stored nothing in 8 bits"
    again = small_run(earlier_noise(meta))
    check_same_noise(meta, again, HERE)
    assert extra_noise(again) == 0.25
    total = ClippedSum({"weight": torch.zeros(2)}, torch.tensor(2.0), None)
    assert float(again.stages.reduce(total).sensitivity) == 2.5
    assert float(run.stages.reduce(total).sensitivity) == 2.0
    with pytest.raises(FdpError, match=r"rounded by at most 0 of the clipping bound.* got 0\.25"):
        check_same_noise({"noise": noise_record(run)}, again, HERE)


def test_sums_that_are_rounded_otherwise_have_other_noise_and_are_refused() -> None:
    eights, fours = (small_run(sum_dtype="float32", microbatch=size) for size in (8, 4))
    assert extra_noise(fours) > extra_noise(eights) > 0
    for meta, run in ((eights, fours), (fours, eights)):
        with pytest.raises(FdpError, match="resume it with the --microbatch"):
            check_same_noise({"noise": noise_record(meta)}, run, HERE)


def test_gradients_that_are_stored_otherwise_have_other_noise_and_are_refused() -> None:
    config = replace(configure(small_options()), stored_by_default=False)
    full, narrow = (
        prepare(replace(config, stored_dtype=stored), root=torch.arange(8))[0] for stored in (None, torch.int8)
    )
    assert full.stages.rounded == "", "the noise of a run without the option must stay what it was"
    for meta, run in ((full, narrow), (narrow, full)):
        with pytest.raises(FdpError, match="--stored-dtype"):
            check_same_noise({"noise": noise_record(meta)}, run, HERE)


@pytest.mark.parametrize(
    "change", [{"sum_dtype": torch.float32}, {"stored_dtype": torch.int8, "stored_by_default": False}]
)
def test_runs_of_one_seed_that_round_otherwise_share_neither_samples_nor_noise(change: dict[str, Any]) -> None:
    """One draw of samples with two releases would cost more than two draws, which is what the ledger adds up."""
    config = replace(configure(small_options(seed=1, population=1000)), stored_by_default=False)
    runs = [prepare(each)[0] for each in (config, replace(config, **change))]
    assert not torch.equal(runs[0].key, runs[1].key)
    first, second = (draw_batch(run, 0).data["image"] for run in runs)
    assert first.shape != second.shape or not torch.equal(first, second)
    compared = [prepare(each, settings="a comparison")[0] for each in (config, replace(config, **change))]
    assert torch.equal(compared[0].key, compared[1].key), "fdp compare gives both sides the same samples"


@pytest.mark.parametrize("source", ["synthetic", "noised"])
def test_runs_of_one_seed_whose_curvature_has_other_samples_share_no_noise(source: str) -> None:
    """Samples that are measured decide the maps of gradients, and so the sums. Else a microbatch changes nothing."""
    kfac = {"optimizer": "kfac", "kfac_data": source, "kfac_period": 5, "lr": 0.1}
    for more, same in (({}, True), (kfac, False)):
        runs = [small_run(NEW_RUN, seed=1, microbatch=size, **more) for size in (8, 16)]
        assert torch.equal(runs[0].key, runs[1].key) == same


def store_in_8_bits(monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    """Let a CPU store gradients in 8 bits, as a GPU does, if the time that is measured for that is short."""

    def add_timings(options: dict[NormBy, Choice], *_: object) -> dict[NormBy, Choice]:
        measured = {by: seconds if by is NormBy.KEEP_INT8 else 1.0 for by in options}
        return {by: option._replace(measured=measured[by]) for by, option in options.items()}

    monkeypatch.setattr(plans, "rates_of", lambda device, dtype: CUDA_HALF)
    monkeypatch.setattr(plans, "_add_timings", add_timings)


def test_a_resumed_run_stores_in_8_bits_what_it_stored_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times choose these leaves. With other ones, the same noise would be on another sum."""
    config = replace(configure(small_options(seed=1)), stored_dtype=torch.int8, stored_by_default=False)
    store_in_8_bits(monkeypatch, seconds=0.1)
    before, _ = prepare(config)
    meta = {"noise": noise_record(before)}
    assert meta["noise"]["rounded_leaves"] == ["head.weight"]
    store_in_8_bits(monkeypatch, seconds=9.0)
    other, _ = prepare(config)
    assert other.plan.rounded == ()
    assert not torch.equal(other.key, before.key)
    assert other.stages.rounded != before.stages.rounded
    with pytest.raises(FdpError, match="--stored-dtype"):
        check_same_noise(meta, other, HERE)
    again, _ = prepare(config, earlier=earlier_noise(json.loads(json.dumps(meta))))
    assert again.plan.rounded == ("head.weight",)
    check_same_noise(meta, again, HERE)


def test_a_run_that_rounds_by_default_goes_on_as_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on another kind of device: what was rounded before decides, not what this machine would do."""
    plain = configure(small_options(seed=1))
    able = replace(plain, stored_dtype=torch.int8, stored_by_default=True)
    store_in_8_bits(monkeypatch, seconds=9.0)
    began, _ = prepare(able)
    assert began.stages.rounded == "", "nothing is rounded, so the noise is that of a run without the option"
    old = {name: value for name, value in noise_record(began).items() if name != "rounded_leaves"}
    store_in_8_bits(monkeypatch, seconds=0.1)
    for noise in (noise_record(began), old):
        for config in (able, plain):
            again, _ = prepare(config, root=began.root, earlier=earlier_noise({"noise": noise}))
            check_same_noise({"noise": noise}, again, HERE)
            assert again.plan.rounded == ()
    older = prepare(able, root=began.root, earlier=earlier_noise({}))[0]
    assert torch.equal(older.key, began.key), "a checkpoint that does not say is of an fdp that rounded nothing"
    rounded, _ = prepare(able)
    assert rounded.plan.rounded == ("head.weight",)
    monkeypatch.undo()
    with pytest.raises(FdpError, match=r"resume: this run stores gradients in 8 bits.*on a Hopper GPU.* got .* on cpu"):
        prepare(plain, root=rounded.root, earlier=earlier_noise({"noise": noise_record(rounded)}))


def test_a_seeded_run_that_never_saved_begins_again_with_the_leaves_that_it_stored_in_8_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, config = ["--seed", "1", "--save-every", "5", "--json"], tmp_path / "run/config.json"
    asked = lambda options: replace(configure(options), stored_dtype=torch.int8, stored_by_default=False)  # noqa: E731
    monkeypatch.setattr(session, "configure", asked)
    store_in_8_bits(monkeypatch, seconds=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda *_, **__: None)  # the machine stops before anything is saved
        interrupt_after(3, patch)
        assert train(tmp_path / "run", *words, steps=8) == 130
    began = json.loads(config.read_text())
    assert began["rounded_leaves"] == ["head.weight"]
    store_in_8_bits(monkeypatch, seconds=9.0)
    assert train(tmp_path / "run", *words, steps=8) == 0, capsys.readouterr().out
    assert json.loads(config.read_text())["rounded"] == began["rounded"]


def test_runs_with_other_noise_share_none_in_their_evaluations() -> None:
    released = {"seed": 1, "eval_fraction": 0.5, "eval_epsilon": 1.0, "eval_every": 2}
    found = []
    for options in ({"microbatch": 8}, {"microbatch": 4}, {"microbatch": 8, "sum_dtype": "float32"}):
        evaluator = make_evaluator(small_run(NEW_RUN, **released, **options))
        assert evaluator is not None
        assert evaluator.release is not None
        total = torch.full((evaluator.release.entries,), 300.0, dtype=torch.float64)
        found.append(evaluator.release(total, step=evaluator.steps[0]))
    assert found[0] == found[1] != found[2]


def test_the_command_line_refuses_to_repeat_steps_with_other_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--json", "--save-every", "2", "--sum-dtype", "float32"]
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        assert train(tmp_path / "run", *words, "--microbatch", "8", steps=4) == 130
    capsys.readouterr()
    assert train(tmp_path / "run", *words, "--microbatch", "4", steps=4) == 2
    assert "resume it with the --microbatch" in last_json(capsys.readouterr().out)["error"]
    assert train(tmp_path / "run", *words, "--microbatch", "8", steps=4) == 0


def test_a_seeded_run_that_never_saved_begins_again_with_the_scale_that_its_noise_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same seed it draws the same noise; a microbatch that is chosen anew may need another slack."""
    words, config = ["--seed", "1", "--save-every", "5", "--microbatch", "4", "--quiet"], tmp_path / "run/config.json"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda *_, **__: None)  # the machine stops before anything is saved
        interrupt_after(3, patch)
        assert train(tmp_path / "run", *words, steps=8) == 130
    began = json.loads(config.read_text())
    found = resume.ResumedRun(began=began | {"extra_noise": 0.25})
    assert (resume.microbatch_of(found), resume.earlier_noise_of(found)) == (4, EarlierNoise(0.25, ()))
    config.write_text(json.dumps(began | {"extra_noise": 0.25}))
    assert train(tmp_path / "run", *words, steps=8) == 0
    assert json.loads(config.read_text())["extra_noise"] == 0.25
    with pytest.raises(FdpError, match=r"rounded by at most 0\.125 of the clipping bound.* got 0\.25"):
        resume.check_not_released(
            resume.ResumedRun(began=began | {"extra_noise": 0.125}), small_run(EarlierNoise(0.25)), tmp_path / "run"
        )


def test_a_seeded_run_that_never_saved_does_not_begin_again_with_noise_for_other_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger microbatches need less slack, so the scale alone would pass; their noise is another release."""
    words = ["--seed", "1", "--save-every", "9", "--sum-dtype", "float32", "--json"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda *_, **__: None)
        interrupt_after(3, patch)
        assert train(tmp_path / "run", *words, "--microbatch", "4", steps=8) == 130
    capsys.readouterr()
    assert train(tmp_path / "run", *words, "--microbatch", "8", steps=8) == 2
    assert "resume it with the --microbatch" in last_json(capsys.readouterr().out)["error"]
    assert train(tmp_path / "run", *words, "--microbatch", "4", steps=8) == 0
