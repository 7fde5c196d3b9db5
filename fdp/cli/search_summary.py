"""Write the price of a search, and the total with other runs at that price, into ``summary.json`` of its runs.

A run of a search cannot say it itself, since the price holds only once every run is made. Until then its model has no
epsilon:

    >>> write_totals(Path("runs/search/trial-2"))       # when the run ends, and again when the search ends
"""

from __future__ import annotations

from pathlib import Path

from fdp.cli.bookkeeping import epsilon_of_model
from fdp.cli.run_files import write_summary
from fdp.cli.statement import other_runs
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.report.other_runs import SEARCH_RUNS, compose_beside_search, totals_in_words
from fdp.report.run_facts import RunFacts, read_facts
from fdp.run.run_folder import read_run_folder

COVERED_BY_NOTHING = (
    "The choice among the runs of this search used data and is covered by nothing: no epsilon is stated for their "
    "models."
)


def write_totals(run: Path) -> None:
    """Write epsilon of the model, and the totals with other runs, into ``summary.json`` of a run of a search.

    Guarantees:
      - every run of the search, chosen or not, has its price: nothing states the epsilon of one run for a model;
      - the total on the data is that of the statement, or more if the run was not chosen.
    """
    if not (run / "summary.json").is_file():
        return
    folder = read_run_folder(run)
    facts = read_facts(folder)
    if facts.search is None or folder.summary is None:
        return
    # A run that was not chosen counts at the price, too, as in its marker.
    priced = facts._replace(search=facts.search._replace(chose=True))
    totals = compose_beside_search(priced, **other_runs(facts)._asdict())
    chain, on_data = totals["with_runs_before"], totals["on_this_data"]
    names = ("epsilon_on_this_data", "delta_on_this_data", "warning")
    kept = {key: value for key, value in folder.summary.items() if key not in names}
    found = epsilon_of_model(priced.chain)
    if facts.before:
        found |= {f"{name}_if_on_the_same_data_before": chain and chain[name] for name in ("epsilon", "delta")}
    if on_data is not None:
        found |= {f"{name}_on_this_data": on_data[name] for name in ("epsilon", "delta")}
    write_summary(run, kept | found | {"warning": _warning(facts, totals_in_words(totals))})


def _warning(facts: RunFacts, others: list[str]) -> str:
    search = facts.search
    assert search is not None
    if search.epsilon is not None:
        price = f"epsilon {shown_epsilon(search.epsilon)} at delta {shown_delta(search.delta)}"
        first = f"This run counts at the price of the search: {price}."
    else:
        first = search.sentence() if search.chose else COVERED_BY_NOTHING
    return " ".join([first, *others, SEARCH_RUNS] if others else [first])
