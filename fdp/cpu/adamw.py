"""Parameters after an update: by AdamW in one pass over all leaves on a CPU, by any other optimizer as it says.

m <- m + (1 - b1) (g - m)        v <- v + (1 - b2) (g^2 - v)        v^ = max(v / (1 - b2^t) - noise_std^2, eps_root^2)

p <- p - rate (m / (1 - b1^t) / (sqrt(v^) + eps) + weight_decay p)

>>> params, opt = next_params(optimizer, mean, state.opt, params)    # update and apply_updates, up to rounding
"""

from __future__ import annotations

from typing import Any

import torch
from fdp_kernels import cpu_library
from fdp_kernels.cpu_library import addresses_of, dense
from fdp_kernels.plain import are_plain
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.optimizers import LOCAL, Optimizer, Reductions, apply_updates
from fdp.optimizers.adam import AdamState, unbias
from fdp.optimizers.base import AdamW
from fdp.optimizers.schedules import as_schedule
from fdp.optimizers.transforms import ScheduleState
from fdp.types import Flat, Tree


def next_params(
    optimizer: Optimizer, grads: Flat, state: Any, params: Flat, reductions: Reductions = LOCAL
) -> tuple[Flat, Tree]:
    """Return ``params`` after ``optimizer.update``, and the optimizer's new state. Arguments stay as they are.

    Where there are compiled loops, AdamW of plain float32 leaves takes 3.6 ms instead of 8.2 for the 53 leaves of
    gpt-nano, 875,264 elements (two cores of a Xeon at 2.5 GHz).
    """
    rule = optimizer.rule
    if isinstance(rule, AdamW) and rule.mask is None and _is_state_of(rule, state):
        moments = state[0]
        trees = (params, grads, moments.mean, moments.square)
        read = [tree.leaves(each) for each in trees]
        loops = cpu_library.library() if _takes_loop(*read) and tree.same_paths(*trees) else None
        if loops is not None and (numbers := _numbers(rule, state)).isfinite().all():
            new = _in_one_pass(loops, numbers, read)
            after, mean, square = (tree.refill(like, leaves) for like, leaves in zip((params, *moments[1:]), new))
            rest = (ScheduleState(part.step + 1) if isinstance(part, ScheduleState) else part for part in state[1:])
            return after, (AdamState(moments.step + 1, mean, square), *rest)
    updates, after = optimizer.update(grads, state, params, reductions)
    return apply_updates(params, updates), after


def _is_state_of(rule: AdamW, state: Any) -> bool:
    """Return True for the state of ``adam`` or ``adamw``: moments, and the step of a schedule if there is one."""
    if not isinstance(state, tuple) or len(state) not in (2, 3) or not isinstance(state[0], AdamState):
        return False
    return isinstance(state[-1], ScheduleState) == callable(rule.learning_rate)


def _takes_loop(params: list[Tensor], *others: list[Tensor]) -> bool:
    """Return True for plain float32 leaves on a CPU, of the same shapes in all lists."""
    shapes, every = [leaf.shape for leaf in params], (params, *others)
    if not params or not all(are_plain(leaves) for leaves in every):
        return False
    if not all(leaf.is_cpu and leaf.dtype is torch.float32 for leaves in every for leaf in leaves):
        return False
    return all([leaf.shape for leaf in leaves] == shapes for leaves in others)


def _in_one_pass(
    loops: cpu_library.Library, numbers: Float[Tensor, " 9"], read: list[list[Tensor]]
) -> list[list[Tensor]]:
    """Return the new parameters, means and squares, from the parameters, gradients, means and squares."""
    read = [[dense(leaf.detach()) for leaf in leaves] for leaves in read]
    new = [[torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in read[0]] for _ in range(3)]
    sizes = [leaf.numel() for leaf in read[0]]
    loops.adamw(addresses_of(zip(*read, *new)), torch.tensor(sizes, device="cpu"), numbers, len(sizes))
    return new


def _numbers(rule: AdamW, state: tuple[Any, ...]) -> Float[Tensor, " 9"]:
    """Return what ``adamw_block`` of cpu_kernels.c reads."""
    step, last = state[0].step + 1, state[-1]
    rate = as_schedule(rule.learning_rate)(last.step if isinstance(last, ScheduleState) else step)
    factors = [float(unbias(decay, step)) for decay in (rule.b1, rule.b2)]
    noise, floor = (rule.noise_std or 0.0) ** 2, rule.eps_root**2
    numbers = [1 - rule.b1, 1 - rule.b2, *factors, noise, floor, rule.eps, rule.weight_decay, float(rate)]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")
