"""The promise of one run: neighbour relation, unit, epsilon and delta, advice on delta, and the marker of a model.

    delta               by default min(1e-6, 0.01 / population): publishing one of n samples is (0, 1 / n)-private
    epsilon             of whoever was trained on
    held_out_epsilon    of whoever was held out, by the noised evaluations, at the same delta

The folder of a model that fdp trained holds a marker with the promises made so far, so that training it again can
report them. Of the data it holds a keyed fingerprint at most (:mod:`fdp.ledger.data_key`): without the key, no guess of
the data can be confirmed by it. :mod:`fdp.privacy.several_runs` composes promises.

    >>> delta = default_delta(sampling.population)
    >>> promise = Guarantee(3.0, delta, RELATION, "one user")
    >>> (folder / MARKER).write_text(marker_text([*read_marker(folder), promise]))
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fdp.privacy.releases import Release, composed_epsilon
from fdp.privacy.shown_numbers import shown_delta
from fdp.types import FdpError

MARKER = "fdp_privacy.json"
"""The file in a model's folder with the promises of the runs that trained it."""

RELATION = "add or remove one sample; sampling rate public"
"""The neighbour relation of every epsilon, as shown to users."""

DELTA_OF_EVALUATIONS = 1e-6
"""The delta at which noised evaluations are stated if the run itself has none, since its training is not private."""

LARGE_EPSILON = 10.0
"""From here on, epsilon alone promises little."""


def delta_advice(samples: int, delta: float) -> str | None:
    """Return a warning if ``delta`` is too large for that many samples, else None.

    Publishing one sample, picked at random, is (0, 1 / samples)-private: a delta that large allows it.
    """
    if delta < 1 / samples:
        return None
    return (
        f"delta {shown_delta(delta)} is not below 1 / samples = {1 / samples:.2g}: publishing one sample outright "
        f"would pass. Use {default_delta(samples):g} or less"
    )


def default_delta(population: int) -> float:
    """Return ``min(1e-6, 0.01 / population)``, rounded down to one digit: ``population * delta <= 0.01``.

    ``population`` is the public number of samples, so that delta says nothing about the private one.
    """
    most = min(1e-6, 0.01 / population)
    digits, _, exponent = f"{most:.15e}".partition("e")
    return float(f"{int(float(digits))}e{exponent}")


class Guarantee(NamedTuple):
    """The promise of one run about its data; ``unit`` is one sample in words. ``epsilon`` None: not private.

    ``releases`` are what the run releases in all its planned ``steps``; None if that is not known (a marker of an
    older fdp). ``run`` is a random name, by which a run that is listed twice is counted once. ``data`` are keyed
    fingerprints of the data: of the samples, and of the files; two runs with one in common are on the same data.
    ``evaluations`` are noised releases about samples that were held out, which another run may have trained on.
    ``evaluated`` are keyed fingerprints of the data that they were held out in, if it is other data than ``data``.
    ``noise`` is a keyed fingerprint of the key that samples and noise are drawn from; None if it is not known.
    ``held_out_choice`` is True if the loss of held-out samples, without noise, decided what the run exports: to these
    samples it promises nothing. None if that is not known.
    """

    epsilon: float | None
    delta: float | None
    relation: str | None
    unit: str
    releases: tuple[Release, ...] | None = None
    steps: int | None = None
    run: str | None = None
    data: tuple[str, ...] = ()
    date: str | None = None
    fdp: str | None = None
    accountant: str | None = None
    evaluations: tuple[Release, ...] = ()
    noise: str | None = None
    evaluated: tuple[str, ...] = ()
    held_out_choice: bool | None = None

    @property
    def private(self) -> bool:
        """True if the run promises anything."""
        return self.epsilon is not None and self.delta is not None


def guarantee_to_json(promise: Guarantee) -> dict[str, Any]:
    """Return a promise for a JSON file."""
    releases = None if promise.releases is None else [release._asdict() for release in promise.releases]
    evaluations = [release._asdict() for release in promise.evaluations]
    prints = {"data": list(promise.data), "evaluated": list(promise.evaluated)}
    return {**promise._asdict(), "releases": releases, "evaluations": evaluations, **prints}


def guarantee_from_json(values: Mapping[str, Any]) -> Guarantee:
    """Return the promise of a JSON file, also one that an older fdp wrote."""
    found = dict(values)
    if (releases := found.get("releases")) is not None:
        found["releases"] = tuple(Release(**release) for release in releases)
    found["evaluations"] = tuple(Release(**release) for release in found.get("evaluations", ()))
    found |= {name: tuple(found.get(name, ())) for name in ("data", "evaluated")}
    return Guarantee(**found)


def marker_text(guarantees: Sequence[Guarantee]) -> str:
    """Return the contents of a marker: the promise of each run, in order."""
    runs = [guarantee_to_json(guarantee) for guarantee in guarantees]
    return json.dumps({"runs": runs}, indent=2, allow_nan=False) + "\n"


def read_marker(folder: Path) -> tuple[Guarantee, ...]:
    """Return the promises of the runs that trained the model in ``folder``; none if it has no marker."""
    path = folder / MARKER
    if not path.exists():
        return ()
    try:
        return tuple(guarantee_from_json(run) for run in json.loads(path.read_text())["runs"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FdpError(
            f"{path}: expected the promises that fdp wrote when it trained this model, got {type(error).__name__} when "
            f"reading it; restore the file, or remove it if you know how the model was trained"
        ) from error


def held_out_epsilon(promise: Guarantee) -> float | None:
    """Return the epsilon of whoever was held out, at the delta of the run; None without noised evaluations."""
    if not promise.evaluations or promise.delta is None:
        return None
    return composed_epsilon(promise.evaluations, delta=promise.delta)


def promise_about(promise: Guarantee, data: Collection[str]) -> Guarantee | None:
    """Return what a run promises about the data with these fingerprints; None if it is not known to have used it.

    Guarantees:
      - data that was only evaluated on is charged for the noised evaluations alone, data that was only trained on
        for the training alone; if evaluations were of samples held out of the data itself, it is charged for both;
      - data that was only evaluated on, without noise, and decided what was exported, is promised nothing.
    """
    trained, held_out = (bool(set(prints) & set(data)) for prints in (promise.data, promise.evaluated))
    apart = {"evaluations": (), "evaluated": (), "held_out_choice": None}
    if trained:
        return promise if held_out or not promise.evaluated else promise._replace(**apart)
    if not held_out:
        return None
    if not promise.evaluations:
        nothing = promise._replace(epsilon=None, delta=None, relation=None, releases=None, accountant=None)
        return nothing._replace(data=promise.evaluated, **apart)
    delta = DELTA_OF_EVALUATIONS if promise.delta is None else promise.delta
    epsilon, releases = composed_epsilon(promise.evaluations, delta=delta), promise.evaluations
    told = promise._replace(epsilon=epsilon, delta=delta, relation=RELATION, releases=releases)
    return told._replace(data=promise.evaluated, **apart)


def short_name(promise: Guarantee) -> str:
    """Return the first digits of the name of a run, as ``fdp ledger`` shows it."""
    return (promise.run or "unknown")[:8]
