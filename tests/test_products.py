"""Products that are not split: the settings by which cuBLAS rounds a row in one way, however many rows there are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fdp.products import WORKSPACES, reserve_no_workspace, whole_sums


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


def test_no_sum_is_rounded_to_half_precision_inside_and_the_setting_is_put_back():
    options = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(options, name) for name in names]
    with whole_sums(torch.device("cuda")):
        assert [getattr(options, name) for name in names] == [False, False]
    assert [getattr(options, name) for name in names] == before
    with whole_sums(torch.device("cpu")):
        assert [getattr(options, name) for name in names] == before
