"""Kernels that ``benchmarks.kernels`` measures: inputs, check, comparison and cost of each.

    flops of a weight gradient  2 B T d p        of a ghost norm  B T (T + 1) (d + p)        of a block  sum_matrices

Add a kernel with an :class:`Entry` in ``ENTRIES``; add one that takes several matrices with :func:`foreach_entry`.

    >>> entry = next(entry for entry in ENTRIES if entry.name == "foreach_direct")
    >>> inputs = entry.inputs(BLOCKS[0], False)                 # a list of g and a list of x
    >>> entry.check(inputs, entry.kernel(*inputs))
    True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fdp_kernels import cross_entropy, embedding, token_sums
from fdp_kernels.direct import launch_direct, launch_foreach_direct
from fdp_kernels.ghost import launch_foreach_ghost, launch_ghost
from fdp_kernels.keep import keep_by_matmul, launch_foreach_keep, launch_keep, squared_norms, weighted_sum
from fdp_kernels.tile_gemm import Tile
from fdp_kernels.weighted import launch_foreach_weighted, launch_weighted
from torch import Tensor

from benchmarks.kernel_checks import (
    VOCABULARY,
    Block,
    Shape,
    check_direct,
    check_embedding_norms,
    check_embedding_sum,
    check_ghost,
    check_keep,
    check_softmax_gradient,
    check_stored_norms,
    check_stored_sum,
    check_token_sums,
    check_update,
    check_weighted,
    factors,
    logits_and_targets,
    make_update,
    pair,
    pair_and_factors,
    random_ids,
    run_fused_adamw,
    run_update,
    stored_gradients,
)

WIDTHS = [(1280, 3840), (1280, 1280), (1280, 5120), (5120, 1280), (1280, VOCABULARY)]
SHAPES = [Shape(4, tokens, *widths) for tokens, widths in product((512, 1024, 2048, 4096, 8192), WIDTHS)]
SHAPES += [Shape(32, 512, *widths) for widths in WIDTHS]
QUICK = [Shape(4, 512, 1280, 5120), Shape(4, 1024, 1280, 1280), Shape(4, 2048, 1280, 3840)]
BLOCKS = [Block(*size, tuple(WIDTHS[:4])) for size in ((4, 512), (4, 1024), (4, 2048), (32, 512))]
RAGGED = Shape(3, 1000, 1280, 776)
RAGGED_BLOCK = Block(3, 1000, ((1280, 776), (776, 1280), (136, 72), (1280, 776)))

DEEP = [Tile(128, 256, 64, 8, stages) for stages in (3, 4)] + [Tile(256, 128, 64, 8, 4), Tile(128, 128, 128, 8, 3)]
FLAT = [Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 8, 4), Tile(64, 256, 64, 4, 3), Tile(64, 128, 64, 4, 3)]
LITTLE = [Tile(64, 64, 64, 4, 4)]
PERSISTENT = [tile._replace(per_sm=1) for tile in DEEP[:3]] + [tile._replace(per_sm=2) for tile in FLAT[::2]]
GROUPS = [tile._replace(group=group) for tile, group in product((DEEP[1], FLAT[0]), (4, 16))]


class Entry(NamedTuple):
    """A kernel with its ``inputs(shape, cancelling)``, check, cost, and what it is compared with.

    ``check(inputs, outputs)`` gets both after the run. ``tiles`` are tried by --tune as ``kernel(..., tile=)``, after
    they passed the check on ``ragged``. If ``ragged`` is a block, all problems of the kernel are blocks.
    """

    name: str
    inputs: Callable[[Any, bool], tuple]
    kernel: Callable[..., Any]
    check: Callable[[tuple, Any], bool]
    cost: Callable[[Any], tuple[float, float]]
    plain: Callable[..., Any] | None = None
    library: Callable[..., Any] | None = None
    tiles: tuple[Tile, ...] = ()
    wants: Callable[[Any], bool] = lambda problem: True
    ragged: Shape | Block = RAGGED


def problems(entry: Entry, *, quick: bool) -> list[Shape | Block]:
    """Return the problems that the entry is measured on."""
    of_matrices = QUICK if quick else SHAPES
    return [each for each in (BLOCKS if isinstance(entry.ragged, Block) else of_matrices) if entry.wants(each)]


def weight_gradient(shape: Shape) -> tuple[float, float]:
    return 2.0 * math.prod(shape), 0.0


def bytes_moved(inputs: Callable[[Shape], float]) -> Callable[[Shape], tuple[float, float]]:
    """Return the cost of a kernel that is bound by the bytes it reads and writes."""
    return lambda shape: (0.0, inputs(shape))


def square(shape: Shape) -> bool:
    return (shape.d, shape.p) == (1280, 1280)


def foreach_entry(
    name: str, one: Entry, kernel: Callable[..., Any], each: Callable[[Any], Sequence[Any]] = list
) -> Entry:
    """Return an entry for all matrices of a block at once; ``one`` is the entry of a single matrix.

    The kernel takes a list for every operand; ``each`` splits its result by matrix. Every matrix is twice as large as
    the one before, so the check notices if two of equal widths are exchanged.
    """

    def inputs(block: Block, cancelling: bool) -> tuple[list[Tensor], ...]:
        operands = [one.inputs(shape, cancelling) for shape in block.matrices]
        return tuple(map(list, zip(*((g.mul_(2**i), *others) for i, (g, *others) in enumerate(operands)), strict=True)))

    def check(inputs: tuple, found: Any) -> bool:
        return all(one.check(own, outcome) for own, outcome in zip(zip(*inputs), each(found), strict=True))

    def one_by_one(run: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return run and (lambda *lists: [run(*own) for own in zip(*lists)])

    def cost(block: Block) -> tuple[float, float]:
        flops, moved = zip(*map(one.cost, block.matrices))
        return sum(flops), sum(moved)

    return Entry(
        name,
        inputs,
        kernel,
        check,
        cost,
        one_by_one(one.plain),
        one_by_one(one.library),
        one.tiles,
        ragged=RAGGED_BLOCK,
    )


def gradients_and_parts(found: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return (gradient, parts) of each matrix, from the gradients of all followed by the parts of all."""
    half = len(found) // 2
    return list(zip(found[:half], found[half:], strict=True))


SINGLE = [
    Entry(
        "direct", pair, launch_direct, check_direct, weight_gradient,
        plain=lambda g, x: torch.bmm(g.mT, x).float().square().sum((1, 2)),
        library=lambda g, x: torch.bmm(g.mT, x),
        tiles=(*DEEP, *FLAT, *LITTLE, *PERSISTENT, *GROUPS),
    ),
    Entry(
        "ghost", pair, launch_ghost, check_ghost,
        lambda s: (1.0 * s.batch * s.tokens * (s.tokens + 1) * (s.d + s.p), 0.0),
        plain=lambda g, x: (torch.bmm(g, g.mT).float() * torch.bmm(x, x.mT).float()).sum((1, 2)),
        library=lambda g, x: (torch.bmm(g, g.mT), torch.bmm(x, x.mT)),
        tiles=(
            FLAT[1]._replace(stages=5),
            Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 3), Tile(128, 128, 128, 8, 3), Tile(64, 64, 64, 4, 4),
            Tile(64, 64, 128, 4, 3),
        ),
    ),
    Entry(
        "keep", pair, launch_keep, check_keep, weight_gradient,
        library=lambda g, x: torch.bmm(g.mT, x),
        tiles=(*DEEP, *FLAT, *LITTLE, *PERSISTENT, *GROUPS),
    ),
    Entry(
        "keep_by_matmul", pair, keep_by_matmul, check_keep, weight_gradient,
        library=lambda g, x: torch.bmm(g.mT, x),
    ),
    Entry(
        "weighted", pair_and_factors, launch_weighted, check_weighted, weight_gradient,
        plain=lambda g, x, c: (g * c.to(g.dtype)[:, None, None]).flatten(0, 1).mT @ x.flatten(0, 1),
        library=lambda g, x, c: g.flatten(0, 1).mT @ x.flatten(0, 1),
        tiles=(FLAT[1], FLAT[1]._replace(stages=3), FLAT[3], FLAT[3]._replace(stages=4), *LITTLE, GROUPS[2], DEEP[0]),
    ),
    Entry(
        "squared_norms", stored_gradients, squared_norms, check_stored_norms,
        bytes_moved(lambda s: 2.0 * s.batch * s.d * s.p),
        plain=lambda G: torch.linalg.vector_norm(G.flatten(1), dim=1, dtype=torch.float32),
        wants=lambda s: s.tokens == 512,
    ),
    Entry(
        "weighted_sum", lambda s, cancelling: (*stored_gradients(s), factors(s.batch)),
        lambda G, c: weighted_sum(G, c, torch.float32), check_stored_sum,
        bytes_moved(lambda s: (2.0 * s.batch + 4) * s.d * s.p),
        plain=lambda G, c: torch.tensordot(c.to(G.dtype), G, dims=1),
        wants=lambda s: s.tokens == 512,
    ),
    Entry(
        "token_sums", lambda s, cancelling: pair(s, cancelling)[:1], token_sums.token_sums, check_token_sums,
        bytes_moved(lambda s: 2.0 * s.batch * s.tokens * s.p), plain=lambda g: g.sum(1), wants=square,
    ),
    Entry(
        "token_product_sums", pair, token_sums.token_product_sums, check_token_sums,
        bytes_moved(lambda s: 4.0 * s.batch * s.tokens * s.p), plain=lambda g, h: (g * h).sum(1), wants=square,
    ),
    Entry(
        "embedding_norms", lambda s, cancelling: (random_ids(s), pair(s, cancelling)[0]), embedding.embedding_norms,
        check_embedding_norms, bytes_moved(lambda s: 2.0 * s.batch * s.tokens * s.p), wants=square,
    ),
    Entry(
        "embedding_sum", lambda s, cancelling: (random_ids(s), pair(s, cancelling)[0], factors(s.batch)),
        lambda ids, g, c: embedding.embedding_sum(ids, g, c, VOCABULARY), check_embedding_sum,
        bytes_moved(lambda s: 2.0 * s.batch * s.tokens * s.p + 4.0 * VOCABULARY * s.p),
        plain=lambda ids, g, c: torch.zeros(VOCABULARY, g.shape[-1], device=g.device).index_add_(
            0, ids.flatten(), (g.float() * c[:, None, None]).flatten(0, 1)
        ),
        wants=square,
    ),
    Entry(
        "softmax_gradient_", logits_and_targets,
        lambda logits, targets, _: cross_entropy.softmax_gradient_(logits, targets, 1.0), check_softmax_gradient,
        bytes_moved(lambda s: 4.0 * s.batch * s.tokens * s.p),
        plain=lambda logits, targets, _: (
            F.cross_entropy(logits, targets, reduction="none"), F.softmax(logits, dim=1).scatter_add_(
                1, targets[:, None], logits.new_full((len(targets), 1), -1.0)
            )
        ),
        wants=lambda s: s.p == VOCABULARY and s.batch * s.tokens <= 16384,
    ),
    Entry(
        "noisy_adamw", make_update, run_update, check_update, bytes_moved(lambda s: 30.0 * s.d * s.p),
        plain=run_fused_adamw,
        wants=lambda s: s.batch == 4 and s.tokens == 512,
    ),
]  # fmt: skip
NAMED = {entry.name: entry for entry in SINGLE}
ENTRIES = [
    *SINGLE,
    foreach_entry("foreach_direct", NAMED["direct"], launch_foreach_direct),
    foreach_entry("foreach_ghost", NAMED["ghost"], launch_foreach_ghost),
    foreach_entry("foreach_keep", NAMED["keep"], launch_foreach_keep, gradients_and_parts),
    foreach_entry("foreach_weighted", NAMED["weighted"], launch_foreach_weighted),
]
