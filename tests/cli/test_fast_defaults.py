"""What ``auto`` stands for on this machine, and that options which were given stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fdp.cli.fast_defaults import resolve_fast_defaults
from fdp.cli.options import build
from fdp.cli.train_options import ComputeOptions, TrainOptions


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


def test_the_microbatch_is_small_on_a_cpu_and_stays_if_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolved().microbatch == 8
    assert resolved(microbatch=5).microbatch == 5
    assert resolved(optimizer="kfac").microbatch == 32


@pytest.mark.usefixtures("_gpu")
def test_the_microbatch_is_larger_on_a_gpu() -> None:
    assert resolved().microbatch == 32
    assert resolved(device="cpu").microbatch == 8
