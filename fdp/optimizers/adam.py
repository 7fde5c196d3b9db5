"""Adam, AdamW, and Adam with the privacy noise removed from its second moment.

    m_t = b1 m_{t-1} + (1 - b1) g_t            m^ = m_t / (1 - b1^t)
    v_t = b2 v_{t-1} + (1 - b2) g_t^2          v^ = v_t / (1 - b2^t)
    u_t = m^ / (sqrt(max(v^ - noise_std^2, eps_root^2)) + eps)

Kingma & Ba, arXiv 1412.6980; decoupled weight decay: Loshchilov & Hutter, arXiv 1711.05101. Noise of
standard deviation ``noise_std = noise_multiplier max_norm / expected_batch_size`` per coordinate of the mean
gradient adds ``noise_std^2`` to v^; where it dominates, Adam is SGD with a smaller step. Subtracting it
(DP-AdamBC: Tang, Shpilevskiy, Lécuyer, arXiv 2312.14334, there with ``eps = 0`` and ``gamma' = eps_root^2``)
makes v^ unbiased for the square of the gradient without noise. This is post-processing of the noisy gradient:
the privacy is the same.

    >>> optimizer = adamw(3e-4, weight_decay=0.1)
    >>> private = adamw(3e-4, noise_std=1.0 * 1.0 / 4096, eps_root=1e-5)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.optimizers import checks
from fdp.optimizers.base import AdamW, Optimizer, cast, chain, once, pointwise, zero_step
from fdp.optimizers.foreach import each, in_groups
from fdp.optimizers.schedules import Schedule
from fdp.optimizers.transforms import add_decayed_weights, scale_by_learning_rate
from fdp.types import FdpError, Tree


class AdamState(NamedTuple):
    """The number of updates so far, and the running means of the gradient and of its square."""

    step: Int[Tensor, ""]
    mean: Tree
    square: Tree


def scale_by_adam(
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    noise_std: float | None = None,
    eps_root: float = 0.0,
) -> Optimizer:
    """``u_t`` of this module's equation; Adam's direction without ``noise_std`` and ``eps_root``."""
    checks.decay_rate("b1", b1)
    checks.decay_rate("b2", b2)
    checks.nonnegative("eps", eps)
    checks.nonnegative("eps_root", eps_root)
    if noise_std is not None:
        checks.nonnegative("noise_std", noise_std)
        if eps_root == 0:
            raise FdpError(
                "eps_root: expected a number > 0 with noise_std, got 0; where noise exceeds signal the "
                "corrected second moment is at or below 0, and eps_root is the floor of its root"
            )

    def init(params: Tree) -> AdamState:
        return AdamState(zero_step(params), tree.map(torch.zeros_like, params), tree.map(torch.zeros_like, params))

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        step = state.step + 1
        mean_factor, square_factor = unbias(b1, step), unbias(b2, step)

        def move(m: list[Tensor], v: list[Tensor], g: list[Tensor]) -> tuple[list[Tensor], ...]:
            m, v = each("lerp", m, g, 1 - b1), each("lerp", v, each("mul", g, g), 1 - b2)
            moments = [second_moment(one, factor=square_factor, noise_std=noise_std, eps_root=eps_root) for one in v]
            u = each("div_", each("mul", m, mean_factor), each("add_", each("sqrt_", moments), eps))
            return [cast(one, mean.dtype) for one, mean in zip(u, m)], m, v

        updates, mean, square = in_groups(move, state.mean, state.square, grads)
        return updates, AdamState(step, mean, square)

    return pointwise(init, update)


def second_moment(
    square: Float[Tensor, " *shape"], *, factor: Float[Tensor, ""], noise_std: float | None, eps_root: float
) -> Float[Tensor, " *shape"]:
    """Return ``max(factor square - noise_std^2, eps_root^2)`` as a new tensor.

    Guarantees:
      - for gradients ``s + noise_std N(0, 1)`` its expectation is ``s^2`` if the floor is not reached.
    """
    moment = square * factor
    if noise_std:
        moment.sub_(noise_std**2)
    return moment.clamp_(min=eps_root**2) if eps_root else moment


def adam(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    noise_std: float | None = None,
    eps_root: float = 0.0,
) -> Optimizer:
    """Return Adam without weight decay; for L2 regularisation use ``chain(add_decayed_weights(wd), adam(lr))``."""
    direction = scale_by_adam(b1=b1, b2=b2, eps=eps, noise_std=noise_std, eps_root=eps_root)
    whole = chain(direction, scale_by_learning_rate(learning_rate))
    return whole._replace(adamw=AdamW(learning_rate, b1, b2, eps, 0.0, None, noise_std, eps_root, whole.update))


def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Schedule = 0.01,
    mask: Callable[[Tree], Tree] | None = None,
    noise_std: float | None = None,
    eps_root: float = 0.0,
) -> Optimizer:
    """Return Adam with decoupled weight decay of the masked leaves: ``p <- p - lr (u_t + weight_decay p)``."""
    direction = scale_by_adam(b1=b1, b2=b2, eps=eps, noise_std=noise_std, eps_root=eps_root)
    decay = add_decayed_weights(weight_decay, mask=mask)
    whole = chain(direction, decay, scale_by_learning_rate(learning_rate))
    if callable(weight_decay):
        return whole
    known = AdamW(learning_rate, b1, b2, eps, weight_decay, mask, noise_std, eps_root, whole.update)
    return whole._replace(adamw=known)


def unbias(decay: float, step: Int[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the bias correction ``1 / (1 - decay^t)`` of a running mean that starts at zero."""
    return once(-1 / torch.expm1(step.double() * (math.log(decay) if decay else -math.inf)))
