"""Which Fisher information: the same model with another loss at its end, so that one backward gives its gradients.

With ``losses_b = sum_t w_bt l(z_bt, y_bt)`` (``fdp.model.Outputs``) the Fisher information of the mean over samples is

    F = 1/N sum_b sum_t w_bt J_bt^T H_bt J_bt,    H = E_{y ~ model}[dl dl^T] = diag(p) - p p^T,  or I if squared

and it is 1/N sum_b E[g_b g_b^T] of the gradients g_b of a surrogate loss, whose gradient at z_bt is sqrt(w_bt) times

    empirical    dl(z_bt, y_bt)                              the labels of the data: no expectation at all
    sampled      dl(z_bt, y~), y~ drawn by the model         one backward; squared: a standard normal vector
    exact        column c of H_bt^(1/2), and 0 at other t    one backward for every term and class of a sample;
                 sqrt(p_c) (p - e_c); squared: e_c           1/N sum_b sum_{t,c} g_b g_b^T

One position at a time, because gradients of different positions meet in earlier layers: added up before they are
squared, their products would stay (sampled labels are independent, and there they vanish on average).
Martens 2020, arXiv 1412.1193; Kunstner et al. 2019, arXiv 1905.12558, on what the empirical one is not.

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
"""Where a microbatch carries what the surrogate loss is told beside the data."""
GRAIN = 1 << 30
"""Parts of a probability of 1 when labels are drawn; with rounding, those of a million classes still fit in 32 bits."""


class Fisher(Enum):
    """Whose labels: those of the data, drawn from the model, or all of them with their probabilities."""

    EMPIRICAL = "empirical"
    SAMPLED = "sampled"
    EXACT = "exact"


def surrogate(model: Model, fisher: Fisher) -> Model:
    """The same leaves and blocks, the last of which returns the surrogate loss of every sample.

    A model that does not say what its losses are made of has an empirical Fisher information only, each sample's loss
    being one term.
    """
    *blocks, last = model.blocks
    if last.outputs is None:
        if fisher is not Fisher.EMPIRICAL:
            raise _no_outputs(model, fisher)
        return model._replace(blocks=(*blocks, last._replace(head=None)))
    return model._replace(blocks=(*blocks, last._replace(apply=_Loss(last.outputs, fisher), head=None)))


@dataclass(frozen=True)
class _Loss:
    """The surrogate loss. A value, not a closure: equal ones are one kind of block, compiled once."""

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
    """All positions in one dim, one of them if there are none; in float32 or wider."""
    wide = scores if scores.element_size() >= 4 else scores.float()
    return wide.reshape(scores.shape[0], -1, scores.shape[-1])


def term_weights(outputs: Outputs, scores: Float[Tensor, "batch terms classes"], data: Tree) -> Float[Tensor, "..."]:
    """``w_bt``: 1 / terms, or what the model says; (batch, terms)."""
    if outputs.weights is None:
        return scores.new_full(scores.shape[:2], 1 / scores.shape[1])
    return outputs.weights(data).to(scores.dtype).reshape(scores.shape[:2])


def losses_by_terms(outputs: Outputs, params: Tree, carry: Tree, data: Tree) -> Float[Tensor, " batch"]:
    """``sum_t w_bt l(z_bt, y_bt)``: the losses of the block, if its ``outputs`` are right."""
    scores = by_term(outputs.scores(params, carry, data))
    terms = _RULES[outputs.likelihood].term(scores, outputs.targets(data))
    return (term_weights(outputs, scores, data) * terms).sum(1)


def check_outputs(model: Model, params: Tree, data: Tree, *, tolerance: float = 1e-4) -> None:
    """Refuse a model whose losses are not those its ``outputs`` say; ``params`` whole, ``data`` a few samples."""
    last = model.blocks[-1]
    if last.outputs is None:
        raise _no_outputs(model, Fisher.SAMPLED)
    flat = tree.flatten(params)
    carry: Tree = ()
    with torch.no_grad():
        for block in model.blocks[:-1]:
            carry = block.apply(tree.select(flat, block.params), carry, data)
        own = tree.select(flat, last.params)
        losses, said = last.apply(own, carry, data), losses_by_terms(last.outputs, own, carry, data)
    if said.shape != losses.shape:
        got = f"shape {tuple(losses.shape)} and, by outputs, {tuple(said.shape)}"
    elif not (same := torch.isclose(said.to(losses.dtype), losses, rtol=tolerance, atol=tolerance)).all():
        # how many, and not what: they are losses of private samples
        got = f"others for {int((~same).sum())} of the {same.numel()} samples looked at"
    else:
        return
    raise FdpError(
        f"{model.name}: expected losses that are sum_t weights_bt l(scores_bt, targets_bt) of the last block's "
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
    """What each backward's data carries beside the samples: nothing, random numbers, or which term and class.

    ``scores_shape`` is that of a microbatch's scores. Of ``ranks`` shares of a batch this is the ``rank``-th: all
    ranks together draw what one would draw of all their samples.
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
    """The microbatch, with what the surrogate loss is told."""
    if numbers is None:
        return data
    if not isinstance(data, dict) or NUMBERS in data:
        got = f"one with the entry '{NUMBERS}'" if isinstance(data, dict) else type(data).__name__
        raise FdpError(f"data: expected a dict without an entry '{NUMBERS}', where random labels go, got {got}")
    return data | {NUMBERS: numbers}


def draw_labels(scores: Float[Tensor, " *shape classes"], uniform: Float[Tensor, " *shape"]) -> Int[Tensor, " *shape"]:
    """The first y at which the cumulated ``softmax(scores)`` exceeds ``uniform`` of its end.

    Probabilities are counted in whole parts of ``GRAIN``: sums of whole numbers are exact in any order, and so the only
    ones that a GPU cumulates where it must be deterministic. A class of no part is never drawn; of NaN, the first is.
    """
    classes = scores.shape[-1]
    width = math.isqrt(classes - 1) + 1  # first which run of classes, then which of the run: no sum is as long as all
    parts = (scores.detach().softmax(-1) * GRAIN).nan_to_num().round().to(torch.int32)
    runs = F.pad(parts, (0, -classes % width)).unflatten(-1, (-1, width))
    ends = runs.sum(-1, dtype=torch.int32).cumsum(-1, dtype=torch.int32)
    drawn = (uniform.double() * ends[..., -1]).to(torch.int32).minimum(ends[..., -1] - 1).unsqueeze(-1)
    run = (ends <= drawn).sum(-1, keepdim=True)
    before = F.pad(ends, (1, 0)).gather(-1, run)
    own = runs.gather(-2, run.unsqueeze(-1).expand(*run.shape, width)).squeeze(-2)
    place = (before + own.cumsum(-1, dtype=torch.int32) <= drawn).sum(-1)
    return run.squeeze(-1) * width + place


class _Rule(NamedTuple):
    """A likelihood: one term, and those whose gradients are of a drawn label and of a column of the root of H.

    ``scores`` are (batch, terms, classes) and terms (batch, terms). ``draw`` makes the random numbers, one for every
    score or one for all classes of a position.
    """

    term: Callable[[Tensor, Tensor], Tensor]
    sampled: Callable[[Tensor, Tensor], Tensor]
    exact: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[..., Tensor]
    per_class: bool


def _softmax_term(scores: Tensor, targets: Tensor) -> Tensor:
    labels = targets.reshape(scores.shape[:2]).clamp_min(0)  # below 0 is a term of weight 0
    return -scores.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _softmax_sampled(scores: Tensor, uniform: Tensor) -> Tensor:
    return _softmax_term(scores, draw_labels(scores, uniform.reshape(scores.shape[:2])))


def _softmax_exact(scores: Tensor, index: Tensor) -> Tensor:
    """The gradient of ``-sqrt(p_c) log p_c``, the root held constant, is ``sqrt(p_c) (p - e_c)``."""
    logs = _pick(scores.log_softmax(-1), index)
    return -(logs.detach() / 2).exp() * logs


def _squared_term(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores - targets.reshape(scores.shape)).square().sum(-1) / 2


def _squared_sampled(scores: Tensor, normal: Tensor) -> Tensor:
    return (scores * normal.reshape(scores.shape)).sum(-1)


def _pick(values: Tensor, index: Int[Tensor, " batch"]) -> Float[Tensor, "batch terms"]:
    """Each sample's class ``index`` at all its terms."""
    return values.gather(-1, index.view(-1, 1, 1).expand(*values.shape[:2], 1)).squeeze(-1)


_RULES = {
    Likelihood.SOFTMAX: _Rule(_softmax_term, _softmax_sampled, _softmax_exact, keys.uniform, per_class=False),
    Likelihood.SQUARED: _Rule(_squared_term, _squared_sampled, _pick, keys.normal, per_class=True),
}


def _no_outputs(model: Model, fisher: Fisher) -> FdpError:
    return FdpError(
        f"{model.name}: expected a last block that says what its losses are made of, for a Fisher information that is "
        f"{fisher.value}, got outputs=None or scores of a shape that depends on the data; give it fdp.model.Outputs "
        f"(from_loss takes outputs=), or use "
        f"Fisher.EMPIRICAL"
    )
