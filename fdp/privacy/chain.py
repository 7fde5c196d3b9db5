"""The promise about parameters that several runs trained, one after the other, on the same data.

A run that starts from the parameters of earlier runs releases a model that depends on all of them:

    total = composition of the earlier runs on the same data, with the same unit, and of the run itself

An earlier run on other data, or with another unit, is left out: what it spent is about others, and is said beside.

    >>> chain = compose_chain(before, promise, extends=True)
    >>> chain.total.epsilon, len(chain.earlier), len(chain.left_out)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from fdp.privacy.guarantee import Guarantee
from fdp.privacy.releases import Opaque, Release
from fdp.privacy.several_runs import compose, on_other_data, once_each, same_unit


class Chain(NamedTuple):
    """The promise about the parameters of the run ``last``: ``total`` is of ``earlier`` runs and of ``last``.

    ``total`` has no epsilon if any of these was not private, and no releases if those of any are not known.
    ``left_out`` are earlier runs that are not in it. ``assumed`` is True if it is not on record that all runs in it
    were on the same data.
    """

    total: Guarantee
    last: Guarantee
    earlier: tuple[Guarantee, ...] = ()
    left_out: tuple[Guarantee, ...] = ()
    assumed: bool = False

    @property
    def releases(self) -> tuple[Release, ...]:
        """The known releases of all runs; of several runs, also their noised evaluations, as in the total."""
        runs = (*self.earlier, self.last)
        found = tuple(release for one in runs for release in one.releases or ())
        return found + tuple(release for one in runs for release in one.evaluations if self.earlier)

    @property
    def opaque(self) -> tuple[Opaque, ...]:
        """The promises of the runs whose releases are not known."""
        runs = (*self.earlier, self.last)
        return tuple(Opaque(one.epsilon or 0.0, one.delta or 0.0) for one in runs if one.releases is None)


@lru_cache(maxsize=16)
def compose_chain(before: tuple[Guarantee, ...], promise: Guarantee, *, extends: bool) -> Chain:
    """Return the promise about parameters that the runs ``before`` and then this one trained.

    ``extends``: the last run before is one that ``--extend`` went on from, and so on the same data. A run whose data
    was recorded with another key, or not at all, may be on the same data.

    Guarantees:
      - the total is at least what the run promises alone;
      - an earlier private run with the same unit is part of the total unless it is known to be on other data;
      - the total has no epsilon if an earlier run on the same data was not private.
    """
    before = tuple(one for one in once_each(before) if one.run is None or one.run != promise.run)
    if not promise.private:
        return Chain(promise, promise, left_out=before)
    known, earlier, left_out, assumed = set(promise.data), [], [], False
    for place, one in reversed([*enumerate(before, start=1)]):
        same = (extends and place == len(before)) or bool(known & set(one.data))
        known |= set(one.data) if same else set()
        alike = same_unit(one, promise) and one.relation == promise.relation
        if (same and not one.private) or (alike and (same or not on_other_data(one.data, known))):
            earlier.append(one)
            assumed |= not same
        else:
            left_out.append(one)
    found = Chain(promise, promise, tuple(reversed(earlier)), tuple(reversed(left_out)), assumed)
    return found._replace(total=_total(found)) if earlier else found


def _total(chain: Chain) -> Guarantee:
    runs: Sequence[Guarantee] = (*chain.earlier, chain.last)
    if (found := compose(runs)) is None:
        return chain.last._replace(epsilon=None, delta=None, relation=None, releases=None, evaluations=())
    steps = [one.steps for one in runs if one.steps is not None]
    return chain.last._replace(
        epsilon=found[0],
        delta=found[1],
        releases=None if chain.opaque else chain.releases,
        steps=sum(steps) if len(steps) == len(runs) else None,
        evaluations=(),
    )
