"""The promises of several runs on the same data: which runs are on the same data, and what they promise together.

    releases of all runs known          epsilon of their composition at the largest delta  (fdp.privacy.releases)
    only (e1, d1) and (e2, d2) known    (e1 + e2, d1 + d2)

Runs compose if they protect the same kind of unit. The data of two runs is the same if they have a keyed fingerprint in
common (:mod:`fdp.ledger.data_key`).

    >>> before = read_marker(folder)
    >>> compose([*before, promise])             # (epsilon, delta), or None if a run was not private
    >>> training_again(before, promise)         # None, or a warning with the numbers
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from fdp.privacy.guarantee import Guarantee, short_name
from fdp.privacy.releases import Opaque, Release, composed_epsilon
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.types import FdpError

WHOLE_UNITS = ("one user", "one record", "one file")
"""The units that are protected as a whole, as :mod:`fdp.data.units` begins them."""
OF_PRIVATE_DATA = " of the private data"
"""The end of a unit that is trained on beside public data."""


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
