"""Products that are not split: the settings by which cuBLAS rounds a row in one way, however many rows there are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fdp.products import HALF_PRECISION_SUMS, WORKSPACES, reserve_no_workspace, whole_sums


@pytest.mark.parametrize("given", [None, ":4096:8"])
def test_importing_fdp_gives_cublas_no_workspace_unless_the_environment_says_otherwise(given):
    before = {name: value for name, value in os.environ.items() if name not in WORKSPACES}
    more = {} if given is None else {"CUBLAS_WORKSPACE_CONFIG": given}
    program = "import fdp, os, sys; print(os.environ['CUBLAS_WORKSPACE_CONFIG'], 'torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], env=before | more, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [given or ":0:0", "False"], "expected torch not to be imported yet"


def test_all_workspaces_are_reserved(monkeypatch):
    for name in WORKSPACES:
        monkeypatch.delenv(name, raising=False)
    reserve_no_workspace()
    assert {name: os.environ[name] for name in WORKSPACES} == WORKSPACES


@pytest.mark.parametrize("given", [(True, True), (False, False), (False, True)])
def test_no_sum_is_rounded_to_half_precision_inside_and_the_setting_is_put_back(given):
    """Keep the second of two settings, whether sums may be split: torch forgets it if the first is set."""
    options = torch.backends.cuda.matmul

    def settings() -> list[tuple[bool, bool]]:
        return [(getattr(options, name), getattr(options, f"{name}_split_k")) for name in HALF_PRECISION_SUMS]

    before = settings()
    try:
        for name in HALF_PRECISION_SUMS:
            setattr(options, name, given)
        with whole_sums(torch.device("cuda")):
            assert settings() == [(False, given[1])] * 2
        assert settings() == [given] * 2
        with whole_sums(torch.device("cpu")):
            assert settings() == [given] * 2
    finally:
        for name, setting in zip(HALF_PRECISION_SUMS, before):
            setattr(options, name, setting)
