"""Linear head, cross-entropy and their gradients, in chunks of tokens: the full logits are never stored.

    loss_b = 1/T sum_t -log softmax(W h_bt)[target_bt]                        a negative target adds nothing; T stays
    p_bt   = (softmax(W h_bt) - onehot(target_bt)) / T                        the gradient of the logits
    dh_bt  = W^T p_bt          G_b = sum_t p_bt h_bt^T                        (V, D), V the vocabulary

A chunk holds tokens of one sample, or several complete samples. Its logits are replaced in place by their gradient,
used for dh and for the gradient of W, and overwritten by the next chunk's: about ``limit`` bytes of logits exist at a
time. The functions differ in what they return of G_b:

    >>> losses, dh, total = fused_head_plain(h, w, targets, start)            # sum_b start_b G_b
    >>> losses, dh, per_sample = fused_head_stored(h, w, targets)             # every G_b, in h's dtype
    >>> losses, dh, q, e, parts = fused_head_rounded(h, w, targets)           # every G_b in 8 bits, and |G_b|^2 of it
    >>> losses, dh, p = fused_head_pair(h, w, targets)                        # all p_bt: G_b = p_b^T h_b
    >>> losses, dh, squared = fused_head_norms(h, w, targets)                 # |G_b|^2 only, and later
    >>> total = fused_head_weighted(h, w, targets, factors)                   # sum_b factors_b G_b of the same G_b

Matrix products are in h's dtype, accumulated in float32 (float64 for float64); sums over chunks and samples are in
float32 (float64). The functions are pure and not differentiable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from fdp_kernels.cross_entropy import softmax_gradient_
from fdp_kernels.keep_int8 import empty_int8, keep_int8_
from jaxtyping import Float, Int
from torch import Tensor

MAX_LOGIT_BYTES = 1 << 30
"""Bytes of logits at a time: enough for one sample of 8192 tokens and 50257 words."""
_VOCAB_MULTIPLE = 64
"""On a GPU, vocabularies are padded to a multiple of this many words: odd sizes make products several times slower."""


@torch.no_grad()
def fused_head_plain(
    h: Float[Tensor, "batch tokens width"],
    w: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "batch tokens"],
    start: Float[Tensor, " batch"],
    weights: Float[Tensor, "batch tokens"] | None = None,
    *,
    limit: int = MAX_LOGIT_BYTES,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch tokens width"], Float[Tensor, "vocab width"]]:
    """Return losses, and the gradients of ``sum_b start_b loss_b`` with respect to h and, in float32 or better, w.

    With ``weights``, ``loss_b = sum_t weights_bt -log softmax(W h_bt)[target_bt]``; a weight of 0 adds exactly 0.
    """
    losses, dh = _outputs(h)
    vocab, w = len(w), _pad_vocabulary(w)
    total = _wide_like(w)
    targets, share = _shares(targets, weights, losses)
    scale = (start.to(losses.dtype)[:, None] * share).expand(h.shape[:2])
    for chunk, p in _logit_gradients(h, w, targets, scale, losses, limit, vocab):
        _multiply(chunk.of(dh), p, w)
        _multiply_wide(total, p.T, chunk.of(h), add=chunk.sample > 0 or chunk.first > 0)
    return _means(losses, share), dh, total[:vocab]


@torch.no_grad()
def fused_head_stored(
    h: Float[Tensor, "batch tokens width"],
    w: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "batch tokens"],
    weights: Float[Tensor, "batch tokens"] | None = None,
    *,
    limit: int | None = None,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch tokens width"], Float[Tensor, "batch vocab width"]]:
    """Return losses, their gradients with respect to h, and every sample's gradient with respect to w, in h's dtype.

    ``weights`` are those of :func:`fused_head_plain`. By default a chunk has half of ``MAX_LOGIT_BYTES``, or one sample
    if that is more: all activations of the model and these gradients exist at this time.

    Guarantees:
      - a sample's loss and gradients are functions of that sample and w alone.
    """
    losses, dh = _outputs(h)
    (vocab, width), w = w.shape, _pad_vocabulary(w)
    if limit is None:
        limit = min(MAX_LOGIT_BYTES, max(MAX_LOGIT_BYTES // 2, h.shape[1] * len(w) * h.element_size()))
    # The padding rows of a sample's gradient overlap the first rows of the next one's, which is written later.
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
def fused_head_rounded(
    h: Float[Tensor, "batch tokens width"],
    w: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "batch tokens"],
    weights: Float[Tensor, "batch tokens"] | None = None,
    *,
    limit: int = MAX_LOGIT_BYTES // 4,
) -> tuple[
    Float[Tensor, " batch"],
    Float[Tensor, "batch tokens width"],
    Int[Tensor, "batch vocab width"],
    Int[Tensor, "batch vocab blocks"],
    Float[Tensor, "batch parts"],
]:
    """Return losses, their gradients with respect to h, and every sample's gradient with respect to w in 8 bits.

    These are integers, exponents and squared norms in parts, as ``fdp_kernels.keep_int8`` returns them. ``weights`` are
    those of :func:`fused_head_plain`. A chunk has one sample at least.

    Guarantees:
      - a sample's loss and gradients are functions of that sample and w alone.
    """
    losses, dh = _outputs(h)
    vocab, w = len(w), _pad_vocabulary(w)
    limit = max(limit, h.shape[1] * len(w) * h.element_size())
    q, e, parts = empty_int8([h.new_empty(1, 1, vocab)], [h], len(h))
    targets, share = _shares(targets, weights, losses)
    for chunk, p in _logit_gradients(h, w, targets, share, losses, limit, vocab):
        _multiply(chunk.of(dh), p, w)
        few = slice(chunk.sample, chunk.sample + chunk.samples)
        keep_int8_(q[few], e[few], parts[few], p.unflatten(0, (chunk.samples, -1))[..., :vocab], h[few])
    return _means(losses, share), dh, q, e, parts


@torch.no_grad()
def fused_head_pair(
    h: Float[Tensor, "batch tokens width"],
    w: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "batch tokens"],
    weights: Float[Tensor, "batch tokens"] | None = None,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch tokens width"], Float[Tensor, "batch tokens vocab"]]:
    """Return losses, their gradients with respect to h, and the gradient of all logits, in h's dtype.

    The logits are overwritten by their gradient, so one tensor of their size exists; on a GPU its rows are padded to
    the alignment that kernels need. ``weights`` are those of :func:`fused_head_plain`.

    Guarantees:
      - a sample's loss and gradients are functions of that sample and w alone.
    """
    losses, dh = _outputs(h)
    vocab, w = len(w), _pad_vocabulary(w)
    targets, share = _shares(targets, weights, losses)
    p = h.new_empty(*h.shape[:2], len(w))
    _multiply(p.flatten(0, 1), h.flatten(0, 1), w.T)
    each = share.flatten() if isinstance(share, Tensor) else share
    losses.flatten().copy_(softmax_gradient_(p.flatten(0, 1)[:, :vocab], targets.flatten(), each))
    _multiply(dh.flatten(0, 1), p.flatten(0, 1), w)
    return _means(losses, share), dh, p[..., :vocab]


@torch.no_grad()
def fused_head_norms(
    h: Float[Tensor, "batch tokens width"],
    w: Float[Tensor, "vocab width"],
    targets: Int[Tensor, "batch tokens"],
    *,
    limit: int = MAX_LOGIT_BYTES,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch tokens width"], Float[Tensor, " batch"]]:
    """Return losses, their gradients with respect to h, and the squared norm of every sample's gradient of w.

    Guarantees:
      - the norm is that of exactly the numbers that :func:`fused_head_weighted` scales and adds, given the same
        arguments; squares are formed and added in float64;
      - a sample's loss, gradient and norm are functions of that sample and w alone.
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
    limit: int = MAX_LOGIT_BYTES,
) -> Float[Tensor, "vocab width"]:
    """Return ``sum_b factors_b G_b`` in float32 or better, computing each G_b again as :func:`fused_head_norms` does.

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
        """Return the chunk's rows of x; a view if x is contiguous."""
        return x[self.sample : self.sample + self.samples, self.first : self.first + self.tokens].flatten(0, 1)

    def by_sample(self, rows: Float[Tensor, " rows *shape"]) -> Iterator[tuple[int, Float[Tensor, " tokens *shape"]]]:
        """Yield each sample's index and its rows."""
        yield from enumerate(rows.split(self.tokens), start=self.sample)


def limit_tokens(h: Tensor, w: Tensor, limit: int) -> int:
    """Return the number of tokens whose logits fit into ``limit`` bytes; at least one."""
    return max(1, limit // (len(w) * h.element_size()))


def chunks(batch: int, tokens: int, most: int) -> list[Chunk]:
    """Return chunks of at most ``most`` tokens that cover a batch in order, as even as possible."""
    if most >= tokens:
        samples = _even_size(batch, most // tokens)
        return [Chunk(b, min(samples, batch - b), 0, tokens) for b in range(0, batch, samples)]
    size = _even_size(tokens, most)
    return [Chunk(b, 1, t, min(size, tokens - t)) for b in range(batch) for t in range(0, tokens, size)]


def _even_size(total: int, most: int) -> int:
    """Return the size of the fewest equal parts of at most ``most``, a multiple of 128 if that fits."""
    size = -(-total // -(-total // most))
    rounded = -(-size // 128) * 128
    return rounded if rounded <= min(most, total) else size


def _sample_gradients(
    h: Tensor, w: Tensor, targets: Tensor, losses: Tensor, dh: Tensor | None, limit: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield every sample's G_b, in one buffer that the next one overwrites; fill losses and dh on the way."""
    vocab, w = len(w), _pad_vocabulary(w)
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
    """Yield every chunk and the gradient of its logits (rows, len(w)), in a buffer that the next chunk overwrites.

    Fills ``losses`` (batch, tokens). The loss of row (b, t) is weighted by ``scale``, a number or (batch, tokens).
    Words from ``vocab`` on are padding: they are no part of the softmax, and their gradient is 0.
    """
    parts = chunks(h.shape[0], h.shape[1], limit_tokens(h, w, limit))
    scratch = h.new_empty(parts[0].samples * parts[0].tokens, len(w))
    for chunk in parts:
        p = scratch[: chunk.samples * chunk.tokens]
        _multiply(p, chunk.of(h), w.T)
        each = chunk.of(scale) if isinstance(scale, Tensor) else scale
        chunk.of(losses).copy_(softmax_gradient_(p[:, :vocab], chunk.of(targets), each))
        yield chunk, p


def _pad_vocabulary(w: Tensor, *, to: int = _VOCAB_MULTIPLE) -> Tensor:
    """Return ``w``, on a GPU (or a stand-in for one) padded with rows of zeros to a multiple of ``to``."""
    extra = -len(w) % to
    return torch.cat([w, w.new_zeros(extra, w.shape[1])]) if extra and (w.is_cuda or w.is_meta) else w


def _multiply(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write ``out = a b``."""
    torch.mm(a, b, out=out)


def _multiply_wide(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """Write ``out = a b``, or ``out += a b``; out may be wider than a and b, and nothing is rounded to their dtype."""
    if a.is_meta:  # no values to add; what a GPU stores besides out is nothing
        torch.mm(a, b)
    elif a.dtype == out.dtype or not a.is_cuda:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(add), out=out)
    elif torch.compiler.is_compiling():  # Inductor knows out_dtype of mm, not of addmm
        product = torch.mm(a, b, out_dtype=out.dtype)
        out.copy_(out + product if add else product)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _squared_norm(x: Tensor) -> Tensor:
    # vector_norm(dtype=float64) would copy x to float64; this widens element by element as it reads.
    return torch._foreach_norm([x], 2, torch.float64)[0].square()


def _shares(targets: Tensor, weights: Tensor | None, losses: Tensor) -> tuple[Tensor, float | Tensor]:
    """Return targets, with weight 0 marked as ignored, and the weight of each, one number if all are equal."""
    if weights is None:
        return targets, 1 / targets.shape[1]
    return targets.masked_fill(weights == 0, -1), weights.to(losses.dtype)


def _means(losses: Tensor, share: float | Tensor) -> Tensor:
    return (losses * share).sum(1) if isinstance(share, Tensor) else losses.mean(1)


def _losses(h: Tensor) -> Tensor:
    return h.new_empty(h.shape[:2], dtype=torch.promote_types(h.dtype, torch.float32))


def _outputs(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised losses (batch, tokens), in float32 or better, and dh."""
    return _losses(h), torch.empty_like(h, memory_format=torch.contiguous_format)


def _wide_like(w: Tensor) -> Tensor:
    return w.new_empty(w.shape, dtype=torch.promote_types(w.dtype, torch.float32))
