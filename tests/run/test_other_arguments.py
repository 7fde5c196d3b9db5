"""A keyword argument of another library, or a misspelt one, is answered by what fdp calls it."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fdp
from fdp.run.other_arguments import MEANT, WHY

ARGUMENTS = inspect.signature(fdp.private).parameters
DATA = (torch.zeros(20, 3), torch.zeros(20).long())
OPACUS = {"target_epsilon": 3, "target_delta": 1e-6, "epochs": 1, "max_grad_norm": 1.0, "data_loader": DATA}


def private(**given: Any) -> Any:
    return fdp.private(**{"module": nn.Linear(3, 2), "dataset": DATA, "loss": nn.CrossEntropyLoss()} | given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_grad_norm", "no such argument max_grad_norm: fdp calls it max_norm"),
        ("target_epsilon", "fdp calls it epsilon"),
        ("target_delta", "fdp calls it delta"),
        ("data_loader", "fdp calls it dataset"),
        ("poisson_sampling", "fdp always samples this way; leave it out"),
        ("bathc_size", "no such argument bathc_size: did you mean batch_size?"),
        ("zzz", "no such argument zzz: expected one of module, dataset, loss, epsilon, delta, noise_multiplier"),
    ],
)
def test_an_unknown_argument_is_answered(name: str, message: str) -> None:
    with pytest.raises(fdp.FdpError, match=message):
        private(epsilon=3.0, steps=1, **{name: 1.0})
    with pytest.raises(TypeError, match=message):
        private(**{name: 1.0})


def test_all_arguments_of_opacus_are_answered_at_once() -> None:
    with pytest.raises(fdp.FdpError) as caught:
        fdp.private(module=nn.Linear(3, 2), optimizer="sgd", **OPACUS)
    said = str(caught.value)
    for name, meant in (("target_epsilon", "epsilon"), ("max_grad_norm", "max_norm"), ("data_loader", "dataset")):
        assert f"no such argument {name}: fdp calls it {meant}" in said
    assert "epochs" not in said


def test_every_answer_names_an_argument_that_there_is_and_no_argument_is_answered() -> None:
    assert set(MEANT.values()) <= set(ARGUMENTS)
    assert not (MEANT.keys() | WHY.keys()) & ARGUMENTS.keys()
    assert not MEANT.keys() & WHY.keys()


def test_a_warning_points_at_the_call() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        private(noise_multiplier=1.0, steps=1, delta=0.1)
    assert [each.filename for each in found if "delta" in str(each.message)] == [__file__]
