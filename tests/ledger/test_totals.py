"""The total of the runs on one data set: each once, same unit only, by composition."""

from __future__ import annotations

import pytest

from fdp.cli.ledger import group_by_data
from fdp.ledger.book import Entry
from fdp.ledger.totals import DataTotal, total_on_same_data
from fdp.privacy.guarantee import RELATION, Guarantee
from fdp.privacy.releases import EVALUATIONS, GRADIENTS, Release, composed_epsilon
from fdp.privacy.several_runs import compose, linked_data

DELTA = 1e-6


def promise(name: str, *, z: float = 1.0, steps: int = 50, **changes) -> Guarantee:
    releases = (Release(GRADIENTS, 0.05, z, steps),)
    known = Guarantee(composed_epsilon(releases, delta=DELTA), DELTA, RELATION, "one record", releases, steps, name)
    return known._replace(**{"data": ("k-samples", "k-files"), "date": "2026-11-16T10:00:00+00:00"} | changes)


def entry(name: str, *, made: int | None = 50, **changes) -> Entry:
    return Entry(promise(name, **changes), "out", made, "finished")


NOW = promise("now", z=1.2)


def words_of(found: DataTotal) -> str:
    return " ".join(found.sentences())


def test_runs_on_the_same_data_are_composed():
    found = total_on_same_data(NOW, [entry("a"), entry("b", z=2.0)], before=())
    assert found is not None
    releases = [release for one in (promise("a"), promise("b", z=2.0), NOW) for release in one.releases or ()]
    assert found.total == (pytest.approx(composed_epsilon(releases, delta=DELTA)), DELTA)
    assert "on this data 2 private runs began before (2026-11-16): with this one, together epsilon" in " ".join(
        found.sentences()
    )
    assert total_on_same_data(NOW, [], before=()) is None


def test_runs_of_a_search_are_said_to_count_by_their_own_noise_but_for_one_of_the_same_search():
    entries = [entry("a")._replace(search="tune"), entry("b")._replace(search="tune"), entry("c")]
    entries.append(entry("d", data=("k-others",))._replace(search="elsewhere"))
    found = total_on_same_data(NOW, entries, before=())
    assert found is not None
    assert found.searches == ("tune",)
    assert 'on this data runs of the search "tune" count by their own noise here' in words_of(found)
    own = total_on_same_data(NOW, entries, before=(), search="tune")
    assert own is not None
    assert own == found._replace(searches=())
    assert "by their own noise" not in words_of(own)
    two = total_on_same_data(NOW, [*entries, entry("e")._replace(search="again")], before=())
    assert two is not None
    assert 'runs of the searches "tune" and "again" count' in words_of(two)


def test_a_run_counts_once_whether_the_ledger_or_the_model_names_it():
    once = total_on_same_data(NOW, [entry("a")], before=())
    assert once is not None
    for entries, before in (([], [promise("a")]), ([entry("a")], [promise("a")]), ([entry("a"), entry("now")], [])):
        assert total_on_same_data(NOW, entries, before=before) == once


def test_leaving_out_a_run_lowers_the_total():
    both = total_on_same_data(NOW, [entry("a"), entry("b")], before=())
    one = total_on_same_data(NOW, [entry("a")], before=())
    assert both is not None
    assert one is not None
    assert both.total is not None
    assert one.total is not None
    assert both.total[0] > one.total[0] > (NOW.epsilon or 0)


def test_one_fingerprint_in_common_is_enough_and_other_data_is_left_out():
    """The same files, tokenised for another model, have other samples."""
    other_model = entry("a", data=("k-other-samples", "k-files"))
    other_data = entry("b", data=("k-others", "k-other-files"))
    unknown = entry("c", data=())
    found = total_on_same_data(NOW, [other_model, other_data, unknown], before=())
    assert found is not None
    assert [one.run for one in found.earlier] == ["a"]


@pytest.mark.parametrize("data", [(), ("other-samples", "other-files")])
def test_a_run_of_the_model_counts_beside_others_unless_it_is_known_to_be_on_other_data(data):
    """Another machine may have recorded it with another key, whose fingerprints cannot be compared."""
    brought = promise("b", data=data)
    found = total_on_same_data(NOW, [entry("a")], before=[brought])
    assert found is not None
    assert found.total == compose([promise("a"), brought, NOW])
    said = "(2026-11-16; 1 of them trained the model before, on data assumed to be the same): with this one"
    assert f"on this data 2 private runs began before {said}" in words_of(found)
    known = total_on_same_data(NOW, [entry("a")], before=[promise("b", data=("k-others",))])
    assert known == total_on_same_data(NOW, [entry("a")], before=())
    assert total_on_same_data(NOW, [], before=[brought]) is None, "no run is certainly on this data"


def test_runs_of_different_units_are_not_added_up():
    found = total_on_same_data(NOW, [entry("a"), entry("b", unit="one user")], before=())
    alone = total_on_same_data(NOW, [entry("a")], before=())
    assert found is not None
    assert alone is not None
    assert found.total == alone.total
    assert [one.run for one in found.other_units] == ["b"]
    assert "another unit (one user): there is no single total. For what is at most one sample" in " ".join(
        found.sentences()
    )
    only_other = total_on_same_data(NOW, [entry("b", unit="one user")], before=())
    assert only_other is not None
    assert only_other.total is None


def test_runs_that_use_another_part_of_the_same_kind_of_unit_are_composed():
    """A user is one sample in each run, whatever the windows: what the runs spend on that user composes."""
    now = NOW._replace(unit="one user (up to 2 windows of 17 bytes)")
    found = total_on_same_data(now, [entry("a", unit="one user (up to 8 windows of 25 bytes)")], before=())
    assert found is not None
    assert found.total == compose([promise("a"), NOW])
    assert found.other_units == ()
    windows = total_on_same_data(
        NOW._replace(unit="one window of 17 bytes"), [entry("a", unit="one window of 25 bytes")], before=()
    )
    assert windows is not None
    assert windows.total is None


def test_a_run_that_stopped_counts_with_all_its_planned_steps():
    stopped, killed = entry("a", made=10), entry("b", made=None)
    found = total_on_same_data(NOW, [stopped, killed], before=())
    assert found is not None
    assert found.total == compose([promise("a"), promise("b"), NOW])
    assert found.as_made is not None
    assert found.total is not None
    assert found.as_made[0] < found.total[0]
    assert "if early stops were planned before the runs" in words_of(found)


def test_a_run_without_a_step_counts_for_nothing():
    assert total_on_same_data(NOW, [entry("a", made=0)], before=[promise("a")]) is None


def test_noised_evaluations_of_the_data_by_runs_on_other_data_count():
    evaluations = (Release("evaluations", 1.0, 1.0, 3),)
    other = entry("a", data=("k-other",), evaluations=evaluations, evaluated=("k-files",))
    found = total_on_same_data(NOW, [other], before=())
    assert found is not None
    expected = composed_epsilon([*(NOW.releases or ()), *evaluations], delta=DELTA)
    assert found.total == (pytest.approx(expected), DELTA)
    stopped = total_on_same_data(NOW, [other._replace(steps=1)], before=())
    assert stopped is not None
    assert stopped.as_made is None, "the evaluations count in full"
    evaluated = NOW._replace(evaluations=evaluations, evaluated=("k-other",))
    again = total_on_same_data(evaluated, [entry("b")], before=())
    assert again is not None
    assert again.total == compose([promise("b"), NOW]), "its own evaluations are of other data"


def test_runs_without_privacy_are_named():
    open_run = Entry(Guarantee(None, None, None, "one record", run="x", data=("k-files",)), "out", 5, "finished")
    found = total_on_same_data(NOW, [open_run], before=())
    assert found is not None
    assert found.total is None
    assert "1 run began before without privacy: nothing protects it" in words_of(found)


def test_a_total_says_that_held_out_samples_chose_without_noise():
    """The epsilon of such a run is about the samples it trained on; nothing bounds what its choice tells of others."""
    found = total_on_same_data(NOW, [entry("a", held_out_choice=True), entry("b")], before=())
    assert found is not None
    assert "decided what 1 earlier run exported: for samples held out then, no epsilon holds" in " ".join(
        found.sentences()
    )
    plain = total_on_same_data(NOW, [entry("a"), entry("b", held_out_choice=False)], before=())
    assert plain is not None
    assert plain.total == found.total
    assert "held out" not in words_of(plain)
    elsewhere = entry("c", data=("k-others",), evaluated=("k-files",), held_out_choice=True)
    other = total_on_same_data(NOW, [elsewhere], before=())
    assert other is not None
    assert (other.not_private, other.total) == (1, None), "it trained on other data, and chose by this"


def test_a_total_says_that_runs_drew_the_same_noise():
    """Runs of one seed that differ in a dtype have one noise on two sums: the difference of their results has none."""
    now = NOW._replace(noise="k-one")
    said = "on this data runs now and a drew the same samples and noise, from one --seed: publish at most one of them"
    for other, shares in ((entry("a", noise="k-one"), True), (entry("a", noise="k-two"), False), (entry("a"), False)):
        found = total_on_same_data(now, [other, entry("b", noise="k-b")], before=())
        assert found is not None
        assert (said in words_of(found)) == shares
    again = total_on_same_data(now, [entry("now", noise="k-one"), entry("b")], before=())
    assert again is not None
    assert "the same samples" not in words_of(again), "a run that goes on is one run"


def test_runs_are_linked_by_runs_between_them():
    """The same records as .jsonl and as .csv: the file of the first, the samples of the second, and a run on both."""
    jsonl, csv = entry("jsonl", data=("k-part", "k-jsonl")), entry("csv", data=("k-all", "k-csv"))
    between = entry("between", data=("k-all", "k-jsonl"))
    runs = [jsonl, csv, between]
    totals = []
    for now in runs:
        found = total_on_same_data(now.promise, [one for one in runs if one is not now], before=())
        assert found is not None
        totals.append(found.total)
    assert totals[0] == totals[1] == totals[2] == compose([one.promise for one in runs])
    apart = total_on_same_data(jsonl.promise, [csv], before=())
    assert apart is None
    (group,) = group_by_data(runs)
    assert [one.promise.run for one in group] == ["jsonl", "csv", "between"]
    assert len(group_by_data([jsonl, csv])) == 2
    assert len(group_by_data([jsonl, between, entry("user", unit="one user", data=("k-jsonl",))])) == 2
    assert linked_data(["k-csv"], [one.promise for one in runs]) == {"k-part", "k-jsonl", "k-all", "k-csv"}


def test_a_run_that_did_not_begin_links_data_and_costs_nothing():
    jsonl, csv = entry("jsonl", data=("k-part", "k-jsonl")), entry("csv", data=("k-all", "k-csv"))
    runs = [jsonl, csv, entry("between", made=0, data=("k-all", "k-jsonl"))]
    found = total_on_same_data(csv.promise, [jsonl, runs[2]], before=())
    assert found is not None
    assert found.total == compose([jsonl.promise, csv.promise])
    (group,) = group_by_data(runs)
    assert [one.promise.run for one in group if one.began] == ["jsonl", "csv"]


def test_a_group_holds_the_runs_that_promise_its_data_nothing():
    """A run that chose by these samples without noise, and one that trained on them without."""
    chose = entry("chose", data=("k-others",), evaluated=("k-files",), held_out_choice=True)
    plain = entry("plain", epsilon=None, delta=None, relation=None, releases=None)
    groups = group_by_data([entry("a"), chose, plain])
    assert [[one.promise.run for one in group] for group in groups] == [["a", "chose", "plain"], ["chose"]]
    assert [one.promise.private for one in groups[0]] == [True, False, False]


def test_a_total_at_another_price_composes_it_in_the_place_of_the_run():
    found = total_on_same_data(NOW, [entry("a"), entry("b", unit="one user")], before=())
    assert found is not None
    price = NOW._replace(epsilon=5.0, releases=None)
    priced = found.at(price)
    assert priced.total == compose([promise("a"), price])
    assert priced.in_all == compose([*found.earlier, *found.other_units, price])
    assert found.at(NOW)[:3] == found[:3]
    assert len(priced.sentences()) == 2, "a figure in each"


def test_a_total_above_the_sum_of_its_runs_says_why():
    """3.999 and 2.997 gave 7.156 at twice the delta, without a word."""
    evaluated = promise("a")._replace(evaluations=(Release(EVALUATIONS, 1.0, 5.0, 4),))
    found = total_on_same_data(NOW, [Entry(evaluated, "out", 50, "finished")], before=())
    assert found is not None
    evaluations = "the noised evaluations of 1 run count in, since whoever one run holds out another may train on"
    assert words_of(found).endswith(f"; {evaluations}")
    search = "a run of which only epsilon and delta are known, such as a search, adds its delta"
    priced = found.at(NOW._replace(releases=None))
    assert priced.total is not None
    assert priced.total[0] > (evaluated.epsilon or 0) + (NOW.epsilon or 0)
    assert priced.total[1] == 2 * DELTA
    assert words_of(priced).endswith(f"; {evaluations}; {search}")
    plain = total_on_same_data(NOW, [entry("a")], before=())
    assert plain is not None
    assert "count in" not in words_of(plain)
    assert "adds its delta" not in words_of(plain)
