"""The promise of a run: neighbour relation, advice on delta, and the promises of earlier runs on the same parameters.

    two runs of (e1, d1) and (e2, d2), the second from the parameters of the first, on the same data: (e1 + e2, d1 + d2)

The folder of a model that fdp trained holds a marker with the promises made so far, so that training it again can
report them. The marker holds nothing of the data, not even a digest, by which a guess of the data could be confirmed.

    >>> delta = default_delta(sampling.population)
    >>> before = read_marker(folder)
    >>> training_again(before, Guarantee(3.0, 1e-6, RELATION, "one user"))   # None, or a warning with the numbers
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fdp.types import FdpError

MARKER = "fdp_privacy.json"
"""The file in a model's folder with the promises of the runs that trained it."""

RELATION = "add or remove one sample; sampling rate public"
"""The neighbour relation of every epsilon, as shown to users."""


def delta_advice(samples: int, delta: float) -> str | None:
    """Return a warning if ``delta`` is too large for that many samples, else None.

    Publishing one sample, picked at random, is (0, 1 / samples)-private: a delta that large allows it.
    """
    if delta < 1 / samples:
        return None
    return (
        f"delta {delta:g} is not below 1 / samples = {1 / samples:.2g}: publishing one sample outright would pass. Use "
        f"{default_delta(samples):g} or less"
    )


def default_delta(population: int) -> float:
    """Return ``min(1e-6, 0.01 / population)``, rounded down to one digit: ``population * delta <= 0.01``.

    ``population`` is the public number of samples, so that delta says nothing about the private one.
    """
    most = min(1e-6, 0.01 / population)
    digits, _, exponent = f"{most:.15e}".partition("e")
    return float(f"{int(float(digits))}e{exponent}")


class Guarantee(NamedTuple):
    """The promise of one run about its data; ``unit`` is one sample in words. ``epsilon`` None: not private."""

    epsilon: float | None
    delta: float | None
    relation: str | None
    unit: str


def marker_text(guarantees: Sequence[Guarantee]) -> str:
    """Return the contents of a marker: the promise of each run, in order."""
    return json.dumps({"runs": [guarantee._asdict() for guarantee in guarantees]}, indent=2, allow_nan=False) + "\n"


def read_marker(folder: Path) -> tuple[Guarantee, ...]:
    """Return the promises of the runs that trained the model in ``folder``; none if it has no marker."""
    path = folder / MARKER
    if not path.exists():
        return ()
    try:
        return tuple(Guarantee(**run) for run in json.loads(path.read_text())["runs"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FdpError(
            f"{path}: expected the promises that fdp wrote when it trained this model, got {type(error).__name__} when "
            f"reading it; restore the file, or remove it if you know how the model was trained"
        ) from error


def add_up(guarantees: Sequence[Guarantee]) -> tuple[float, float] | None:
    """Return the (epsilon, delta) of all runs together on the same data, or None if any was not private."""
    known = [(one.epsilon, one.delta) for one in guarantees if one.epsilon is not None and one.delta is not None]
    if len(known) < len(guarantees):
        return None
    return math.fsum(epsilon for epsilon, _ in known), min(1.0, math.fsum(delta for _, delta in known))


def training_again(before: Sequence[Guarantee], now: Guarantee) -> str | None:
    """Return a warning, with the numbers, if the parameters were trained before; else None."""
    if not before:
        return None
    if (then := add_up(before)) is None:
        return (
            "this model was trained before without privacy: nothing is promised about the data it was trained on then"
        )
    said = f"this model was trained privately before, with epsilon {shown_epsilon(then[0])} at delta {then[1]:.3g}"
    if (total := add_up([*before, now])) is None:
        return f"{said}; this run is not private: for people in its data, too, that no longer holds"
    said += (
        f"; if on the same people, the guarantees add up: at most epsilon {shown_epsilon(total[0])} at delta "
        f"{total[1]:.3g}, not the {shown_epsilon(now.epsilon or 0.0)} of this run alone"
    )
    if len(units := dict.fromkeys(one.unit for one in (*before, now))) > 1:
        said += f". The units differ ({'; '.join(units)}): they add up only for what is at most one sample in each"
    return said


def shown_epsilon(epsilon: float) -> str:
    """Return three decimals, rounded up, so that the number shown is never below the number spent."""
    return f"{math.ceil(epsilon * 1000) / 1000:.3f}"
