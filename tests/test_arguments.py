"""Numbers are checked where they are given: by Python's and numpy's own types, never as far as an error deep inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fdp
from fdp import keys, optimizers
from fdp.arguments import is_number, is_whole_number, positive_number, shown, whole_number
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism, statistics
from fdp.privacy.noise import add_gaussian, declare_sensitivity
from fdp.privacy.sampling import poisson, sample_batch
from fdp.types import FdpError, Norms

SAMPLING = poisson(100, expected_batch_size=10)
MECHANISM = Mechanism(SAMPLING, clipping.flat(max_norm=1.0), 1.0)
TOTAL = declare_sensitivity({"w": torch.zeros(2)}, 1.0)
KEY = keys.key(0)
NOT_A_NUMBER = ["3", True, math.nan, math.inf, -math.inf, torch.tensor(3), np.array([3]), [3], Decimal(3), 3j]
NOT_POSITIVE = [0, -1, *NOT_A_NUMBER]
NOT_WHOLE = [10.5, 3.0, np.float64(3), *NOT_POSITIVE]
NOT_A_PROBABILITY = [1, 1.5, *NOT_POSITIVE]


def private(**given: Any) -> Any:
    torch.manual_seed(0)
    data = torch.randn(100, 4), torch.zeros(100, dtype=torch.int64)
    settings = {"noise_multiplier": 1.0, "steps": 2, "batch_size": 10} | given
    if "epsilon" in given:
        del settings["noise_multiplier"]
    if "epochs" in given:
        del settings["steps"]
    return fdp.private(nn.Linear(4, 2), data, loss=nn.CrossEntropyLoss(), **settings)


def noised(**given: Any) -> Any:
    return add_gaussian(TOTAL, **({"key": KEY, "step": 0, "noise_multiplier": 1.0} | given))


def batch(**given: Any) -> Any:
    settings: dict[str, Any] = {"step": 0, "microbatch_size": 4} | given
    return sample_batch({"x": torch.zeros(100)}, SAMPLING, KEY, **settings)


def budget(**given: Any) -> float:
    return fdp.noise_multiplier_for(SAMPLING, MECHANISM.clip, **({"epsilon": 3, "delta": 1e-5, "steps": 3} | given))


DOORS: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (private, "batch_size", NOT_WHOLE),
    (private, "microbatch", NOT_WHOLE),
    (private, "steps", NOT_WHOLE),
    (private, "population", NOT_WHOLE),
    (private, "epochs", NOT_POSITIVE),
    (private, "epsilon", NOT_POSITIVE),
    (private, "noise_multiplier", NOT_POSITIVE),
    (private, "max_norm", NOT_POSITIVE),
    (private, "delta", NOT_A_PROBABILITY),
    (private, "seed", [10.5, -1, *NOT_A_NUMBER]),
    (private, "weight_decay", [-1, *NOT_A_NUMBER]),
    (lambda learning_rate: private(lr=learning_rate), "learning_rate", [-1, *NOT_A_NUMBER]),
    (lambda population: poisson(100, expected_batch_size=10, population=population), "population", NOT_WHOLE),
    (lambda dataset_size: poisson(dataset_size, expected_batch_size=10), "dataset_size", NOT_WHOLE),
    (lambda expected_batch_size: poisson(100, expected_batch_size=expected_batch_size), "expected_batch_size",
     NOT_POSITIVE),
    (lambda max_batch_size: poisson(100, expected_batch_size=9, max_batch_size=max_batch_size), "max_batch_size",
     NOT_WHOLE),
    (budget, "epsilon", NOT_POSITIVE),
    (budget, "delta", NOT_A_PROBABILITY),
    (budget, "steps", NOT_WHOLE),
    (lambda steps: fdp.epsilon(MECHANISM, steps=steps, delta=1e-5), "steps", NOT_WHOLE),
    (lambda delta: fdp.epsilon(MECHANISM, steps=3, delta=delta), "delta", NOT_A_PROBABILITY),
    (lambda noise_multiplier: fdp.epsilon(MECHANISM._replace(noise_multiplier=noise_multiplier), steps=3, delta=1e-5),
     "noise_multiplier", [-1, *NOT_A_NUMBER]),
    (lambda max_norm: clipping.flat(max_norm=max_norm), "max_norm", NOT_POSITIVE),
    (lambda max_norm: clipping.per_layer(max_norm=max_norm), "max_norm", NOT_POSITIVE),
    (lambda gamma: clipping.automatic(max_norm=1.0, gamma=gamma), "gamma", NOT_POSITIVE),
    (lambda target_quantile: clipping.quantile(
        max_norm=1.0, target_quantile=target_quantile, learning_rate=0.2, count_noise=1.0
    ), "target_quantile", NOT_A_PROBABILITY),
    (lambda max_norm: clipping.clip_to(Norms({"w": torch.ones(2)}), max_norm=max_norm), "max_norm",
     [bad for bad in NOT_POSITIVE if not isinstance(bad, torch.Tensor)]),
    (noised, "noise_multiplier", NOT_POSITIVE),
    (lambda sensitivity: declare_sensitivity({"w": torch.zeros(2)}, sensitivity), "sensitivity",
     [bad for bad in NOT_POSITIVE if not isinstance(bad, torch.Tensor)]),
    (lambda period: statistics(SAMPLING, max_norm=1.0, noise_multiplier=1.0, period=period), "period", NOT_WHOLE),
    (batch, "step", [10.5, -1, *NOT_A_NUMBER]),
    (batch, "microbatch_size", [bad for bad in NOT_WHOLE if bad != [3]]),
    (batch, "rank", [10.5, -1, *NOT_A_NUMBER]),
    (lambda seed: fdp.key(seed), "seed", [10.5, -1, *NOT_A_NUMBER]),
    (lambda learning_rate: optimizers.adamw(learning_rate), "learning_rate", [-1, *NOT_A_NUMBER]),
]  # fmt: skip


@pytest.mark.parametrize(("door", "name", "bad"), DOORS, ids=[f"{name}-{i}" for i, (_, name, _) in enumerate(DOORS)])
def test_a_number_of_the_wrong_kind_is_refused_by_its_name(door: Callable[..., Any], name: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(FdpError, match=rf"{name}.*: expected .*, got "):
            door(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    """They are Python's from the door on: the draws follow from the words of the settings."""
    mine = private(batch_size=np.int64(10), microbatch=np.int32(5), noise_multiplier=np.float32(1.5), seed=np.uint8(3))
    same = private(batch_size=10, microbatch=5, noise_multiplier=1.5, seed=3)
    assert [each.loss for each in mine] == [each.loss for each in same]
    assert repr(mine.config.seed) == "3"
    by_numpy = poisson(np.int64(100), expected_batch_size=np.float64(9.5), population=np.int16(100))  # pyright: ignore
    assert repr(by_numpy) == repr(poisson(100, expected_batch_size=9.5, population=100))
    assert torch.equal(fdp.key(np.int64(3)), fdp.key(3))  # pyright: ignore
    assert private(epsilon=np.float64(3), delta=np.float64(1e-6), max_norm=np.float32(1)).config.epsilon == 3.0


TINY_FRACTION, HUGE = Fraction(1, 10**400), Fraction(10**400, 3)


def test_a_number_that_is_another_one_as_a_float_is_refused() -> None:
    for bad in (TINY_FRACTION, np.longdouble("1e-4000"), np.longdouble("1e4000"), HUGE):
        with pytest.raises(FdpError, match="max_norm: expected a finite number above 0"):
            clipping.flat(max_norm=bad)  # pyright: ignore
    with pytest.raises(FdpError, match="delta: expected a probability"):
        fdp.epsilon(MECHANISM, steps=3, delta=Fraction(10**30 - 1, 10**30))  # pyright: ignore


def test_numbers_are_folded_into_keys_whatever_their_kind() -> None:
    for kind in (np.int32, np.uint8, np.int64):
        assert torch.equal(keys.fold_in(KEY, kind(3)), keys.fold_in(KEY, 3))  # pyright: ignore
    for bad in (True, 1.0, -1, 1 << 63):
        with pytest.raises(FdpError, match="fold_in: expected an int in"):
            keys.fold_in(KEY, bad)  # pyright: ignore


def test_epsilon_is_that_of_the_exact_numbers() -> None:
    z, count_noise = np.float16(1.1), np.float16(1.3)
    clip = clipping.quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=1.0)
    narrow = Mechanism(SAMPLING, clip._replace(count_noise=count_noise), z)  # pyright: ignore
    exact = Mechanism(SAMPLING, clip._replace(count_noise=float(count_noise)), float(z))
    assert fdp.epsilon(narrow, steps=3, delta=1e-5) == fdp.epsilon(exact, steps=3, delta=1e-5)


def test_large_integers_are_numbers() -> None:
    assert is_whole_number(10**400)
    assert is_number(10**400)
    assert whole_number("n", np.int8(3)) == 3
    assert type(positive_number("n", np.int8(3))) is int


def test_an_error_shows_numbers_and_words_but_no_data() -> None:
    assert [shown(value) for value in ("3", True, None, np.float64(3), np.int8(3), 10.5)] == [
        "'3'", "True", "None", "3.0", "3", "10.5"
    ]  # fmt: skip
    assert [shown(value) for value in (torch.tensor(3), [3])] == ["a Tensor", "a list"]
    with pytest.raises(FdpError, match=r"batch_size: expected a whole number, 1 or more, got 10\.5$"):
        private(batch_size=10.5)
