"""Check a mode before it is timed: it must compute what eager ``materialize`` computes.

    slice      |got - expected| <= SLACK |expected| for losses and norms, UPDATE_SLACK for the update of three steps,
               LEAF_SLACK for the update of a single leaf
    full size  -SLACK <= got / expected - 1 <= SLACK for the norms of the first two steps. Norms from Gram matrices are
               overstated by design: up to OVERSTATED rounding_cover(T), and the row says by how much

A slice has two layers and few tokens, the same widths and dtype, and is compiled and captured in the same way. At full
size the reference is the row of ``materialize`` or, if it was not run, of ``auto``.

    >>> errors = Checker(device).check(case, "auto")     # raises WrongError if one is too large
    >>> above = check_norms(seen, expected, tokens=2048, by_gram=False)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.device import free
from benchmarks.modes import CHECKED_SAMPLES, EAGER, OURS, STORED_DTYPES, WEIGHT_DECAY, Case, Speed, feed, our_mode
from fdp import keys, tree
from fdp.optimizers import Optimizer, adamw
from fdp.types import Flat

SLACK = 2e-2
"""Allowed relative error of losses and norms; bfloat16 takes up to half of it."""
UPDATE_SLACK = 3e-2
"""Allowed relative error of the update. A plain bfloat16 backward of two layers of width 768 takes two thirds of it."""
LEAF_SLACK = 0.1
"""Allowed relative error of the update of a single leaf."""
OVERSTATED = 4.0
"""Norms from Gram matrices may exceed the reference by this many times ``rounding_cover``, which assumes independent
tokens. A model's tokens cancel more, which leaves less beside the cover."""
CHECKED_STEPS = 3


class WrongError(Exception):
    """A mode does not compute what the reference computes."""


class Reference(NamedTuple):
    """A few eager steps of the slice by ``materialize``, and their settings. Tensors are on the CPU."""

    losses: Tensor
    norms: Tensor
    updates: Flat
    optimizer: Optimizer
    max_norm: float
    noise_multiplier: float


class Checker:
    """A comparison of a mode's first three steps on the slice with ``materialize``, once per slice and mode.

    It takes three steps because a step is captured in the second and replayed from then on. The clipping bound is the
    median norm, so that some samples are clipped and some are not. Noise and Adam's ``eps`` are as large as the
    gradient, so that a mistake in the norms, the sum, the noise or the update shows in the parameters.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.references: dict[Any, Reference] = {}
        self.errors: dict[Any, dict[str, float]] = {}

    def check(self, case: Case, mode: str) -> dict[str, float]:
        """Return the relative differences; raise ``WrongError`` if one is too large."""
        at = (case.slice, case.dtype, mode)
        if at not in self.errors:
            try:
                self.errors[at] = self._differences(case, mode)
            finally:
                free(self.device)
        slack = {"update": UPDATE_SLACK}
        allowed = {what: LEAF_SLACK if " of " in what else slack.get(what, SLACK) for what in self.errors[at]}
        bad = [f"{what} off by {error:.1e}" for what, error in self.errors[at].items() if not error <= allowed[what]]
        if bad:
            raise WrongError(f"on the slice, against materialize: {', '.join(bad[:4])}")
        return self.errors[at]

    def _differences(self, case: Case, mode: str) -> dict[str, float]:
        reference = self._reference(case, private=mode != "none", stored_dtype=STORED_DTYPES.get(mode))
        if mode in OURS:
            count = case.microbatches_of(mode) if case.samples is None else 2
            losses, norms, updates = self._steps(case, mode, reference, case.speed, microbatches=count)
        else:
            assert case.baseline is not None
            tokens, step_keys = self._batches(case)
            params = case.small.init(keys.key(0).to(self.device))
            candidate = case.baseline(mode, case.small, tokens.shape[1], self.device, params)
            for i in (1, 0):  # the learning rate is 0; the second pass shows that a captured step reads the new tokens
                losses, updates = candidate.step(tokens[i], step_keys[i]).float().mean().cpu(), None
            norms = None if candidate.norms is None else candidate.norms().float().cpu()
            samples = tokens.shape[1]
            reference = reference._replace(losses=reference.losses[:samples].mean(), norms=reference.norms[:samples])
        found = {"losses": worst(losses, reference.losses)}
        if norms is not None:
            found["norms"] = worst(norms, reference.norms)
        if updates is not None:
            expected = {path: reference.updates[path].to(self.device) for path in updates}
            far = {path: (leaf - expected[path]).double().norm() for path, leaf in updates.items()}
            size = {path: leaf.double().norm() for path, leaf in expected.items()}
            found["update"] = float(total(far.values()) / total(size.values()))
            leaves = {path: float(far[path] / size[path]) for path in far}
            path = max(leaves, key=lambda path: math.inf if math.isnan(leaves[path]) else leaves[path])
            found[f"update of {path}"] = leaves[path]
        return found

    def _reference(self, case: Case, *, private: bool, stored_dtype: torch.dtype | None) -> Reference:
        """Return steps of ``materialize`` with the noise of a mode that may store gradients in ``stored_dtype``."""
        at = (case.slice, case.dtype, private, stored_dtype)
        if at not in self.references:
            size = sum(math.prod(case.small.leaves[path].shape) for path in case.small.trainable)
            nothing = torch.empty(0)
            draft = Reference(nothing, nothing, {}, adamw(0.0, weight_decay=0.0), 1e6, 0.0)
            _, norms, _ = self._steps(case, "materialize", draft, EAGER)
            assert norms is not None
            median = float(norms.median())
            settings = draft._replace(
                optimizer=adamw(1e-3, eps=median / math.sqrt(size), weight_decay=WEIGHT_DECAY),
                max_norm=median if private else 1e6,
                noise_multiplier=1 / math.sqrt(size) if private else 0.0,
            )
            losses, norms, updates = self._steps(case, "materialize", settings, EAGER, stored_dtype=stored_dtype)
            assert norms is not None
            updates = {path: leaf.cpu() for path, leaf in updates.items()}
            self.references[at] = settings._replace(losses=losses, norms=norms, updates=updates)
        return self.references[at]

    def _batches(self, case: Case) -> tuple[Tensor, Tensor]:
        return feed(case.small, min(case.batch_size, CHECKED_SAMPLES), self.device, batches=CHECKED_STEPS)

    def _steps(
        self,
        case: Case,
        mode: str,
        reference: Reference,
        speed: Speed,
        *,
        microbatches: int = 1,
        stored_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None, Flat]:
        """Return losses and norms of all steps, and the total update of the parameters."""
        start = tree.flatten(case.small.init(keys.key(0).to(self.device)))
        tokens, step_keys = self._batches(case)
        candidate = our_mode(
            case.small,
            mode,
            batch_size=tokens.shape[1],
            device=self.device,
            dtype=case.dtype,
            optimizer=reference.optimizer,
            max_norm=reference.max_norm,
            noise_multiplier=reference.noise_multiplier,
            microbatches=microbatches,
            stored_dtype=stored_dtype,
            speed=speed,
        )
        assert candidate.params is not None
        look, losses, norms = candidate.norms, [], []
        for batch, key in zip(tokens, step_keys):
            losses.append(candidate.step(batch, key).float().cpu())
            if look is not None:
                norms.append(look().float().cpu())
        trained = {path: leaf for path, leaf in candidate.params().items() if path in case.small.trainable}
        updates = {path: leaf - start[path] for path, leaf in trained.items()}
        return torch.cat(losses), torch.cat(norms) if norms else None, updates


def worst(got: Tensor, expected: Tensor) -> float:
    """Return the largest relative difference; infinity if one is not finite."""
    difference = ((got.double() - expected.double()).abs() / expected.double().abs()).max()
    return float(difference) if bool(difference.isfinite()) else math.inf


def total(norms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(norms)).norm()


def rounding_cover(tokens: int) -> float:
    """Return by how much a half-precision norm from Gram matrices is overstated, for independent tokens.

    The largest possible rounding error is added (``fdp_kernels.ghost``). With u = 2^-23: 5/4 u T sum_t |g_t| |x_t| to
    the norm, which is about sqrt(T) |g| |x|, because the sum has T products; 5/4 u K |g_t| |g_s| |x_t . x_s| for every
    t, s to its square, and the same with g and x exchanged, K = 1024 features at a time. The total is
    5/4 u T (sqrt(T) + sqrt(2 K / pi)).
    """
    return 1.25 * 2.0**-23 * tokens * (math.sqrt(tokens) + math.sqrt(1024 * 2 / math.pi))


def check_norms(seen: Tensor, expected: Tensor, *, tokens: int, by_gram: bool) -> float:
    """Return by how much the norms exceed the reference, at most.

    Raise ``WrongError`` if a norm is below the reference by more than SLACK, or above it by more than SLACK. Norms from
    Gram matrices may be above by their rounding cover: they are private, but clip more.
    """
    off = (seen - expected) / expected
    most = max(SLACK, OVERSTATED * rounding_cover(tokens)) if by_gram else SLACK
    if not bool(((off >= -SLACK) & (off <= most)).all()):
        raise WrongError(
            f"at full size, against the reference: norms off by {float(off.min()):.1e} to {float(off.max()):.1e}, "
            f"expected {-SLACK:.1e} to {most:.1e}"
        )
    return float(off.max())
