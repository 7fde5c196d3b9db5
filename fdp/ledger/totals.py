"""The runs on the same data, composed: what everything that was released of it promises together.

Runs are composed if they certainly used the same data (a fingerprint in common, with each other or with a run between
them) and protect the same kind of unit. To these are added the runs that trained the model before, unless they are
known to be on other data: a run that another machine recorded with another key has no fingerprint that could be
compared. A run that used the data for noised evaluations only counts with these. Runs with another unit are counted
apart: epsilons of different units do not add up, except for what is at most one sample in each. A run that was started
counts with all its planned steps, also if it stopped early or never ended: what it showed may have led to the stop.

    >>> found = total_on_same_data(promise, book.runs(), before=())
    >>> found.sentences()
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fdp.ledger.book import Entry
from fdp.privacy.guarantee import RELATION, Guarantee, promise_about
from fdp.privacy.several_runs import (
    choices_sentence,
    compose,
    composition_note,
    count_choices,
    linked_data,
    on_other_data,
    once_each,
    runs_that_share_noise,
    same_unit,
    searches_sentence,
    shared_noise_sentence,
)
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon


class DataTotal(NamedTuple):
    """The runs on one data set. ``earlier`` have the unit of ``now``; the total includes ``now``, if it is private.

    ``as_made`` is the total if every stop was decided in advance. ``in_all`` is the total with the runs of other units,
    for what is at most one sample in each. ``not_private`` counts the runs without a promise. ``assumed`` are the
    runs among them that are not certainly on this data. ``searches`` are those that runs of ``earlier`` are of, but for
    the search of ``now``.
    """

    now: Guarantee
    earlier: tuple[Guarantee, ...]
    total: tuple[float, float] | None
    as_made: tuple[float, float] | None
    other_units: tuple[Guarantee, ...]
    in_all: tuple[float, float] | None
    not_private: int
    assumed: tuple[Guarantee, ...] = ()
    searches: tuple[str, ...] = ()

    def sentences(self, data: str = "this data") -> list[str]:
        """Return the total in words, a figure in each entry; ``data`` names the data."""
        earlier = (*self.earlier, *self.other_units)
        choices = choices_sentence(count_choices(earlier))
        shared = shared_noise_sentence(runs_that_share_noise((self.now, *earlier)))
        searches = searches_sentence(self.searches)
        found = filter(None, (shared, self._same_unit(), searches, self._other_units(), self._not_private(), choices))
        return [f"on {data} {sentence}" for sentence in found]

    def at(self, now: Guarantee) -> DataTotal:
        """Return the total with ``now`` in the place of the promise of the run, such as the price of a search."""
        mine = [now] if now.private else []
        return self._replace(
            now=now,
            total=compose([*self.earlier, *mine]) if self.earlier else None,
            as_made=None,
            in_all=compose([*self.earlier, *self.other_units, *mine]) if self.other_units else None,
        )

    def _same_unit(self) -> str:
        if not self.earlier or self.total is None:
            return ""
        count, before = len(self.earlier), _dates(self.earlier) + self._assumed(self.earlier)
        said = f"{count} private run{'' if count == 1 else 's'} began before ({before}): "
        epsilon, delta = self.total
        if self.now.epsilon is None:
            said += f"epsilon {shown_epsilon(epsilon)} at delta {shown_delta(delta)}; this run is not private"
        else:
            said += (
                f"with this one, together epsilon {shown_epsilon(epsilon)} at delta {shown_delta(delta)}, for whoever "
                f"sees what came out of all of them"
            )
        if self.as_made is not None and shown_epsilon(self.as_made[0]) != shown_epsilon(epsilon):
            said += f" ({shown_epsilon(self.as_made[0])} if early stops were planned before the runs)"
        note = composition_note([*self.earlier, self.now])
        return f"{said}; {note}" if note else said

    def _other_units(self) -> str:
        if not self.other_units or self.in_all is None:
            return ""
        count, units = len(self.other_units), "; ".join(dict.fromkeys(one.unit for one in self.other_units))
        units += self._assumed(self.other_units)
        return (
            f"{count} private run{'' if count == 1 else 's'} began before with another unit ({units}): "
            f"there is no single total. For what is at most one sample in each run, all runs together "
            f"give epsilon {shown_epsilon(self.in_all[0])} at delta {shown_delta(self.in_all[1])}"
        )

    def _assumed(self, runs: Sequence[Guarantee]) -> str:
        count = sum(one in self.assumed for one in runs)
        return f"; {count} of them trained the model before, on data assumed to be the same" if count else ""

    def _not_private(self) -> str:
        if not self.not_private:
            return ""
        count = self.not_private
        return (
            f"{count} run{'' if count == 1 else 's'} began before without privacy: nothing protects it "
            f"from whoever sees what came out of {'it' if count == 1 else 'them'}"
        )


def total_on_same_data(
    now: Guarantee, entries: Sequence[Entry], *, before: Sequence[Guarantee], search: str | None = None
) -> DataTotal | None:
    """Return the total of all runs on the data of ``now``, a run of ``search`` if that is given; None if there is none.

    ``before`` are promises that the model brings along, which the ledger of another machine may hold. A run that did
    not begin links the data of others, and costs nothing.

    Guarantees:
      - every run on this data counts once, whether the ledger, the model or both name it;
      - if there is such a run, so does every private run in ``before`` that is not known to be on other data;
      - runs of different units are never composed into ``total``.
    """
    listed = [entry.promise for entry in entries if entry.began]
    unspent = {entry.promise.run for entry in entries if not entry.began}
    others = [one for one in once_each([*listed, *before]) if one.run != now.run and one.run not in unspent]
    data = linked_data(now.data, [now, *others, *(entry.promise for entry in entries)])
    found = [about for one in others if (about := promise_about(one, data)) is not None]
    if not found:
        return None
    assumed = tuple(one for one in others if one in before and _may_be_on(one, data))
    found += assumed
    private = [one for one in found if one.private]
    earlier = tuple(one for one in private if same_unit(one, now))
    others = tuple(one for one in private if not same_unit(one, now))
    now = promise_about(now, data) or now
    mine = [now] if now.private else []
    of_search = {entry.promise.run: entry.search for entry in entries if entry.search not in (None, search)}
    searches = dict.fromkeys(name for one in earlier if (name := of_search.get(one.run)) is not None)
    made = {entry.promise.run: promise_about(entry.made(), data) for entry in entries}
    shorter = tuple(made.get(one.run) or one for one in earlier)
    return DataTotal(
        now,
        earlier,
        compose([*earlier, *mine]) if earlier else None,
        compose([*shorter, *mine]) if shorter != earlier else None,
        others,
        compose([*private, *mine]) if others else None,
        len(found) - len(private),
        assumed,
        tuple(searches),
    )


def _may_be_on(promise: Guarantee, data: Collection[str]) -> bool:
    """Return True if it is not known whether a private run was on the data with these fingerprints."""
    known = promise_about(promise, data) is not None or on_other_data(promise.data, data)
    return promise.private and promise.relation == RELATION and not known


def _dates(promises: Sequence[Guarantee]) -> str:
    days = list(dict.fromkeys((one.date or "at an unknown date")[:18].split("T")[0] for one in promises))
    return ", ".join(days if len(days) <= 3 else [days[0], "...", days[-1]])
