"""Epsilon for many numbers of steps, from one step's privacy loss distribution.

    delta_t(e) = m_t + sum_k P_t[k] (1 - exp(e - k h))_+ ,      P_t = P^(*t),     m_t = 1 - (1 - m)^t

P is the distribution of one step's loss on a grid of width h, rounded up; m is its mass at infinity. The Fourier
transform of P and the bounds on its tails do not depend on the number of steps and are computed once for all of them,
where ``dp_accounting`` computes them for each (method: Koskela et al. 2020, arXiv 1906.03049).

    >>> composition = Composition([distribution], most=[1000], delta=1e-6)
    >>> composition.epsilon([250])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import fft, signal

TAIL = 1e-15
"""Mass above the largest loss considered, counted as a loss of infinity."""

_DROPPED = -50.0
"""Log size below which a Fourier coefficient is taken as 0; all of them together are below ``TAIL``."""


class Composition:
    """Releases of several kinds, each composed many times; ``most`` holds the largest count of each kind."""

    def __init__(self, kinds: Sequence[PrivacyLossDistribution], *, most: Sequence[int], delta: float) -> None:
        self._removed = _Direction([kind._pmf_remove.to_dense_pmf() for kind in kinds], most, delta)
        self._added = None
        if not all(kind._symmetric for kind in kinds):
            self._added = _Direction([kind._pmf_add.to_dense_pmf() for kind in kinds], most, delta)
        self._known: dict[tuple[int, ...], float] = {}

    def epsilon(self, counts: Sequence[int]) -> float:
        """Return the least epsilon at ``delta`` of ``counts[i]`` releases of kind i.

        Guarantees:
          - at least the epsilon of the given distributions, as exact as the composition of ``dp_accounting``.
        """
        value = self._removed.epsilon(counts)
        if self._added is None or any(
            known <= value for more, known in self._known.items() if all(a >= b for a, b in zip(more, counts))
        ):
            return value  # in the other direction even more releases cost no more than these do in this one
        self._known[tuple(counts)] = other = self._added.epsilon(counts)
        return max(value, other)


class _Direction:
    """One of the two neighbour directions: the sample is added, or removed."""

    def __init__(self, kinds: Sequence[DensePLDPmf], most: Sequence[int], delta: float) -> None:
        self._delta = delta
        self._width: float = kinds[0]._discretization
        self._lowest = np.array([kind._lower_loss for kind in kinds])
        self._log_finite = np.array([math.log1p(-kind._infinity_mass) for kind in kinds])
        masses = [np.asarray(kind._probs) for kind in kinds]
        longest = max(len(mass) for mass in masses)
        up = np.geomspace(1 / longest, 1.0, 32)
        self._orders = np.concatenate([-up, up])
        self._log_moments = np.array([_log_moments(mass, self._orders) for mass in masses])
        low, high = self._bounds(most)
        # Fewer releases have a narrower range, up to a shift.
        self._size = fft.next_fast_len(max(high - low + 1, longest), real=True)
        spectra = np.array([fft.rfft(mass, self._size) for mass in masses])
        with np.errstate(divide="ignore"):
            self._log_size, self._angle = np.log(np.abs(spectra)), np.angle(spectra)

    def epsilon(self, counts: Sequence[int]) -> float:
        with np.errstate(all="ignore"):  # masses that underflow
            return self._epsilon(counts, self._delta)

    def _epsilon(self, counts: Sequence[int], delta: float) -> float:
        times = np.asarray(counts, dtype=float)
        infinite = TAIL - math.expm1(float(times @ self._log_finite))
        if infinite > delta:
            return math.inf
        low, high = self._bounds(counts)
        mass = np.roll(self._compose(times), -low)[: high - low + 1]
        losses = self._width * (int(np.dot(counts, self._lowest)) + low + np.arange(len(mass)))
        # From the largest loss down: the mass, and the mass times exp(loss here - loss there).
        above = np.cumsum(mass[::-1])[::-1]
        discounted = signal.lfilter([1.0], [1.0, -math.exp(-self._width)], mass[::-1])[::-1]
        fits = infinite + above - discounted <= delta  # delta at an epsilon of this loss
        first = len(fits) - int(np.argmin(fits[::-1])) if not fits.all() else 0
        if first == len(fits):
            return math.inf
        ratio = (infinite + above[first] - delta) / discounted[first]
        return max(0.0, float(losses[first] + math.log(ratio))) if ratio > 0 else max(0.0, float(losses[first]))

    def _compose(self, times: np.ndarray) -> np.ndarray:
        log_size = _weighted_sum(times, self._log_size)
        kept = log_size > _DROPPED
        spectrum = np.zeros(len(log_size), dtype=complex)
        spectrum[kept] = np.exp(log_size[kept] + 1j * (times @ self._angle[:, kept]))
        return np.asarray(fft.irfft(spectrum, self._size))

    def _bounds(self, counts: Sequence[int]) -> tuple[int, int]:
        """Return grid bounds with at most ``TAIL`` mass outside (Chernoff), from the sum of the lowest losses on."""
        bounds = (_weighted_sum(np.asarray(counts, dtype=float), self._log_moments) + math.log(2 / TAIL)) / self._orders
        low, high = bounds[self._orders < 0].max(), bounds[self._orders > 0].min()
        return max(0, math.floor(low)), math.ceil(high)


def _log_moments(mass: np.ndarray, orders: np.ndarray) -> np.ndarray:
    there = mass > 0
    indices, logs = np.flatnonzero(there), np.log(mass[there])
    moments = []
    for order in orders:
        terms = indices * order + logs
        largest = terms.max()
        moments.append(largest + np.log(np.exp(terms - largest).sum()))
    return np.array(moments)


def _weighted_sum(times: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return ``times @ rows``, where a row may hold -inf and a count may be 0."""
    return sum((count * row for count, row in zip(times, rows) if count), np.zeros(rows.shape[1]))
