"""The options of ``fdp search``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from fdp.cli.options import Flag
from fdp.cli.train_options import train_flag

LISTS = {"lr": float, "max_norm": float, "weight_decay": float, "warmup": int}
"""Options that a search draws from lists, with the type of a value."""


@dataclass(frozen=True)
class SearchOptions:
    """The budget of a search, the settings it draws from, and those that all runs share."""

    panel: ClassVar[str] = "Search"

    epsilon: Annotated[float, Flag("Privacy budget of the whole search, the choice included.")] = 8.0
    delta: Annotated[float | None, train_flag("delta", needs=None)] = None
    population: Annotated[int | None, train_flag("population")] = None
    trials: Annotated[float, Flag("The mean of the random number of runs (Poisson).")] = 8.0
    lr: Annotated[str | None, Flag("Learning rates to draw from, such as 2e-3,4e-3,8e-3.")] = None
    max_norm: Annotated[str | None, Flag("Values of C to draw from, such as 0.1,1.")] = None
    weight_decay: Annotated[str | None, Flag("Weight decays to draw from, such as 0,0.1.")] = None
    warmup: Annotated[str | None, Flag("Steps of warm-up to draw from, such as 0,10.")] = None
    batch_size: Annotated[int, train_flag("batch_size")] = 32
    steps: Annotated[int, train_flag("steps")] = 110
    clip: Annotated[str, Flag("Clipping: flat, per-layer or automatic.")] = "automatic"
    optimizer: Annotated[str, train_flag("optimizer")] = "adamw"
    schedule: Annotated[str, train_flag("schedule")] = "cosine"
    seed: Annotated[int | None, train_flag("seed")] = None
    not_private: Annotated[
        bool,
        Flag("Account for each run alone and leave the choice out: what the search returns has no stated epsilon."),
    ] = False
    out: Annotated[Path, Flag("Folder for the runs, the best model and search.json.")] = Path("runs/search")
    as_json: Annotated[bool, Flag("Print the result as one JSON object, last.", name="--json")] = False
