"""Values that a run keeps beside its state: the average of the parameters, the best ones so far, and their loss.

They travel in the place of the optimizer's state, so that checkpoints save them, sharded like the parameters, and a
resumed run goes on with exactly them:

    state.opt = Kept(opt, average, best)                     only if --ema, --keep-best or --patience asks for it

    >>> state = start_keeping(run, state)                    # before a checkpoint is loaded into it
    >>> for state, record in attach_evaluations(steps(run, plain(state)), evaluator, state): ...
    >>> exported(run, state).params
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.run.averaging import copy_leaves, replace_leaves, start_average, update_average
from fdp.run.prepare_run import Run
from fdp.run.step_record import Evaluation
from fdp.types import Flat, TrainState, Tree


class Best(NamedTuple):
    """The best evaluation so far: its loss and step (0: none yet), and the evaluations since then without a better.

    ``params`` are copies of the trained leaves as they were evaluated; empty if they are not wanted.
    """

    params: Flat
    loss: Float[Tensor, ""]
    step: Int[Tensor, ""]
    waited: Int[Tensor, ""]


class Kept(NamedTuple):
    """The optimizer's state with what is kept beside it; ``average`` is empty without ``--ema``."""

    opt: Tree
    average: Flat
    best: Best | tuple[()]


def start_keeping(run: Run, state: TrainState) -> TrainState:
    """Return the state with what the run keeps beside it; the state itself if it keeps nothing."""
    evaluation, decay, trainable = run.config.evaluation, run.config.ema, run.config.model.trainable
    judged = evaluation is not None and (evaluation.keep_best or evaluation.patience is not None)
    if decay is None and not judged:
        return state
    best: Best | tuple[()] = ()
    if judged:
        assert evaluation is not None
        params = start_average(state.params, trainable) if evaluation.keep_best else {}
        zero = torch.zeros((), dtype=torch.int64, device=state.step.device)
        best = Best(params, torch.full_like(zero, math.inf, dtype=torch.float64), zero, zero.clone())
    average = {} if decay is None else start_average(state.params, trainable)
    return state._replace(opt=Kept(state.opt, average, best))


def plain(state: TrainState) -> TrainState:
    """Return the state as the step takes it."""
    return state._replace(opt=state.opt.opt) if isinstance(state.opt, Kept) else state


def keep_up(run: Run, kept: Kept, state: TrainState) -> Kept:
    """Return what is kept after a step that led to ``state``: the average follows."""
    decay = run.config.ema
    average = kept.average
    if decay is not None:
        average = update_average(average, state.params, decay=decay, step=int(state.step))
    return Kept(state.opt, average, kept.best)


def judge(kept: Kept, params: Tree, evaluation: Evaluation, *, step: int) -> Kept:
    """Return what is kept after an evaluation of ``params``: they are the best if their loss is the lowest so far."""
    best = kept.best
    if not isinstance(best, Best):
        return kept
    if evaluation.loss is None or evaluation.loss >= float(best.loss):
        return kept._replace(best=best._replace(waited=best.waited + 1))
    flat = tree.flatten(params)
    copies = copy_leaves({path: flat[path] for path in best.params})
    loss, number = torch.full_like(best.loss, evaluation.loss), torch.full_like(best.step, step)
    return kept._replace(best=Best(copies, loss, number, torch.zeros_like(best.waited)))


def is_exhausted(run: Run, state: TrainState) -> bool:
    """Return True if as many evaluations as ``--patience`` allows have passed without a better one."""
    evaluation = run.config.evaluation
    if evaluation is None or evaluation.patience is None or not isinstance(state.opt, Kept):
        return False
    return isinstance(state.opt.best, Best) and int(state.opt.best.waited) >= evaluation.patience


def evaluated_params(state: TrainState) -> Tree:
    """Return the parameters that are evaluated: their average if there is one."""
    average = state.opt.average if isinstance(state.opt, Kept) else {}
    return replace_leaves(state.params, average) if average else state.params


def exported(run: Run, state: TrainState) -> TrainState:
    """Return the state whose parameters are the result of the run: the best, else the average, else the last."""
    evaluation = run.config.evaluation
    if not isinstance(state.opt, Kept) or int(state.step) == 0:
        return plain(state)
    params, best = evaluated_params(state), state.opt.best
    if evaluation is not None and evaluation.keep_best and isinstance(best, Best) and int(best.step):
        params = replace_leaves(state.params, best.params)
    return plain(state)._replace(params=params)
