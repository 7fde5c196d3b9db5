"""Whole modules that others wrote: exact with every method, compiled or not; what cannot be exact is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp import tree
from fdp.compiled import Blocks
from fdp.costs import NormBy
from fdp.foreign.module import from_module
from fdp.methods import Method, make_plan
from fdp.per_sample import per_sample_norms
from fdp.types import FdpError
from tests.foreign_cases import (
    CASES,
    LABEL,
    METHODS,
    Experts,
    Foreign,
    assert_exact,
    case_named,
    labels,
    made_of,
    randn,
    shaken,
    truth_of,
)

QUICK = ("gpt2", "vit", "resnet", "experts", "attention-tokens-first")
EAGER = partial(Blocks, backend="aot_eager")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums_are_those_of_backwards_of_single_samples(name, method):
    assert_exact(case_named(name), method, made=made_of(name), truth=truth_of(name))


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
)
def test_compiled_blocks_are_as_exact(name):
    assert_exact(case_named(name), blocks=EAGER(), made=made_of(name), truth=truth_of(name))
