"""The end of a step: noise that another device draws is the noise of the leaf, element by element."""

from __future__ import annotations

import pytest
import torch

import fdp.finish
from fdp import keys
from fdp.finish import _noised_by
from fdp.privacy.noise import add_noise, declare_sensitivity
from fdp.types import ShardWindow

LEAVES = {"one": torch.randn(3, 7, dtype=torch.float64), "two": torch.randn(2), "none": torch.zeros(0, 4)}


@pytest.mark.parametrize("elements", [1, 5, 8, 21, 1000])
def test_a_leaf_noised_in_pieces_has_the_noise_of_the_leaf(monkeypatch, elements):
    monkeypatch.setattr(fdp.finish, "ELEMENTS_AT_A_TIME", elements)
    total, key = declare_sensitivity(LEAVES, 0.5), keys.key(3)
    expected = add_noise(total, key=key, noise_multiplier=1.5)
    for path, leaf in expected.items():
        found = _noised_by(key, total, path, 1.5, None)
        assert found.dtype == torch.float64
        assert torch.equal(found, leaf)


@pytest.mark.parametrize("elements", [5, 1000])
def test_what_follows_the_noise_is_computed_with_it_piece_by_piece(monkeypatch, elements):
    monkeypatch.setattr(fdp.finish, "ELEMENTS_AT_A_TIME", elements)
    total, key = declare_sensitivity(LEAVES, 0.5), keys.key(3)
    expected = add_noise(total, key=key, noise_multiplier=1.5)["one"]
    found = _noised_by(key, total, "one", 1.5, None, lambda path, leaf: (leaf / 4).float())
    assert found.dtype == torch.float32
    assert torch.equal(found, (expected / 4).float())


def test_a_shard_noised_elsewhere_has_its_part_of_the_noise(monkeypatch):
    monkeypatch.setattr(fdp.finish, "ELEMENTS_AT_A_TIME", 4)
    whole, key = {"one": LEAVES["one"]}, keys.key(4)
    expected = add_noise(declare_sensitivity(whole, 0.5), key=key, noise_multiplier=1.5)["one"][1:]
    windows = {"one": ShardWindow((3, 7), ((1, 2), (0, 7)))}
    part = declare_sensitivity({"one": LEAVES["one"][1:]}, 0.5)
    assert torch.equal(_noised_by(key, part, "one", 1.5, windows), expected)
