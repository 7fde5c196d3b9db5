"""The promise of a run: neighbour relation, advice on delta, and the promises of several runs on the same data.

    releases of all runs known          epsilon of their composition at the largest delta  (fdp.privacy.releases)
    only (e1, d1) and (e2, d2) known    (e1 + e2, d1 + d2)

The folder of a model that fdp trained holds a marker with the promises made so far, so that training it again can
report them. Of the data it holds a keyed fingerprint at most (:mod:`fdp.ledger.data_key`): without the key, no guess of
the data can be confirmed by it.

    >>> delta = default_delta(sampling.population)
    >>> before = read_marker(folder)
    >>> training_again(before, Guarantee(3.0, 1e-6, RELATION, "one user"))   # None, or a warning with the numbers
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fdp.privacy.releases import Opaque, Release, composed_epsilon
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.types import FdpError

MARKER = "fdp_privacy.json"
"""The file in a model's folder with the promises of the runs that trained it."""

RELATION = "add or remove one sample; sampling rate public"
"""The neighbour relation of every epsilon, as shown to users."""

DELTA_OF_EVALUATIONS = 1e-6
"""The delta at which noised evaluations are stated if the run itself has none, since its training is not private."""

LARGE_EPSILON = 10.0
"""From here on, epsilon alone promises little."""

WHOLE_UNITS = ("one user", "one record", "one file")
"""The units that are protected as a whole, as :mod:`fdp.data.units` begins them."""
OF_PRIVATE_DATA = " of the private data"
"""The end of a unit that is trained on beside public data."""


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


def once_each(guarantees: Sequence[Guarantee]) -> tuple[Guarantee, ...]:
    """Return the promises in order, each run once; runs without a name are all kept."""
    named = {one.run: one for one in guarantees if one.run is not None}
    return tuple(one for one in guarantees if one.run is None or named.pop(one.run, None) is not None)


def compose(guarantees: Sequence[Guarantee]) -> tuple[float, float] | None:
    """Return the (epsilon, delta) of all runs together on the same data, or None if any was not private.

    Delta is the largest of the runs with known releases, plus all deltas of the others.

    Guarantees:
      - a run that is listed twice is counted once;
      - with one run, the total covers whoever was trained on and whoever was held out: the larger of the two epsilons,
        unless the same data was trained on and held out;
      - with several runs, noised evaluations count as if everyone had been trained on and held out in every run;
      - promises about different neighbours are an error, not a sum.
    """
    runs = once_each(guarantees)
    if len(relations := {one.relation for one in runs if one.private}) > 1:
        raise FdpError(f"guarantees: expected one neighbour relation in all of them, got {sorted(map(str, relations))}")
    if not all(one.private for one in runs):
        return None
    held_out = [release for one in runs for release in one.evaluations]
    apart = len(runs) == 1 and not set(runs[0].data) & set(runs[0].evaluated)
    if apart and held_out:
        trained, delta = _compose_private(runs, [])
        return (max(trained, composed_epsilon(held_out, delta=delta)) if delta < 1 else trained), delta
    return _compose_private(runs, held_out)


def _compose_private(runs: Sequence[Guarantee], held_out: Sequence[Release]) -> tuple[float, float]:
    """Return the (epsilon, delta) of the training of private runs, and of the evaluations ``held_out``."""
    known = [Opaque(one.epsilon or 0.0, one.delta or 0.0) for one in runs]
    opaque = [promise for promise, one in zip(known, runs) if one.releases is None]
    described = [promise.delta for promise, one in zip(known, runs) if one.releases is not None]
    added = math.fsum(promise.epsilon for promise in known)
    if not described and not held_out:
        return added, min(1.0, math.fsum(promise.delta for promise in opaque))
    # Evaluations of runs that are opaque otherwise have a delta of their own.
    delta = max(described or [promise.delta for promise in opaque]) + math.fsum(promise.delta for promise in opaque)
    if delta >= 1:
        return added, 1.0
    releases = [*held_out, *(release for one in runs for release in one.releases or ())]
    epsilon = composed_epsilon(releases, delta=delta, opaque=opaque)
    # The sum of the promises leaves evaluations out: whoever was held out is promised less by it.
    adds_up = len(described) == 1 and not held_out
    return (min(epsilon, added) if adds_up else epsilon), delta


def composition_note(guarantees: Sequence[Guarantee]) -> str:
    """Return why a total may be above the sum of the epsilons of its runs, and its delta above theirs; or nothing."""
    runs = [one for one in once_each(guarantees) if one.private]
    if len(runs) < 2:
        return ""
    said = []
    if evaluated := sum(bool(one.evaluations) for one in runs):
        said.append(
            f"the noised evaluations of {evaluated} run{'s' * (evaluated > 1)} count in, since whoever one run holds "
            f"out another may train on"
        )
    if any(one.releases is None for one in runs):
        said.append("a run of which only epsilon and delta are known, such as a search, adds its delta")
    return "; ".join(said)


def releases_the_same(earlier: Guarantee, later: Guarantee) -> bool:
    """Return True if an attempt at a run releases what an earlier attempt released, so that both are one run.

    Guarantees:
      - False if data, unit, steps, releases or evaluations differ, or what an older fdp did not record, the noise and
        a choice by held-out samples, if that of ``earlier`` is known.
    """
    named = {"epsilon": None, "run": None, "date": None, "fdp": None, "accountant": None}
    unknown = {name: getattr(later, name) for name in ("noise", "held_out_choice") if getattr(earlier, name) is None}
    return earlier._replace(**named, **unknown) == later._replace(**named)


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


def count_choices(runs: Sequence[Guarantee]) -> int:
    """Return in how many runs held-out samples decided, without noise, what was exported; each run counts once."""
    return sum(bool(one.held_out_choice) for one in once_each(runs))


def choices_sentence(count: int) -> str:
    """Return what it means that so many earlier runs were decided by held-out samples; empty if none was."""
    if not count:
        return ""
    return (
        f"the loss of held-out samples, without noise, decided what {count} earlier run{'s' * (count > 1)} exported: "
        f"for samples held out then, no epsilon holds"
    )


def runs_that_share_noise(runs: Sequence[Guarantee]) -> tuple[str, ...]:
    """Return the runs, as :func:`short_name` has them, that drew samples and noise which another of them drew too."""
    private = [one for one in once_each(runs) if one.private]
    drawn = Counter(one.noise for one in private)
    return tuple(short_name(one) for one in private if one.noise is not None and drawn[one.noise] > 1)


def shared_noise_sentence(runs: Sequence[str]) -> str:
    """Return what it means that these runs share their noise; empty if none does."""
    if not runs:
        return ""
    return (
        f"runs {', '.join(runs[:-1])} and {runs[-1]} drew the same samples and noise, from one --seed: publish at most "
        f"one of them. For whoever sees two whose results differ, no epsilon holds, and no total stated here"
    )


def searches_sentence(names: Sequence[str]) -> str:
    """Return what a total leaves out that counts runs of these searches by their own noise; empty if there is none."""
    if not names:
        return ""
    searches = " and ".join(f'"{name}"' for name in names)
    return (
        f"runs of the search{'es' * (len(names) > 1)} {searches} count by their own noise here. For whoever knows a "
        f"model that a search chose, and not the number of its runs, `fdp ledger` states a total that may be larger"
    )


def short_name(promise: Guarantee) -> str:
    """Return the first digits of the name of a run, as ``fdp ledger`` shows it."""
    return (promise.run or "unknown")[:8]


def same_data(one: Guarantee, other: Guarantee) -> bool:
    """Return True if both runs were certainly on the same data, by a fingerprint that they share."""
    return bool(set(one.data) & set(other.data))


def linked_data(fingerprints: Collection[str], runs: Sequence[Guarantee]) -> set[str]:
    """Return all fingerprints of the data with these ones, by the runs that link them.

    The same records in another file have the fingerprint of their samples in common, the same file with another
    tokenizer that of the file: a run on both is on the same data as every run on either.
    """
    sides = [set(side) for one in runs for side in (one.data, one.evaluated)]
    known = set(fingerprints)
    while more := [side for side in sides if side & known and not side <= known]:
        known = known.union(*more)
    return known


def on_other_data(one: Collection[str], other: Collection[str]) -> bool:
    """Return True if fingerprints are certainly of different data: some are of the same key, and none is the same.

    Fingerprints of different keys cannot be compared: of these nothing is known, nor is anything without fingerprints.
    """
    return bool(key_names(one) & key_names(other)) and not set(one) & set(other)


def key_names(fingerprints: Collection[str]) -> set[str]:
    """Return the names of the keys that fingerprints were made with (:mod:`fdp.ledger.data_key`)."""
    return {one.partition("-")[0] for one in fingerprints}


def unit_kind(unit: str) -> str:
    """Return the unit without the part of it that is used, if it is protected as a whole: "one user", "one record".

    Runs that protect the same kind of unit compose, however many tokens of it each of them uses. A window or a row is
    what its size says it is: windows of different sizes are different units. So are users by different fields: if one
    patient more changes what a doctor wrote, that is no doctor more or less.
    """
    kind = unit.removesuffix(OF_PRIVATE_DATA)
    whole = kind.startswith(tuple(f"{one}{end}" for one in WHOLE_UNITS for end in (" (", ", ")))
    return kind.split(" (")[0] if whole else kind


def same_unit(one: Guarantee, other: Guarantee) -> bool:
    """Return True if both runs protect the same kind of unit, so that their epsilons compose."""
    return unit_kind(one.unit) == unit_kind(other.unit)


def training_again(before: Sequence[Guarantee], now: Guarantee) -> str | None:
    """Return a warning, with the numbers, if the parameters were trained before; else None."""
    if not before:
        return None
    if (then := compose(before)) is None:
        return (
            "this model was trained before without privacy: nothing is promised about the data it was trained on then"
        )
    spent = f"epsilon {shown_epsilon(then[0])} at delta {shown_delta(then[1])}"
    said = f"this model was trained privately before, with {spent}"
    if (total := compose([*before, now])) is None:
        return f"{said}; this run is not private: for people in its data, too, that no longer holds"
    said += (
        f"; if on the same people, the guarantees compose: at most epsilon {shown_epsilon(total[0])} at delta "
        f"{shown_delta(total[1])}, not the {shown_epsilon(now.epsilon or 0.0)} of this run alone"
    )
    if len(units := dict.fromkeys(unit_kind(one.unit) for one in (*before, now))) > 1:
        said += f". The units differ ({'; '.join(units)}): they add up only for what is at most one sample in each"
    return f"{said}; {choices}" if (choices := choices_sentence(count_choices(before))) else said
