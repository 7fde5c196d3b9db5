"""The public surface: what it is, that every name is there, and that importing it is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fdp


def test_the_surface_is_frozen():
    assert fdp.__all__ == [
        "Batch",
        "Block",
        "Checks",
        "Compile",
        "Execution",
        "FdpError",
        "LeafSpec",
        "Mechanism",
        "Memory",
        "Method",
        "Model",
        "Offload",
        "PrivateRun",
        "Rule",
        "TrainState",
        "Zero",
        "add_gaussian",
        "check_independent",
        "check_norms",
        "check_rule",
        "clip_to",
        "clipped_sum",
        "epsilon",
        "expected_mean",
        "fold_in",
        "from_loss",
        "from_module",
        "init_params",
        "init_state",
        "key",
        "make_execution",
        "make_mesh",
        "make_plan",
        "make_sharding",
        "make_train_step",
        "noise_multiplier_for",
        "operation",
        "over_tensor_axis",
        "per_sample_norms",
        "poisson",
        "private",
        "rule",
        "sample_batch",
        "shared_key",
        "spent",
    ]


@pytest.mark.parametrize("name", fdp.__all__)
def test_every_name_is_there_and_documented(name):
    assert getattr(fdp, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'privately'"):
        _ = fdp.privately  # pyright: ignore[reportAttributeAccessIssue]


def test_what_the_type_checker_sees_is_what_there_is():
    tree = ast.parse(Path(fdp.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: f"fdp.{home}" for home, names in fdp._HOME.items() for name in names}


def test_importing_fdp_does_not_load_torch():
    code = "import sys, fdp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(fdp.__file__).parents[1]).returncode == 0
