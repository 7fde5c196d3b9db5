"""The training loop as plain functions: a run in, one state and one record per step out. ``fdp train`` calls them.

    batch = draw_batch(run, t)                         this rank's samples of step t
    state = refresh_curvature(run, state, batch, t)    K-FAC, when it is due
    state, metrics = run.step(state, batch, run.key)   fdp.step: Algorithm 1

Samples and noise are functions of (run.key, t), and the key is one of seed and settings (:mod:`fdp.run.prepare_run`).
Nothing is written to disk here.

    >>> run, state = prepare(config)                   # every check, before any noise is drawn
    >>> for state, record in steps(run, state): records.append(record)
    >>> summarise(run, state, records)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from fdp import keys, tree
from fdp.foreign.uses.dropout import DROPOUT_KEYS
from fdp.kfac.private.curvature_sources import refresh_from_feed
from fdp.privacy.microbatches import split_microbatches
from fdp.privacy.sampling import TRAINING, Poisson, sample_batch
from fdp.run.flight import Flight, land, read_clip_bound, take_off
from fdp.run.overlap import Draws, send_to_device
from fdp.run.prepare_run import Run, in_one_order
from fdp.run.step_record import StepRecord
from fdp.types import Batch, Key, TrainState


def steps(
    run: Run,
    state: TrainState,
    *,
    stop: Callable[[], bool] = lambda: False,
    ahead: Callable[[int], bool] | None = None,
    begin: Callable[[int], None] = lambda step: None,
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Yield the state and the record of every step that ``state`` has not made yet.

    If the run works in place, the next state is written into the last one: copy what you want to keep. After a step
    for which ``stop()`` is true on any rank, all ranks end. ``begin(step)`` is called before a step is launched.

    With ``ahead``, batches are drawn in a thread, and after each ``step`` for which ``ahead(step)`` is true the next
    one is launched before the record of ``step`` is yielded. A state yielded with such a record may be overwritten
    already: use it for nothing. One process only.

    Guarantees:
      - the same seed gives the same states and records, also if the run is resumed, and with or without ``ahead``;
      - all ranks make the same number of steps;
      - parameters that stop being finite end the run with an error that names the step and the leaf, on every rank.
    """
    config = run.config
    if config.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(config.device)
    first, key, landed = int(state.step), run.key.to(config.device), 0.0
    flight: Flight | None = None
    bound = None if tree.leaves(state.clip) else read_clip_bound(run, state)  # the same at every step
    with ExitStack() as stack:
        draw = partial(draw_batch, run)
        if ahead is not None:
            draws = stack.enter_context(Draws(partial(draw_on_host, run), first=first, end=config.steps))
            draw = lambda t: send_to_device(draws.take(t), config.device)  # noqa: E731
        for t in range(first, config.steps):
            is_last = ahead is not None and stop()
            if flight is not None and (ahead is None or is_last or not ahead(flight.t + 1)):
                record, any_stops = land(run, flight, landed=landed)
                landed = time.perf_counter()
                yield flight.state, record
                flight = None
                if any_stops or is_last:
                    return
            begin(t + 1)
            try:
                launched = _launch(run, state, t, draw, key=key, bound=bound, stop=stop)
            except Exception:
                if flight is not None:  # its step was made
                    yield flight.state, land(run, flight, landed=landed)[0]
                raise
            state = launched.state
            if flight is not None:
                record, _ = land(run, flight, landed=landed)
                landed = time.perf_counter()
                yield flight.state, record
            flight = launched
        if flight is not None:
            yield flight.state, land(run, flight, landed=landed)[0]


def _launch(
    run: Run,
    state: TrainState,
    t: int,
    draw: Callable[[int], Batch],
    *,
    key: Key,
    bound: Tensor | None,
    stop: Callable[[], bool],
) -> Flight:
    """Start step ``t``; on a GPU, do not wait for it."""
    began = time.perf_counter()
    batch = draw(t)
    state = refresh_curvature(run, state, batch, t)
    bound = read_clip_bound(run, state) if bound is None else bound
    state, metrics = run.step(state, batch, key)
    return take_off(run, t, metrics, state, bound=bound, stop=stop(), began=began)


def can_run_ahead(run: Run) -> bool:
    """Return True if it saves time to launch a step before the record of the last one: in place, on one GPU."""
    config = run.config
    return config.device.type == "cuda" and run.in_place and run.sharding is None and not any(config.offload)


def draw_batch(run: Run, t: int, sampling: Poisson | None = None, purpose: str = TRAINING) -> Batch:
    """Return this rank's samples of step ``t`` (from 0), on the device; by default those that the step trains on."""
    return send_to_device(draw_on_host(run, t, sampling, purpose), run.config.device)


def draw_on_host(run: Run, t: int, sampling: Poisson | None = None, purpose: str = TRAINING) -> Batch:
    """Return the samples of :func:`draw_batch` where the dataset has them."""
    config, by = run.config, run.mechanism.sampling if sampling is None else sampling
    share = {} if run.sharding is None else {"rank": run.sharding.rank, "ranks": run.sharding.ranks}
    options = {"step": t, "microbatch_size": run.sizes, "purpose": purpose, **share}
    return _fold_into_dropout(sample_batch(config.dataset, by, run.key, **options), run, t)


def _fold_into_dropout(batch: Batch, run: Run, t: int) -> Batch:
    """Fold the step into the samples' dropout keys, if the data hold any, so that every step drops other elements."""
    if not isinstance(batch.data, dict) or DROPOUT_KEYS not in batch.data:
        return batch
    keys_of_samples = batch.data[DROPOUT_KEYS]
    step = keys.step_key(run.key, DROPOUT_KEYS, t).to(keys_of_samples.device)
    return batch._replace(data=batch.data | {DROPOUT_KEYS: keys_of_samples + step})


def refresh_curvature(run: Run, state: TrainState, batch: Batch, t: int) -> TrainState:
    """Return the state with the curvature refreshed, if that is due at step ``t``.

    Without privacy, the curvature is measured on the step's first microbatch. In a private run ``batch`` is not used.
    """
    if run.kfac is None:
        return state
    key = run.key.to(run.config.device)
    with in_one_order(run.config):
        if run.feed is None:
            data, mask = split_microbatches(batch)[0]
            return run.kfac.refresh(state, data, mask, key, t, donate=run.in_place)
        draw, mechanism = partial(draw_batch, run, t), run.mechanism
        return refresh_from_feed(run.feed, run.kfac, state, draw, key, t, mechanism=mechanism, donate=run.in_place)
