"""What ``auto`` stands for on this machine, and that options which were given stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fdp.cli.configure import configure
from fdp.cli.fast_defaults import choose_microbatch, has_smaller_microbatches, resolve_fast_defaults
from fdp.cli.options import build
from fdp.cli.train_options import ComputeOptions, TrainOptions
from fdp.fast.compile_modes import Compile
from fdp.run.prepare_run import prepare
from fdp.types import FdpError
from tests.cli.train_runs import call, interrupt_after, small_options, train

BIG_BUDGET = {
    "noise_multiplier": None,
    "epsilon": 150.0,
    "batch_size": 1437,
    "population": 1500,
    "steps": 1,
    "warmup": 0,
}


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def resolved(**settings: object) -> ComputeOptions:
    return resolve_fast_defaults(build(TrainOptions, settings)).compute


def chosen(compute: ComputeOptions) -> tuple[str, str, bool]:
    return compute.dtype, compute.compile, compute.cuda_graph


@pytest.mark.usefixtures("_gpu")
def test_a_language_model_on_a_gpu_is_compiled_and_recorded_in_bfloat16(tmp_path: Path) -> None:
    for model in ("gpt-nano", str(tmp_path)):
        assert chosen(resolved(model=model)) == ("bfloat16", "block", True)


def test_without_a_gpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen(resolved(model="gpt-nano")) == ("float32", "none", False)


@pytest.mark.usefixtures("_gpu")
def test_classifiers_other_devices_and_old_gpus_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(resolved(model="mlp", data="digits")) == ("float32", "none", False)
    assert chosen(resolved(device="cpu")) == ("float32", "none", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert chosen(resolved()) == ("float32", "none", False)


@pytest.mark.usefixtures("_gpu")
def test_options_that_are_given_stay() -> None:
    assert chosen(resolved(dtype="float32")) == ("float32", "none", False)
    assert chosen(resolved(compile="none")) == ("bfloat16", "none", False)
    assert chosen(resolved(compile="block")) == ("bfloat16", "block", False)
    assert chosen(resolved(compile="step", dtype="float32", cuda_graph=True)) == ("float32", "step", True)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("settings", [{"offload": "all"}, {"mesh": "shard=2"}])
def test_what_cannot_be_recorded_is_only_compiled(settings: dict[str, str]) -> None:
    assert chosen(resolved(**settings)) == ("bfloat16", "block", False)
    assert chosen(resolved(optimizer="kfac")) == ("bfloat16", "none", False)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "on a Hopper GPU"),  # of float32
        ({"dtype": "bfloat16", "mesh": "shard=2"}, "one process"),
    ],
)
def test_gradients_in_8_bits_are_refused_where_no_kernel_stores_them(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], expected: str
) -> None:
    monkeypatch.setattr("fdp.cli.configure.has_hopper", lambda device: True)
    with pytest.raises(FdpError, match=f"--stored-dtype int8: expected .*{expected}"):
        configure(small_options(stored_dtype="int8", **settings))


@pytest.mark.parametrize(
    ("privacy", "got"),
    [
        ({"noise_multiplier": 0.0}, "0"),
        ({"noise_multiplier": 0.099}, "0.099"),
        (BIG_BUDGET, "0.0"),
    ],
    ids=["none", "little", "by a large budget"],
)
def test_gradients_in_8_bits_are_refused_where_no_noise_hides_them(
    monkeypatch: pytest.MonkeyPatch, privacy: dict[str, object], got: str
) -> None:
    monkeypatch.setattr("fdp.cli.configure.has_hopper", lambda device: True)
    config = configure(small_options(stored_dtype="int8", dtype="bfloat16", **privacy))
    with pytest.raises(FdpError, match=f"--stored-dtype int8: expected noise, which hides .* at least 0.1, got {got}"):
        prepare(config)


@pytest.mark.parametrize("privacy", [{"noise_multiplier": 0.099}, BIG_BUDGET], ids=["little", "by a large budget"])
def test_by_default_little_noise_means_gradients_that_are_not_rounded(
    monkeypatch: pytest.MonkeyPatch, privacy: dict[str, object]
) -> None:
    monkeypatch.setattr("fdp.cli.configure.has_hopper", lambda device: True)
    enough = configure(small_options(dtype="bfloat16", seed=None, noise_multiplier=0.1))
    assert prepare(enough)[0].config.stored_dtype == torch.int8
    little = configure(small_options(dtype="bfloat16", seed=None, **privacy))
    assert little.stored_dtype == torch.int8
    assert prepare(little)[0].config.stored_dtype is None


@pytest.mark.parametrize(
    "settings", [{"seed": 3}, {"dtype": "float32"}, {"method": "ghost_bk"}, {"stored_dtype": "full"}], ids=repr
)
def test_by_default_gradients_are_in_8_bits_where_that_changes_nothing_else(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    monkeypatch.setattr("fdp.cli.configure.has_hopper", lambda device: True)
    usual: dict[str, object] = {"dtype": "bfloat16", "seed": None}
    assert configure(small_options(**usual)).stored_dtype == torch.int8
    assert configure(small_options(**usual | settings)).stored_dtype is None
    monkeypatch.setattr("fdp.cli.configure.has_hopper", lambda device: False)
    assert configure(small_options(**usual)).stored_dtype is None


@pytest.mark.parametrize("method", ["ghost", "auto"])
def test_a_run_of_before_the_default_is_resumed(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings say ``full``, also with methods that store nothing in 8 bits."""
    out, words = tmp_path / "run", ["--method", method, "--seed", "1", "--save-every", "1"]
    interrupt_after(2, monkeypatch)
    assert train(out, *words) == 130
    monkeypatch.undo()
    for file in (out / "config.json", *out.glob("checkpoints/*/*.json")):
        assert '"stored_dtype": "auto"' in file.read_text() or file.name != "config.json"
    assert train(out, *words, "--stored-dtype", "full") == 0


def test_gradients_in_8_bits_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdp.cli.configure.has_hopper", lambda device: True)
    options = small_options(stored_dtype="int8", dtype="bfloat16")
    assert configure(options).stored_dtype == torch.int8
    assert configure(small_options()).stored_dtype is None
    monkeypatch.setattr("fdp.cli.configure.has_hopper", lambda device: False)
    with pytest.raises(FdpError, match="leave it out"):
        configure(options)


def test_the_microbatch_is_small_on_a_cpu_and_stays_if_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolved().microbatch == 8
    assert resolved(microbatch=5).microbatch == 5
    assert resolved(optimizer="kfac").microbatch == 32


@pytest.mark.usefixtures("_gpu")
def test_on_a_gpu_the_microbatch_waits_for_the_model_unless_it_is_fixed() -> None:
    assert resolved().microbatch is None
    assert resolved(microbatch=5).microbatch == 5
    assert resolved(microbatch="auto").microbatch is None
    assert resolved(device="cpu").microbatch == 8
    for settings in ({"optimizer": "kfac"}, {"compile": "step"}, {"mesh": "shard=2"}):
        assert resolved(**settings).microbatch == 32


def test_smaller_sizes_are_for_a_gpu_without_kfac_and_whole_steps() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert has_smaller_microbatches(cuda, Compile.BLOCK, kfac=False)
    assert not has_smaller_microbatches(cuda, Compile.STEP, kfac=False)
    assert not has_smaller_microbatches(cuda, Compile.NONE, kfac=True)
    assert not has_smaller_microbatches(cpu, Compile.NONE, kfac=False)


def test_the_chosen_microbatch_is_saved_and_a_resumed_run_keeps_it(tmp_path, monkeypatch, capsys) -> None:
    """The choice is that of a GPU; the rest is the command on this machine."""
    monkeypatch.setattr("fdp.cli.fast_defaults.MICROBATCH_ON_CPU", None)
    sizes = iter([16, 4])
    monkeypatch.setattr("fdp.cli.fast_defaults.largest_microbatch", lambda config, free: next(sizes))
    out = tmp_path / "run"
    settings = "--steps 4 --batch-size 32 --warmup 1 --microbatch auto --noise-multiplier 1 --save-every 1 --ledger off"
    words = ("--model", "logistic", "--data", "digits", *settings.split(), "--out", str(out))
    with monkeypatch.context() as context:
        interrupt_after(2, context)
        call("train", *words)
    assert json.loads((out / "config.json").read_text())["settings"]["microbatch"] == 16
    capsys.readouterr()
    assert call("train", *words) == 0
    assert "16 at a time" in " ".join(capsys.readouterr().out.split())
    assert next(sizes) == 4, "a resumed run does not choose again"
    assert call("train", "--microbatch", "many") == 2
    assert "--microbatch: expected a number, got 'many'" in capsys.readouterr().err


def test_a_model_that_cannot_be_traced_gets_a_microbatch(monkeypatch) -> None:
    def fails(*given: object) -> int:
        raise NotImplementedError

    monkeypatch.setattr("fdp.cli.fast_defaults.largest_microbatch", fails)
    options = small_options(batch_size=8)
    config = configure(options)
    assert choose_microbatch(options, config).microbatch_size == 8
    assert choose_microbatch(options, config, saved=5).microbatch_size == 5
    assert choose_microbatch(small_options(microbatch=7), config) is config


def test_a_repeatable_run_does_not_go_by_the_memory_that_is_free() -> None:
    options = small_options(repeatable=True)
    config = configure(options)
    assert config.repeatable
    with pytest.raises(FdpError, match="--repeatable: expected --microbatch N, got auto"):
        choose_microbatch(options, config)
    assert choose_microbatch(options, config, saved=5).microbatch_size == 5
    assert choose_microbatch(small_options(repeatable=True, microbatch=7), config) is config


def test_two_repeatable_runs_are_equal_and_say_so(tmp_path, capsys) -> None:
    for name in ("one", "two"):
        assert train(tmp_path / name, "--repeatable", "--seed", "3", "--ledger", "off") == 0
        assert "in one order of additions" in " ".join(capsys.readouterr().out.split())
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
