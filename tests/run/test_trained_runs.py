"""A run counts wherever its parameters go in this process, and no longer once they are put back."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import fdp
from fdp.run.trained_runs import ENTRIES, promises_about, sums_of

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def make(module: nn.Module, **changed: Any) -> fdp.PrivateRun:
    settings = {"noise_multiplier": 1.0, "delta": 1e-6, "steps": 2, "batch_size": 8, "microbatch": 8} | changed
    return fdp.private(module, (X, Y), loss=nn.CrossEntropyLoss(), **settings)


def count(module: nn.Module) -> int:
    return len(promises_about(module))


def test_a_part_a_whole_and_a_copy_of_a_trained_module_count_its_run():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    make(module).fit()
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert count(other) == 0
    assert count(nn.Sequential(module, nn.Linear(2, 2))) == 1
    assert count(module[0]) == 1
    assert count(copy.deepcopy(module)) == 1
    other.load_state_dict(module.state_dict())
    assert count(other) == 1
    assert len(make(nn.Sequential(module[0], nn.Linear(4, 2))).config.before) == 1


def test_a_copy_of_a_module_that_two_runs_trained_counts_both():
    module = nn.Linear(3, 2)
    make(module).fit()
    make(module).fit()
    assert (count(module), count(copy.deepcopy(module))) == (2, 2)


def test_parameters_that_are_loaded_from_a_run_count_it():
    module = nn.Linear(3, 2)
    run = make(module)
    assert len(list(run)) == 2
    assert count(module) == 0, "not written back"
    module.load_state_dict(run.state_dict())
    assert count(module) == 1


def test_values_that_a_run_gives_by_leaf_count_it():
    module = nn.Linear(3, 2)
    run = make(module)
    assert len(list(run)) == 2
    module.load_state_dict(run.params())
    assert count(module) == 1


def test_a_run_that_writes_its_parameters_again_counts_after_a_later_run():
    module = nn.Linear(3, 2)
    first = make(module).fit()
    make(module).fit()
    first.write_back()
    assert count(module) == 1


def test_what_is_put_back_or_overwritten_counts_no_longer():
    module = nn.Linear(3, 2)
    values = copy.deepcopy(module.state_dict())
    one, two = make(module), make(module)
    one.fit()
    module.load_state_dict(values)
    assert count(module) == 0
    two.fit()
    assert count(module) == 1
    make(module).fit()
    module.load_state_dict(two.state_dict())
    assert count(module) == 1


def test_a_run_counts_all_of_its_planned_steps_from_the_first():
    module = nn.Linear(3, 2)
    run = make(module)
    next(iter(run))
    run.write_back()
    assert [promise.epsilon for promise in promises_about(module)] == [run.guarantee.epsilon]


def test_a_run_that_a_folder_and_the_process_know_counts_once(tmp_path: Path):
    class Named(nn.Linear):
        """Says where it was loaded from, as a module of transformers does."""

        config = SimpleNamespace(_name_or_path=str(tmp_path / "one"))

    module, again = Named(3, 2), Named(3, 2)
    run = make(module).fit()
    run.save(tmp_path / "one")
    again.load_state_dict(module.state_dict())
    assert len(make(again).config.before) == 1
    later = make(again).fit()
    assert later.guarantee._replace(run=None) == run.guarantee._replace(run=None), "alike, and two"
    assert len(make(again).config.before) == 2


def test_a_part_that_was_frozen_counts_nothing():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    make(module).fit()
    assert (count(module[0]), count(module[1])) == (0, 1)


def test_a_large_parameter_is_recognised_by_a_part_of_its_entries():
    large = torch.randn(3 * ENTRIES + 1)
    assert sums_of(large) == sums_of(large.clone()) != sums_of(large + 0.01 * torch.randn(len(large)))
    assert sums_of(torch.empty(3, device="meta")) is None
    assert sums_of(torch.empty(0)) == ((0,), 0.0, 0.0)
    assert sums_of(torch.tensor([1 + 1j])) != sums_of(torch.tensor([1 - 1j]))
