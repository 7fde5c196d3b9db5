"""An optimizer is a pair of pure functions; optimizers are chained from small ones.

    state          = init(params)
    updates, state = update(grads, state, params)
    params         = params + updates

The interface is optax's (github.com/google-deepmind/optax). A chain checks that gradients fit the parameters, and
converts to float32 (float64 for float64 parameters) and back. A caller with shards says how to reduce over full leaves:
``update(grads, state, params, reductions)``.

    >>> optimizer = chain(clip_by_global_norm(1.0), adamw(warmup_cosine(3e-4, warmup_steps=100, steps=5000)))
    >>> updates, state = optimizer.update(grads, state, params)
    >>> params = apply_updates(params, updates)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.optimizers import checks
from fdp.optimizers.foreach import each, in_groups
from fdp.optimizers.leaf_reductions import LOCAL, Reductions
from fdp.optimizers.schedules import Schedule
from fdp.types import FdpError, Tree


class Init(Protocol):
    """``init(params) -> state``."""

    def __call__(self, params: Tree, reductions: Reductions = LOCAL) -> Tree: ...


class Update(Protocol):
    """``update(grads, state, params) -> (updates, state)``."""

    def __call__(self, grads: Tree, state: Tree, params: Tree, reductions: Reductions = LOCAL) -> tuple[Tree, Tree]: ...


class AdamW(NamedTuple):
    """The hyper-parameters of Adam with decoupled weight decay, for code that computes its ``update`` another way."""

    learning_rate: float | Schedule
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Callable[[Tree], Tree] | None
    noise_std: float | None
    eps_root: float
    update: Update


class Momentum(NamedTuple):
    """The hyper-parameters of momentum with decoupled weight decay on the output of ``front``; see :class:`AdamW`.

    u = front(g),   m <- momentum m + u,   p <- p - learning_rate (m + weight_decay p)
    """

    front: Optimizer
    learning_rate: float | Schedule
    momentum: float
    weight_decay: float
    update: Update


class Optimizer(NamedTuple):
    """A pair of pure functions: ``init(params) -> state``, ``update(grads, state, params) -> (updates, state)``.

    ``reductions`` says how sums over full leaves are computed: from the leaves given, or over ranks. ``adamw`` or
    ``descent`` is set if the optimizer is exactly that. If ``measures`` is True, its state also holds measurements of
    samples without noise, so no private step accepts it. ``settings`` are the numbers that decide an update, for
    :func:`fdp.fingerprint.fingerprint`; None if the functions capture nothing else.

    Guarantees:
      - neither function modifies an argument;
      - state is tensors in tuples, with the structure, shapes and dtypes that ``init`` gave it;
      - on shards, with their reductions, the updates are the shards of the full updates;
      - ``rule`` is None once ``update`` is another function: a wrapper around an update is never skipped.
    """

    init: Init
    update: Update
    adamw: AdamW | None = None
    measures: bool = False
    descent: Momentum | None = None
    settings: Any = None

    @property
    def rule(self) -> AdamW | Momentum | None:
        """``adamw`` or ``descent``, whichever describes the current ``update``; else None."""
        known = (rule for rule in (self.adamw, self.descent) if rule is not None)
        return next((rule for rule in known if rule.update is self.update), None)


def chain(*parts: Optimizer) -> Optimizer:
    """Chain optimizers: the updates of each are the gradients of the next.

    Guarantees:
      - each part gets gradients, parameters and so its state in float32, or float64 if the parameter is;
      - updates have the dtypes of the parameters;
      - a gradient of another structure or shape than its parameter is an error that names the path.
    """

    def init(params: Tree, reductions: Reductions = LOCAL) -> Tree:
        checks.floating(params)
        precise = tree.map(_precise, params)
        return tuple(part.init(precise, reductions) for part in parts)

    def update(grads: Tree, state: Tree, params: Tree, reductions: Reductions = LOCAL) -> tuple[Tree, Tree]:
        if len(state) != len(parts):
            raise FdpError(f"state: expected that of a chain of {len(parts)}, got {len(state)} states; call init")
        precise = tree.map(_precise, params)
        checks.check_fits("grads", precise, grads)
        updates = tree.map(lambda p, g: cast(g, p.dtype), precise, grads)
        states = []
        for part, part_state in zip(parts, state):
            updates, part_state = part.update(updates, part_state, precise, reductions)
            states.append(part_state)
        return tree.map(lambda u, p: cast(u, p.dtype), updates, params), tuple(states)

    return Optimizer(init, update, measures=any(part.measures for part in parts))


def pointwise(init: Callable[[Tree], Tree], update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]) -> Optimizer:
    """Return an elementwise optimizer, for which a shard needs nothing of the rest of its leaf."""
    return Optimizer(
        lambda params, reductions=LOCAL: init(params),
        lambda grads, state, params, reductions=LOCAL: update(grads, state, params),
    )


def stateless(update: Callable[[Tree, Tree, Reductions], Tree]) -> Optimizer:
    """Return an optimizer without state, from ``update(grads, params, reductions) -> updates``."""
    return Optimizer(
        lambda params, reductions=LOCAL: (),
        lambda grads, state, params, reductions=LOCAL: (update(grads, params, reductions), state),
    )


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return ``params + updates``, in the dtypes of ``params``."""
    checks.check_fits("updates", params, updates)
    return in_groups(lambda p, u: each("add", p, [cast(one, leaf.dtype) for one, leaf in zip(u, p)]), params, updates)


def zero_step(params: Tree) -> Int[Tensor, ""]:
    """Return a step count of 0 on the parameters' device; a tensor, so that a compiled update compiles once."""
    return torch.zeros((), dtype=torch.int64, device=tree.leaves(params)[0].device)


def cast(leaf: Float[Tensor, " *shape"], dtype: torch.dtype) -> Float[Tensor, " *shape"]:
    """Return ``leaf.to(dtype)``; the check is much cheaper than a conversion that does nothing."""
    return leaf if leaf.dtype == dtype else leaf.to(dtype)


def once(scalar: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the same scalar, computed only once when compiled.

    Inductor copies the arithmetic of a 0-d tensor into the loop of every tensor that it multiplies, so that a bias
    correction or a cosine would be computed again for each element. ``as_strided`` forces it to store the scalar.
    """
    return scalar.as_strided((), ())


def _precise(param: Tensor) -> Tensor:
    return cast(param, torch.promote_types(param.dtype, torch.float32))
