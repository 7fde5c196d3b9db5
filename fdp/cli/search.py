"""``fdp search``: choose learning rate, C and weight decay, with the price of the choice in the budget.

    fdp search --model gpt-nano --data stdlib --eval-fraction 0.05 --epsilon 8 --lr 2e-3,4e-3,8e-3 --max-norm 0.1,1

A random number of runs, ``--trials`` on average, each with settings drawn at random from the lists; the one with the
lowest held-out loss is exported. The noise of each run is such that the choice and the model together cost
``--epsilon`` (:mod:`fdp.privacy.selection`). The score is the loss on people who are not trained on: for those who are,
it depends on the data only through the private parameters. With ``--not-private`` every run spends ``--epsilon`` on its
own, and the choice is covered by nothing.
"""

from __future__ import annotations

import json
import shlex

from rich.console import Console
from typer import Exit

from fdp.cli.evaluation_options import EvaluationOptions
from fdp.cli.options import expand_groups, to_dict
from fdp.cli.search_options import SearchOptions
from fdp.cli.train_options import ComputeOptions, DataOptions, ModelOptions


@expand_groups
def search_command(
    model: ModelOptions,
    data: DataOptions,
    compute: ComputeOptions,
    evaluation: EvaluationOptions,
    search: SearchOptions,
) -> None:
    """Search for settings by held-out loss. The stated epsilon covers the choice and the model."""
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    from fdp.cli.search_runs import parse_lists, run_search

    shared = {key: value for group in (model, data, compute, evaluation) for key, value in to_dict(group).items()}
    same = ("population", "delta", "batch_size", "steps", "clip", "optimizer", "schedule")
    shared |= {key: getattr(search, key) for key in same}
    console = Console(highlight=False)
    result = run_search(shared, parse_lists(search), search, console)
    for line in result["statement"]:
        console.print(line, soft_wrap=True)
    if result["best"] is not None:
        out, run = shlex.quote(str(search.out)), shlex.quote(result["best"]["folder"])
        console.print(
            f"next: fdp generate {out}, and for the run: fdp statement {run}, fdp report {run}", soft_wrap=True
        )
    if search.as_json:
        print(json.dumps(result))
    if code := result["exit_code"]:
        raise Exit(code)
