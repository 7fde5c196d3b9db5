"""The last step of a language model without its logits: linear head, cross-entropy and their gradients in chunks.

    loss_b = 1/T sum_t -log softmax(W h_bt)[target_bt]                        a negative target adds nothing; T stays
    p_bt   = (softmax(W h_bt) - onehot(target_bt)) / T                        the gradient of the logits
    dh_bt  = W^T p_bt          G_b = sum_t p_bt h_bt^T                        (V, D), V the vocabulary

Logits are made for a chunk of tokens, of one sample or of several whole ones, turned into their gradient in place,
used for dh and for the weight's gradient, and overwritten by the next chunk's: about ``limit`` bytes of them exist at a
time. What becomes of G_b is the caller's choice:

    >>> losses, dh, total = fused_head_plain(h, w, targets, start)            # sum_b start_b G_b
    >>> losses, dh, kept = fused_head_kept(h, w, targets)                     # every G_b, in h's dtype
    >>> losses, dh, squared = fused_head_norms(h, w, targets)                 # |G_b|^2 alone; later
    >>> total = fused_head_weighted(h, w, targets, factors)                   # sum_b factors_b G_b, the same G_b again

Matrix products are of h's dtype, accumulated in float32 (float64 for float64); sums over chunks and samples are float32
(float64). Not differentiable. Each is a function of its arguments alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from fdp_kernels.cross_entropy import softmax_gradient_
from jaxtyping import Float, Int
from torch import Tensor

LIMIT = 1 << 30
"""Bytes of logits at a time: a sample of 8192 tokens and 50257 words in one piece."""
_ALIGNED = 64
"""Words to which a vocabulary is padded on a GPU: products of odd sizes took six to eight times as long on an H200."""


@torch.no_grad()
def fused_head_plain(
    h: Float[Tensor, "batch tokens width"],
    w: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "batch tokens"],
    start: Float[Tensor, " batch"],
    weights: Float[Tensor, "batch tokens"] | None = None,
    *,
    limit: int = LIMIT,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch tokens width"], Float[Tensor, "vocab width"]]:
    """Losses, and the gradients of ``sum_b start_b loss_b`` with respect to h and, in float32 or better, w.

    With ``weights``, ``loss_b = sum_t weights_bt -log softmax(W h_bt)[target_bt]``; a weight of 0 adds nothing at all.
    """
    losses, dh = _outputs(h)
    vocab, w = len(w), _padded(w)
    total = _wide_like(w)
    targets, share = _shares(targets, weights, losses)
    scale = (start.to(losses.dtype)[:, None] * share).expand(h.shape[:2])
    for chunk, p in _logit_gradients(h, w, targets, scale, losses, limit, vocab):
        _multiply(chunk.of(dh), p, w)
        _multiply_wide(total, p.T, chunk.of(h), add=chunk.sample > 0 or chunk.first > 0)
    return _means(losses, share), dh, total[:vocab]


@torch.no_grad()
def fused_head_kept(
    h: Float[Tensor, "batch tokens width"],
    w: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "batch tokens"],
    weights: Float[Tensor, "batch tokens"] | None = None,
    *,
    limit: int = LIMIT,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch tokens width"], Float[Tensor, "batch vocab width"]]:
    """Losses, their gradients with respect to h, and every sample's gradient with respect to w, in h's dtype.

    ``weights`` as in :func:`fused_head_plain`.

    Guarantees:
      - a sample's loss and gradients are functions of that sample and w alone, whatever the others hold.
    """
    losses, dh = _outputs(h)
    (vocab, width), w = w.shape, _padded(w)
    # Padding rows of a sample's gradient lie on the first rows of the next one's, which is written after it.
    rows = h.new_empty((len(h) - 1) * vocab + len(w), width)
    wide = None if limit_tokens(h, w, limit) >= h.shape[1] else _wide_like(w)
    targets, share = _shares(targets, weights, losses)
    for chunk, p in _logit_gradients(h, w, targets, share, losses, limit, vocab):
        _multiply(chunk.of(dh), p, w)
        if wide is None:
            for b, p_b in chunk.by_sample(p):
                _multiply(rows[b * vocab :][: len(w)], p_b.T, h[b])
        else:
            _multiply_wide(wide, p.T, chunk.of(h), add=chunk.first > 0)
            if chunk.first + chunk.tokens == h.shape[1]:
                rows[chunk.sample * vocab :][:vocab].copy_(wide[:vocab])
    return _means(losses, share), dh, rows[: len(h) * vocab].view(len(h), vocab, width)


@torch.no_grad()
def fused_head_norms(
    h: Float[Tensor, "batch tokens width"],
    w: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "batch tokens"],
    *,
    limit: int = LIMIT,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch tokens width"], Float[Tensor, " batch"]]:
    """Losses, their gradients with respect to h, and the squared norm of every sample's gradient with respect to w.

    Guarantees:
      - the norm is that of exactly the numbers that :func:`fused_head_weighted` scales and adds, given the same
        arguments; squares are formed and added in float64;
      - a sample's loss, gradient and norm are functions of that sample and w alone, whatever the others hold.
    """
    losses, dh = _outputs(h)
    squared = [_squared_norm(G_b) for _, G_b in _sample_gradients(h, w, targets, losses, dh, limit)]
    return losses.mean(1), dh, torch.stack(squared)


@torch.no_grad()
def fused_head_weighted(
    h: Float[Tensor, "batch tokens width"],
    w: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "batch tokens"],
    factors: Float[Tensor, " batch"],
    *,
    limit: int = LIMIT,
) -> Float[Tensor, "vocab width"]:
    """``sum_b factors_b G_b`` in float32 or better, each G_b made once more as :func:`fused_head_norms` made it.

    Guarantees:
      - a sample whose factor is not above 0 contributes exactly 0, even if its gradient is NaN or infinite;
      - factors are not rounded below float32.
    """
    losses = _losses(h)
    total = _wide_like(w).zero_()
    counts = factors > 0
    factors = torch.where(counts, factors, factors.new_zeros(())).to(losses.dtype)
    for b, G_b in _sample_gradients(h, w, targets, losses, None, limit):
        total.addcmul_(G_b.masked_fill_(~counts[b], 0.0), factors[b])
    return total


class Chunk(NamedTuple):
    """Tokens ``first .. first + tokens - 1`` of samples ``sample .. sample + samples - 1``; all tokens if several."""

    sample: int
    samples: int
    first: int
    tokens: int

    def of(self, x: Float[Tensor, " batch tokens *shape"]) -> Float[Tensor, " rows *shape"]:
        """The chunk's rows of x; a view where x is contiguous."""
        return x[self.sample : self.sample + self.samples, self.first : self.first + self.tokens].flatten(0, 1)

    def by_sample(self, rows: Float[Tensor, " rows *shape"]) -> Iterator[tuple[int, Float[Tensor, " tokens *shape"]]]:
        """Each sample's rows, and which sample it is."""
        yield from enumerate(rows.split(self.tokens), start=self.sample)


def limit_tokens(h: Tensor, w: Tensor, limit: int) -> int:
    """Tokens whose logits fit into ``limit`` bytes; at least one."""
    return max(1, limit // (len(w) * h.element_size()))


def chunks(batch: int, tokens: int, most: int) -> list[Chunk]:
    """Chunks of at most ``most`` tokens that cover a batch in order, as even as they can be."""
    if most >= tokens:
        samples = _even(batch, most // tokens)
        return [Chunk(b, min(samples, batch - b), 0, tokens) for b in range(0, batch, samples)]
    size = _even(tokens, most)
    return [Chunk(b, 1, t, min(size, tokens - t)) for b in range(batch) for t in range(0, tokens, size)]


def _even(total: int, most: int) -> int:
    """The size of the fewest parts of at most ``most``; a multiple of 128 where there is room for it."""
    size = -(-total // -(-total // most))
    rounded = -(-size // 128) * 128
    return rounded if rounded <= min(most, total) else size


def _sample_gradients(
    h: Tensor, w: Tensor, targets: Tensor, losses: Tensor, dh: Tensor | None, limit: int
) -> Iterator[tuple[int, Tensor]]:
    """Every sample's G_b in turn, in one buffer that the next one overwrites; fills losses and dh on the way."""
    vocab, w = len(w), _padded(w)
    G_b = _wide_like(w)
    for chunk, p in _logit_gradients(h, w, targets, 1 / h.shape[1], losses, limit, vocab):
        if dh is not None:
            _multiply(chunk.of(dh), p, w)
        for b, p_b in chunk.by_sample(p):
            _multiply_wide(G_b, p_b.T, h[b, chunk.first : chunk.first + chunk.tokens], add=chunk.first > 0)
            if chunk.first + chunk.tokens == h.shape[1]:
                yield b, G_b[:vocab]


def _logit_gradients(
    h: Tensor, w: Tensor, targets: Tensor, scale: float | Tensor, losses: Tensor, limit: int, vocab: int
) -> Iterator[tuple[Chunk, Tensor]]:
    """Chunk by chunk, the gradient of its logits (rows, len(w)), in a buffer that the next chunk overwrites.

    Fills ``losses`` (batch, tokens). The loss of row (b, t) counts ``scale`` times, a number or (batch, tokens). Logits
    of words from ``vocab`` on, which are padding, are 0 and no part of the softmax; so is their gradient.
    """
    parts = chunks(h.shape[0], h.shape[1], limit_tokens(h, w, limit))
    scratch = h.new_empty(parts[0].samples * parts[0].tokens, len(w))
    for chunk in parts:
        p = scratch[: chunk.samples * chunk.tokens]
        _multiply(p, chunk.of(h), w.T)
        each = chunk.of(scale) if isinstance(scale, Tensor) else scale
        chunk.of(losses).copy_(softmax_gradient_(p[:, :vocab], chunk.of(targets), each))
        yield chunk, p


def _padded(w: Tensor, *, to: int = _ALIGNED) -> Tensor:
    """``w`` with rows of zeros to a multiple of ``to`` on a GPU."""
    extra = -len(w) % to
    return torch.cat([w, w.new_zeros(extra, w.shape[1])]) if extra and w.is_cuda else w


def _multiply(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a b``."""
    torch.mm(a, b, out=out)


def _multiply_wide(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """``out = a b``, or ``out += a b``, where out may be wider than a and b and nothing is rounded to their dtype."""
    if a.dtype == out.dtype or not a.is_cuda:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(add), out=out)
    elif torch.compiler.is_compiling():  # Inductor knows out_dtype of mm, not of addmm
        product = torch.mm(a, b, out_dtype=out.dtype)
        out.copy_(out + product if add else product)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _squared_norm(x: Tensor) -> Tensor:
    # vector_norm(dtype=float64) would make a float64 copy of x; this widens element by element as it reads.
    return torch._foreach_norm([x], 2, torch.float64)[0].square()


def _shares(targets: Tensor, weights: Tensor | None, losses: Tensor) -> tuple[Tensor, float | Tensor]:
    """Targets, those of weight 0 as ones to be ignored, and what each counts: a number if all count the same."""
    if weights is None:
        return targets, 1 / targets.shape[1]
    return targets.masked_fill(weights == 0, -1), weights.to(losses.dtype)


def _means(losses: Tensor, share: float | Tensor) -> Tensor:
    return (losses * share).sum(1) if isinstance(share, Tensor) else losses.mean(1)


def _losses(h: Tensor) -> Tensor:
    return h.new_empty(h.shape[:2], dtype=torch.promote_types(h.dtype, torch.float32))


def _outputs(h: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (batch, tokens) in float32 or better, and dh; both are yet to be written."""
    return _losses(h), torch.empty_like(h, memory_format=torch.contiguous_format)


def _wide_like(w: Tensor) -> Tensor:
    return w.new_empty(w.shape, dtype=torch.promote_types(w.dtype, torch.float32))
