"""The Fisher information as gradients of a surrogate loss: the same model with another loss in its last block.

With ``losses_b = sum_t w_bt l(z_bt, y_bt)`` (``fdp.model.Outputs``) the Fisher information of the mean over samples is

    F = 1/N sum_b sum_t w_bt J_bt^T H_bt J_bt,    H = E_{y ~ model}[dl dl^T] = diag(p) - p p^T,  or I if squared

It equals 1/N sum_b E[g_b g_b^T] for the gradients g_b of a surrogate loss whose gradient at z_bt is sqrt(w_bt) times

    empirical    dl(z_bt, y_bt)                              the labels of the data: no expectation
    sampled      dl(z_bt, y~), y~ drawn by the model         one backward; squared: a standard normal vector
    exact        column c of H_bt^(1/2), and 0 at other t    one backward for every term and class of a sample;
                 sqrt(p_c) (p - e_c); squared: e_c           1/N sum_b sum_{t,c} g_b g_b^T

The exact one takes a backward per position because gradients of different positions meet in earlier layers: if they
were added before they are squared, their cross products would remain. (Those of sampled labels, which are independent,
vanish on average.) Martens 2020, arXiv 1412.1193; on the limits of the empirical one, Kunstner et al. 2019, arXiv
1905.12558.

    >>> stand_in = surrogate(model, Fisher.SAMPLED)
    >>> for numbers in passes(model, Fisher.SAMPLED, scores_shape, key=key, ...):
    ...     losses = stand_in.loss(params, with_numbers(data, numbers))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fdp import keys, tree
from fdp.model import Likelihood, Model, Outputs
from fdp.types import FdpError, Key, Tree

NUMBERS = "fisher"
"""The entry of a microbatch that holds the random or index numbers of the surrogate loss."""
PROBABILITY_PARTS = 1 << 30
"""Integer parts of a probability of 1 when labels are drawn; sums over a million classes still fit in 32 bits."""


class Fisher(Enum):
    """The labels of the Fisher information: those of the data, drawn from the model, or all, by their probability."""

    EMPIRICAL = "empirical"
    SAMPLED = "sampled"
    EXACT = "exact"


def surrogate(model: Model, fisher: Fisher) -> Model:
    """Return the same model, except that its last block returns the surrogate loss of every sample.

    A model without ``outputs`` has an empirical Fisher information only, with each sample's loss as one term.
    """
    *blocks, last = model.blocks
    if last.outputs is None:
        if fisher is not Fisher.EMPIRICAL:
            raise _no_outputs(model, fisher)
        return model._replace(blocks=(*blocks, last._replace(head=None)))
    return model._replace(blocks=(*blocks, last._replace(apply=_Loss(last.outputs, fisher), head=None)))


@dataclass(frozen=True)
class _Loss:
    """The surrogate loss; a value rather than a closure, so that equal ones are compiled once."""

    outputs: Outputs
    fisher: Fisher

    def __call__(self, params: Tree, carry: Tree, data: Tree) -> Float[Tensor, " batch"]:
        scores = by_term(self.outputs.scores(params, carry, data))
        root = term_weights(self.outputs, scores, data).sqrt()
        rule = _RULES[self.outputs.likelihood]
        if self.fisher is Fisher.EMPIRICAL:
            return (root * rule.term(scores, self.outputs.targets(data))).sum(1)
        if self.fisher is Fisher.SAMPLED:
            return (root * rule.sampled(scores, data[NUMBERS])).sum(1)
        term, label = data[NUMBERS] // scores.shape[-1], data[NUMBERS] % scores.shape[-1]
        here = torch.arange(scores.shape[1], device=scores.device) == term.unsqueeze(1)
        return (root * here * rule.exact(scores, label)).sum(1)


def by_term(scores: Float[Tensor, " batch *positions classes"]) -> Float[Tensor, "batch terms classes"]:
    """Flatten all positions into one dim (of length 1 if there are none), in float32 or wider."""
    wide = scores if scores.element_size() >= 4 else scores.float()
    return wide.reshape(scores.shape[0], -1, scores.shape[-1])


def term_weights(outputs: Outputs, scores: Float[Tensor, "batch terms classes"], data: Tree) -> Float[Tensor, "..."]:
    """Return ``w_bt`` (batch, terms): the model's weights, or 1 / terms."""
    if outputs.weights is None:
        return scores.new_full(scores.shape[:2], 1 / scores.shape[1])
    return outputs.weights(data).to(scores.dtype).reshape(scores.shape[:2])


def losses_by_terms(outputs: Outputs, params: Tree, carry: Tree, data: Tree) -> Float[Tensor, " batch"]:
    """Return ``sum_t w_bt l(z_bt, y_bt)``, which equals the losses of the block if its ``outputs`` are right."""
    scores = by_term(outputs.scores(params, carry, data))
    terms = _RULES[outputs.likelihood].term(scores, outputs.targets(data))
    return (term_weights(outputs, scores, data) * terms).sum(1)


def check_outputs(model: Model, params: Tree, data: Tree, *, tolerance: float = 1e-4) -> None:
    """Raise an FdpError if losses differ from those of the model's ``outputs``; ``params`` are full, ``data`` small."""
    last = model.blocks[-1]
    if last.outputs is None:
        raise _no_outputs(model, Fisher.SAMPLED)
    flat = tree.flatten(params)
    carry: Tree = ()
    with torch.no_grad():
        for block in model.blocks[:-1]:
            carry = block.apply(tree.select(flat, block.params), carry, data)
        own = tree.select(flat, last.params)
        losses, by_outputs = last.apply(own, carry, data), losses_by_terms(last.outputs, own, carry, data)
    if by_outputs.shape != losses.shape:
        got = f"shape {tuple(losses.shape)} and, by outputs, {tuple(by_outputs.shape)}"
    elif not (same := torch.isclose(by_outputs.to(losses.dtype), losses, rtol=tolerance, atol=tolerance)).all():
        # Only their number is shown: they are losses of private samples.
        got = f"different losses for {int((~same).sum())} of {same.numel()} samples"
    else:
        return
    raise FdpError(
        f"{model.name}: expected losses equal to sum_t weights_bt l(scores_bt, targets_bt) of the last block's "
        f"outputs, got {got}; set Outputs.weights (twice a mean for |z - y|^2 without the half) or the likelihood"
    )


def passes(
    model: Model,
    fisher: Fisher,
    scores_shape: tuple[int, ...] | None,
    *,
    key: Key,
    rank: int,
    ranks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Tensor | None]:
    """Yield the numbers that each backward's data needs: None, random numbers, or the index of a term and class.

    ``scores_shape`` is the shape of a microbatch's scores. All ranks together draw the same numbers as one rank that
    holds all their samples.
    """
    if fisher is Fisher.EMPIRICAL:
        yield None
        return
    outputs = model.blocks[-1].outputs
    if outputs is None or scores_shape is None:
        raise _no_outputs(model, fisher)
    batch, *rest = scores_shape
    if fisher is Fisher.EXACT:
        for index in range(math.prod(rest)):
            yield torch.full((batch,), index, dtype=torch.int64, device=device)
        return
    rule = _RULES[outputs.likelihood]
    shape = rest if rule.per_class else rest[:-1]
    wide = torch.promote_types(dtype, torch.float32)
    window = ((rank * batch, batch), *((0, length) for length in shape))
    yield rule.draw(key.to(device), (ranks * batch, *shape), dtype=wide, window=window)


def with_numbers(data: Tree, numbers: Tensor | None) -> Tree:
    """Return the microbatch with the numbers of the surrogate loss added to it."""
    if numbers is None:
        return data
    if not isinstance(data, dict) or NUMBERS in data:
        got = f"one with the entry '{NUMBERS}'" if isinstance(data, dict) else type(data).__name__
        raise FdpError(f"data: expected a dict without the entry '{NUMBERS}', which is for random labels, got {got}")
    return data | {NUMBERS: numbers}


def draw_labels(scores: Float[Tensor, " *shape classes"], uniform: Float[Tensor, " *shape"]) -> Int[Tensor, " *shape"]:
    """Return the first y at which the cumulative ``softmax(scores)`` exceeds ``uniform`` times its total.

    Probabilities are rounded to integer multiples of ``1 / PROBABILITY_PARTS``: integer sums are exact in any order,
    and so the only cumulative sums that a GPU computes deterministically. A class of 0 parts is never drawn; NaN scores
    give class 0.
    """
    classes = scores.shape[-1]
    width = (
        math.isqrt(classes - 1) + 1
    )  # draw a run of classes, then a class of the run, so that no sum is over all classes
    parts = (scores.detach().softmax(-1) * PROBABILITY_PARTS).nan_to_num().round().to(torch.int32)
    runs = F.pad(parts, (0, -classes % width)).unflatten(-1, (-1, width))
    ends = runs.sum(-1, dtype=torch.int32).cumsum(-1, dtype=torch.int32)
    drawn = (uniform.double() * ends[..., -1]).to(torch.int32).minimum(ends[..., -1] - 1).unsqueeze(-1)
    run = (ends <= drawn).sum(-1, keepdim=True)
    before = F.pad(ends, (1, 0)).gather(-1, run)
    own = runs.gather(-2, run.unsqueeze(-1).expand(*run.shape, width)).squeeze(-2)
    index = (before + own.cumsum(-1, dtype=torch.int32) <= drawn).sum(-1)
    return run.squeeze(-1) * width + index


class _Rule(NamedTuple):
    """A likelihood: its term, and the terms whose gradients are those of a drawn label and of a column of H^(1/2).

    Scores are (batch, terms, classes), terms are (batch, terms). ``draw`` generates the random numbers, one per score
    if ``per_class``, else one per position.
    """

    term: Callable[[Tensor, Tensor], Tensor]
    sampled: Callable[[Tensor, Tensor], Tensor]
    exact: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[..., Tensor]
    per_class: bool


def _softmax_term(scores: Tensor, targets: Tensor) -> Tensor:
    labels = targets.reshape(scores.shape[:2]).clamp_min(0)  # labels below 0 have weight 0
    return -scores.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _softmax_sampled(scores: Tensor, uniform: Tensor) -> Tensor:
    return _softmax_term(scores, draw_labels(scores, uniform.reshape(scores.shape[:2])))


def _softmax_exact(scores: Tensor, index: Tensor) -> Tensor:
    """Return ``-sqrt(p_c) log p_c``, whose gradient with the root held constant is ``sqrt(p_c) (p - e_c)``."""
    logs = _pick(scores.log_softmax(-1), index)
    return -(logs.detach() / 2).exp() * logs


def _squared_term(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores - targets.reshape(scores.shape)).square().sum(-1) / 2


def _squared_sampled(scores: Tensor, normal: Tensor) -> Tensor:
    return (scores * normal.reshape(scores.shape)).sum(-1)


def _pick(values: Tensor, index: Int[Tensor, " batch"]) -> Float[Tensor, "batch terms"]:
    """Return the value of class ``index`` at all terms of each sample."""
    return values.gather(-1, index.view(-1, 1, 1).expand(*values.shape[:2], 1)).squeeze(-1)


_RULES = {
    Likelihood.SOFTMAX: _Rule(_softmax_term, _softmax_sampled, _softmax_exact, keys.uniform, per_class=False),
    Likelihood.SQUARED: _Rule(_squared_term, _squared_sampled, _pick, keys.normal, per_class=True),
}


def _no_outputs(model: Model, fisher: Fisher) -> FdpError:
    return FdpError(
        f"{model.name}: expected a last block with outputs, which the {fisher.value} Fisher information needs, got "
        f"outputs=None or scores whose shape depends on the data; give it fdp.model.Outputs (from_loss takes "
        f"outputs=), or use Fisher.EMPIRICAL"
    )
