"""``fdp train --extend RUN``: go on training from a run that ended, as a new run, on the same data.

    --steps N        make N more steps; default: as many as RUN planned
    --epsilon E      choose the noise so that RUN, whatever RUN itself extends, and this run together spend E
                     default: the noise multiplier of RUN; the total is stated before the run

The new run starts from the parameters of RUN; if RUN has a checkpoint of its last step (or did not finish), also from
its optimizer state, with the learning rate schedule from its beginning. It draws a key of its own; with a fixed seed,
the name and the last parameters of RUN are folded into the key, so that no noise is used twice.

    >>> settings = extend_settings({"extend": "runs/a", "steps": 100})      # before the options are built
    >>> config = extend_config(options, config)                             # first parameters, what was spent
    >>> state = continue_state(options, run, state)                         # the optimizer state, if there is one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from fdp import models, tree
from fdp.cli.folder_lock import lock_folder
from fdp.cli.model_and_data import InitialParams
from fdp.cli.options import Effect, options_of
from fdp.cli.reading_options import ReadingOptions
from fdp.cli.train_options import DataOptions, ModelOptions, TrainOptions
from fdp.gradients.plan import Method
from fdp.model import Model
from fdp.optimizers.transforms import ScheduleState
from fdp.parallel.sharding import Sharding
from fdp.privacy.guarantee import Guarantee
from fdp.privacy.releases import Release
from fdp.report.run_facts import RunFacts, read_facts
from fdp.run.prepare_run import Run
from fdp.run.run_config import RunConfig
from fdp.run.run_folder import RunFolder, read_run_folder
from fdp.storage import checkpoint
from fdp.storage.safetensors import import_safetensors
from fdp.types import FdpError, Key, TrainState, Tree

FIXED = (ModelOptions, DataOptions, ReadingOptions)
"""Groups of options that an extension takes from its run: what is trained, and on which data."""
NOT_INHERITED = ("seed", "extend", "epochs", "warmup")
"""Settings of the result that a new run has of its own."""


class Extended(NamedTuple):
    """The run that is extended: its facts, and its last checkpoint if the whole state is continued."""

    folder: RunFolder
    facts: RunFacts
    checkpoint: Path | None

    @property
    def chain(self) -> tuple[Guarantee, ...]:
        """The promises of the run, and of the runs that it extends itself; a run of a search at the price of that."""
        return (*self.facts.before, self.facts.priced)

    @property
    def origin(self) -> str:
        """The name and last parameters of the run; part of the key of the noise."""
        last = (self.folder.summary or {}).get("parameter_sha256", self.checkpoint and self.checkpoint.name)
        return f"{self.facts.promise.run} {last}"


def extend_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run in ``given["extend"]``, with those that are given."""
    extended = find_extended(given["extend"], optimizer=given.get("optimizer"))
    fixed = {key: option.name for group in FIXED for key, option in options_of(group).items()}
    if wrong := [fixed[key] for key in given if key in fixed]:
        raise FdpError(
            f"--extend {given['extend']}: expected {wrong[0]} to be that of the run, which is taken from there, got "
            f"it on the command line; leave it out. To train on other data, or another part, give the run's model as "
            f"--model"
        )
    inherited = [key for key, option in options_of(TrainOptions).items() if option.flag.effect is not Effect.EXECUTION]
    then = extended.folder.settings
    settings = {key: then[key] for key in inherited if key in then and key not in NOT_INHERITED}
    settings |= {"delta": extended.folder.config["delta"]} if extended.facts.private else {}
    if "epsilon" in given or "noise_multiplier" in given:
        settings |= {"epsilon": None, "noise_multiplier": None}
    elif extended.facts.private:
        settings |= {"epsilon": None, "noise_multiplier": extended.folder.config["noise_multiplier"]}
    if (more := extended.folder.config.get("statistics")) is not None:
        settings["kfac_noise"] = more["noise_multiplier"]
    if extended.checkpoint is None and settings["model"] not in models.PRESETS:
        settings["model"] = str(extended.folder.path / "model")
    return settings | dict(given)


def find_extended(name: str, *, optimizer: str | None = None) -> Extended:
    """Return the run in a folder, with its last checkpoint if the state can be continued from there.

    An ``optimizer`` other than that of the run has no state there.
    """
    path = Path(name)
    try:
        run = read_run_folder(path)
    except FdpError as error:
        raise FdpError(f"--extend {error}") from None
    facts, settings = read_facts(run), run.settings
    if not run.finished:
        lock_folder(path).release()  # an error that names the process, if the run is still going on
    found = checkpoint.latest(path / "checkpoints")
    last = None if run.summary is None else run.summary["steps"]
    whole = found is not None and (last is None or found.name == f"step-{last:08d}")
    if settings["optimizer"] == "kfac" or (optimizer or settings["optimizer"]) != settings["optimizer"]:
        whole = False
    if settings.get("ema") is not None or settings.get("keep_best") or settings.get("patience"):
        whole = False  # the exported parameters are not those of the last step
    exported = path / ("model.safetensors" if settings["model"] in models.PRESETS else "model")
    if not whole and (settings.get("prefix") is not None or not exported.exists()):
        what = "a prefix, which only a checkpoint of the last step" if exported.exists() else "a run that"
        raise FdpError(
            f"--extend {name}: expected a run with a checkpoint of its last step, or a model, got {what} has no "
            f"parameters to start from here; train with --save-every, and resume a run that was interrupted"
        )
    return Extended(run, facts, found if whole else None)


def extend_config(options: TrainOptions, config: RunConfig) -> RunConfig:
    """Return the configuration with the first parameters of the extended run, and with what was spent before."""
    if options.ledger.extend is None:
        return config
    extended = find_extended(options.ledger.extend, optimizer=options.training.optimizer)
    spent = _releases(options, extended) if config.epsilon is not None else ()
    file = extended.folder.path / "model.safetensors"
    values = continued_values(config.values, None if extended.checkpoint else file, extended.origin)
    return replace(config, values=values, before=extended.chain, spent=spent)


def continue_state(options: TrainOptions, run: Run, state: TrainState) -> TrainState:
    """Return the first state of the run: that of the extended run's last checkpoint, if it has one.

    Guarantees:
      - the data is that of the extended run, as far as that is on record;
      - steps and the schedule of the learning rate start at 0; moments of the optimizer keep their own count.
    """
    if options.ledger.extend is None:
        return state
    extended = find_extended(options.ledger.extend, optimizer=options.training.optimizer)
    if extended.checkpoint is None:
        return state
    verified = checkpoint.verify(extended.checkpoint)
    if verified.meta["sampler"]["data"] != run.data_digest:
        raise FdpError(
            f"--extend {options.ledger.extend}: expected the data that the run was trained on, got other data there; "
            f"put it back, or train on the new data from the run's model: --model"
        )
    found = checkpoint.load(verified, like=state)
    return found._replace(step=torch.zeros_like(found.step), opt=restart_schedule(found.opt))


def restart_schedule(opt: Any) -> Any:
    """Return the optimizer state with the learning rate's schedule at its first step, and everything else as it is."""
    if isinstance(opt, ScheduleState):
        return ScheduleState(torch.zeros_like(opt.step))
    if isinstance(opt, tuple):
        parts = [restart_schedule(part) for part in opt]
        return type(opt)(*parts) if hasattr(opt, "_fields") else tuple(parts)
    return opt


# The names of these functions, and of what the inner one captures, are part of the noise key (fdp.fingerprint).
def continued_values(start: InitialParams, file: Path | None, origin: str) -> InitialParams:
    """Return a function that reads parameters from ``file``, if it exists, and gets the others from ``start``."""

    def values(model: Model, sharding: Sharding | None, key: Key) -> Tree:
        assert origin  # captured: it tells this run's noise from that of the run it extends
        first = start(model, sharding, key)
        return first if file is None or not file.exists() else _replace_stored(first, file)

    return values


def _replace_stored(first: Tree, file: Path) -> Tree:
    flat = tree.flatten(first)
    with safe_open(file, framework="pt") as stored:
        names = set(stored.keys())
    kept = {path: leaf for path, leaf in flat.items() if path in names}
    return tree.nest(flat | tree.flatten(import_safetensors(file, tree.nest(kept))))


def _releases(options: TrainOptions, extended: Extended) -> tuple[Release, ...]:
    """Return what was released before, all of which ``--epsilon`` must cover."""
    if options.privacy.method == Method.NONE.value:
        return ()
    found: list[Release] = []
    for one in extended.chain:
        if not one.private:
            raise FdpError(
                f"--epsilon: expected a private run to extend, got {options.ledger.extend}, which was trained without "
                f"privacy: no budget covers it"
            )
        if one.releases is None:
            raise FdpError(
                f"--epsilon: expected runs whose mechanism is on record, got {options.ledger.extend}, with one that an "
                f"older fdp made or a search chose; give --noise-multiplier instead, and the total is stated"
            )
        found += one.releases
    return tuple(found)
