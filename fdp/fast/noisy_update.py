"""AdamW, or momentum, on a noisy mean of lazy sums, in place and in one pass over every leaf.

    params, moments <- adamw((sum_s factors_s rows_s + noise_scale N(0, I)) / expected_batch_size)

The same as ``add_noise``, ``expected_mean``, ``optimizer.update`` and ``apply_updates`` in turn, up to rounding: the
same draws, a function of (key, path, element), on the same grid, and the same optimizer state. Nothing is rounded below
float64 before the noise is added. The pass also writes a copy of the parameters in the compute dtype.

    >>> update_ = NoisyUpdate(optimizer.rule)
    >>> update_(params, opt_state, sums, copies, key=key, noise_scale=z * total.sensitivity, expected_batch_size=256)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from fdp_kernels.launch_tables import LaunchTables, Leaf, can_update
from fdp_kernels.noisy_adamw import Hyper, update_leaf_reference_, update_leaves_
from jaxtyping import Float, Int
from torch import Tensor

from fdp import keys, tree
from fdp.gradients.lazy_sum import LazySum
from fdp.optimizers.adam import AdamState, unbias
from fdp.optimizers.base import AdamW, Momentum
from fdp.optimizers.schedules import as_schedule
from fdp.optimizers.sgd import TraceState
from fdp.optimizers.transforms import ScheduleState
from fdp.privacy.noise import grid_of
from fdp.types import FdpError, Flat, Key, Path, ShardWindow, Tree


class NoisyUpdate:
    """The update of one optimizer. Between calls it stores only what depends on paths and places.

    A call can be captured in a CUDA graph after a call with leaves of the same sizes, and then ``reserve``.

    Guarantees:
      - each element's noise is drawn from (key, path, index in the whole leaf) and scaled by ``noise_scale``, once;
      - a row with factor 0 contributes exactly 0, even if it holds NaN or infinity;
      - sums are formed and noised in float64, and rounded to ``grid_of(noise_scale)`` before anything is narrower;
      - every tensor of the optimizer's state keeps its place, shape and dtype.
    """

    def __init__(self, rule: AdamW | Momentum) -> None:
        self.rule = rule
        self._tables = LaunchTables()
        self._nonces: dict[tuple, Int[Tensor, "paths 3"]] = {}

    def __call__(
        self,
        params: Flat,
        opt_state: Tree,
        sums: Mapping[Path, LazySum],
        copies: Mapping[Path, Tensor] | None = None,
        *,
        key: Key,
        noise_scale: Float[Tensor, ""] | None,
        expected_batch_size: float,
        shard_windows: Mapping[Path, ShardWindow] | None = None,
    ) -> None:
        """Write the next parameters, state and copies into the old ones.

        ``sums`` has an entry for every leaf of ``params``; ``noise_scale`` is the standard deviation of the noise, None
        for none. ``copies`` may lack leaves. ``shard_windows`` gives each shard's position, as in ``add_noise``.
        """
        if set(sums) != set(params):
            differ = sorted(set(sums) ^ set(params))
            raise FdpError(f"sums: expected the leaves of params, got others or fewer: {differ[:4]}")
        if not expected_batch_size > 0:
            raise FdpError(f"expected_batch_size: expected a number > 0, got {expected_batch_size}")
        moments = _moments(opt_state, params, self.rule)
        scalars = self._scalars(moments, opt_state, noise_scale, expected_batch_size)
        leaves, odd = self._leaves(params, moments, sums, copies or {}, shard_windows)
        hyper = self._hyper()
        children = None if noise_scale is None else self._children(key, [*leaves, *odd])
        update_leaves_(
            list(leaves.values()), None if children is None else children[: len(leaves)], scalars, hyper, self._tables
        )
        for i, (path, leaf) in enumerate(odd.items(), start=len(leaves)):
            draw = None
            if children is not None:
                shape, window = (tuple(leaf.param.shape), None) if shard_windows is None else shard_windows[path]
                draw = keys.normal(children[i], shape, dtype=torch.float64, window=window)
            update_leaf_reference_(leaf, draw, scalars, hyper)
        for part in opt_state:
            if isinstance(part, AdamState | ScheduleState):
                part.step.add_(1)

    def reserve(self) -> None:
        """Allocate what the next capture needs and cannot allocate itself; call it outside, before every capture."""
        self._tables.reserve()

    def _hyper(self) -> Hyper:
        match self.rule:
            case AdamW() as a:
                return Hyper(a.b1, a.b2, a.eps, a.weight_decay, a.noise_std or 0.0, a.eps_root)
            case Momentum() as m:
                return Hyper(m.momentum, None, 0.0, m.weight_decay, 0.0, 0.0)

    def _scalars(
        self, moments: AdamState | TraceState, opt_state: Tree, noise_scale: Tensor | None, expected_batch_size: float
    ) -> Float[Tensor, " 7"]:
        first = tree.leaves(moments)[0]
        zero = torch.zeros((), dtype=torch.float64, device=first.device)
        scale = zero if noise_scale is None else noise_scale.to(zero)
        rate = as_schedule(self.rule.learning_rate)
        step, factors = zero, (zero + 1, zero + 1)
        if isinstance(moments, AdamState) and isinstance(self.rule, AdamW):
            step = moments.step
            factors = unbias(self.rule.b1, step + 1), unbias(self.rule.b2, step + 1)
        at = opt_state[-1].step if isinstance(opt_state[-1], ScheduleState) else step
        scalars = [scale, zero + 1 / expected_batch_size, *factors, rate(at).to(zero), grid_of(scale), step.to(zero)]
        return torch.stack(scalars)

    def _leaves(
        self,
        params: Flat,
        moments: AdamState | TraceState,
        sums: Mapping[Path, LazySum],
        copies: Mapping[Path, Tensor],
        shard_windows: Mapping[Path, ShardWindow] | None,
    ) -> tuple[dict[Path, Leaf], dict[Path, Leaf]]:
        """Return the leaves that the kernel takes, and the others."""
        if isinstance(moments, AdamState):
            means, squares = tree.flatten(moments.mean), tree.flatten(moments.square)
        else:
            means, squares = tree.flatten(moments.momentum), {}
        mask = self.rule.mask if isinstance(self.rule, AdamW) else None
        decays = {} if mask is None else tree.flatten(mask(params))
        taken, odd = {}, {}
        for path, param in params.items():
            first = 0 if shard_windows is None else _first(shard_windows[path])
            decay = self.rule.weight_decay > 0 and bool(decays.get(path, True))
            rows, factors = sums[path]
            if rows.shape[1:] != param.shape or factors.shape != rows.shape[:1]:
                raise FdpError(
                    f"sums[{path!r}]: expected rows of shape (samples, *{tuple(param.shape)}) and a factor for each, "
                    f"got {tuple(rows.shape)} and {tuple(factors.shape)}"
                )
            leaf = Leaf(rows, factors, param, means[path], squares.get(path), copies.get(path), first or 0, decay)
            (taken if first is not None and can_update(leaf) else odd)[path] = leaf
        return taken, odd

    def _children(self, key: Key, paths: Sequence[Path]) -> Int[Tensor, "paths 8"]:
        """Return the keys of all paths, in one launch."""
        which = (*paths, key.device)
        if which not in self._nonces:
            self._nonces[which] = keys.path_nonces(paths, key.device)
        return keys.fold_in_nonces(key, self._nonces[which])


def first_moments(opt_state: Tree, paths: Sequence[Path]) -> Flat:
    """Return Adam's running mean of the gradient, by path."""
    found = next(part for part in opt_state if isinstance(part, AdamState))
    means = tree.flatten(found.mean)
    return {path: means[path] for path in paths}


def _moments(opt_state: Tree, params: Flat, rule: AdamW | Momentum) -> AdamState | TraceState:
    """Return the moments in the optimizer's state that the rule updates."""
    kind = AdamState if isinstance(rule, AdamW) else TraceState
    parts = opt_state if isinstance(opt_state, tuple) else ()
    found = next((part for part in parts if isinstance(part, kind)), None)
    held = () if found is None else found.mean if isinstance(found, AdamState) else found.momentum
    if found is None or tree.paths(held) != tree.paths(params):
        raise FdpError(
            f"opt_state: expected that of {'adam or adamw' if kind is AdamState else 'momentum'} for these parameters, "
            f"by path; call optimizer.init(params)"
        )
    return found


def _first(place: ShardWindow) -> int | None:
    """Return the index of a shard's first element in its leaf if the shard is contiguous there, else None."""
    shape, window = place
    cut = [dim for dim, (_, length) in enumerate(window) if length != shape[dim]]
    if cut and any(length != 1 for _, length in window[: cut[-1]]):
        return None
    first = 0
    for extent, (start, _) in zip(shape, window):
        first = first * extent + start
    return first
