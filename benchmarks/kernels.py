"""Every kernel against its float64 reference, then against plain torch, the library and the machine's limits.

    python benchmarks/kernels.py --quick                  # three shapes, under 90 s
    python benchmarks/kernels.py --out runs/kernels       # all shapes; writes runs/kernels.json and .md
    python benchmarks/kernels.py --tune --only direct     # which tile is best for each shape

Shapes are those of GPT-2-Large: (inputs, outputs) of its linear layers, 4 samples of 512 to 8192 tokens, and 32 of 512.
Operands are bfloat16. A kernel is first compared with its reference in float64, on random data and on data whose
tokens cancel; one that differs is reported and not timed. A time is the median of replays of a CUDA graph that calls
the kernel on different operands in turn, together more than L2 holds. ``share`` is of the rate of an 8192^3 product by
cuBLAS, or of the bandwidth of a copy, both measured in the same run; flops and bytes are those of the problem, not of
the tiles. ``plain`` is the same in torch, stored intermediates and all; ``library`` the matrix products alone.

A kernel file joins by an entry in ``ENTRIES``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from fdp_kernels import cross_entropy, embedding, noisy_adamw, token_sums
from fdp_kernels.direct import direct_reference, launch_direct
from fdp_kernels.ghost import launch_ghost
from fdp_kernels.keep import (
    keep_by_matmul,
    launch_keep,
    squared_norms,
    squared_norms_reference,
    weighted_sum,
    weighted_sum_reference,
)
from fdp_kernels.tile_gemm import Tile
from fdp_kernels.weighted import launch_weighted

VOCABULARY = 50257
DEVICE = "cuda"


class Shape(NamedTuple):
    batch: int
    tokens: int
    d: int
    p: int


WIDTHS = [(1280, 3840), (1280, 1280), (1280, 5120), (5120, 1280), (1280, VOCABULARY)]
SHAPES = [Shape(4, tokens, *widths) for tokens, widths in product((512, 1024, 2048, 4096, 8192), WIDTHS)]
SHAPES += [Shape(32, 512, *widths) for widths in WIDTHS]
RAGGED = Shape(3, 1000, 1280, 776)
QUICK = [Shape(4, 512, 1280, 5120), Shape(4, 1024, 1280, 1280), Shape(4, 2048, 1280, 3840)]

DEEP = [Tile(128, 256, 64, 8, stages) for stages in (3, 4)] + [Tile(256, 128, 64, 8, 4), Tile(128, 128, 128, 8, 3)]
FLAT = [Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 8, 4), Tile(64, 256, 64, 4, 3), Tile(64, 128, 64, 4, 3)]
LITTLE = [Tile(64, 64, 64, 4, 4)]
PERSISTENT = [tile._replace(per_sm=1) for tile in DEEP[:3]] + [tile._replace(per_sm=2) for tile in FLAT[::2]]
GROUPS = [tile._replace(group=group) for tile, group in product((DEEP[1], FLAT[0]), (4, 16))]


class Entry(NamedTuple):
    """A kernel: ``inputs(shape, cancelling)``, how it is run and checked, what it is compared with, what it costs.

    ``check(inputs, outputs)`` gets both as the run left them; ``tiles`` are tried by --tune as ``kernel(..., tile=)``.
    """

    name: str
    inputs: Callable[[Shape, bool], tuple]
    kernel: Callable[..., Any]
    check: Callable[[tuple, Any], bool]
    cost: Callable[[Shape], tuple[float, float]]
    plain: Callable[..., Any] | None = None
    library: Callable[..., Any] | None = None
    tiles: tuple[Tile, ...] = ()
    wants: Callable[[Shape], bool] = lambda shape: True


# ---------------------------------------------------------------- operands


def pair(shape: Shape, cancelling: bool = False) -> tuple[Tensor, Tensor]:
    """g (B, T, p) and x (B, T, d); cancelling: x nearly constant over tokens, g summing to nearly 0."""
    batch, tokens, d, p = shape
    g = torch.randn(batch, tokens, p, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(batch, tokens, d, device=DEVICE, dtype=torch.bfloat16)
    if cancelling:
        g = g - g.mean(1, keepdim=True)
        x = 3 * x[:, :1] + 0.01 * x
    return g, x


def factors(batch: int) -> Tensor:
    return torch.rand(batch, device=DEVICE) + 0.1


def pair_and_factors(shape: Shape, cancelling: bool = False) -> tuple[Tensor, ...]:
    return *pair(shape, cancelling), factors(shape.batch)


def kept(shape: Shape, cancelling: bool = False) -> tuple[Tensor]:
    return (torch.randn(shape.batch, shape.p, shape.d, device=DEVICE, dtype=torch.bfloat16),)


def tokens_of(shape: Shape) -> Tensor:
    return torch.randint(0, VOCABULARY, (shape.batch, shape.tokens), device=DEVICE)


# ---------------------------------------------------------------- checks


def sizes(g: Tensor, x: Tensor) -> Tensor:
    norms = (torch.linalg.vector_norm(z, dim=-1, dtype=torch.float64) for z in (g, x))
    return math.prod(norms).sum(1)  # pyright: ignore


def exact_norms(g: Tensor, x: Tensor) -> Tensor:
    return torch.cat([direct_reference(g[b : b + 1], x[b : b + 1]) for b in range(len(g))])


def lost(g: Tensor) -> float:
    """What float32 sums over tokens can lose, relative to ``sizes``; see ``fdp_kernels.ghost``."""
    return 1.25 * max(16, g.shape[1]) * 2**-23


def near(found: Tensor, expected: Tensor, relative: float) -> bool:
    return bool(((found - expected).abs() <= relative * expected.abs().max()).all())


def check_direct(inputs: tuple, found: Tensor) -> bool:
    g, x = inputs
    return bool(((found.sqrt() - exact_norms(g, x).sqrt()).abs() <= lost(g) * sizes(g, x)).all())


def check_ghost(inputs: tuple, found: Tensor) -> bool:
    """Not below the exact norm nor below what ``weighted`` adds; above by no more than twice what may be lost."""
    g, x = inputs
    exact, size = exact_norms(g, x), sizes(g, x)
    above = exact + (2 * lost(g) * size + 1e-6 * size).square() + 2 * 2.0e-4 * size.square()
    return bool((found >= exact).all() and (found >= launch_direct(g, x)).all() and (found <= 1.5 * above).all())


def check_keep(inputs: tuple, found: tuple[Tensor, Tensor]) -> bool:
    (g, x), (G, parts) = inputs, found
    squared, exact = parts.sum(1), squared_norms_reference(G)
    good = bool((squared >= exact * (1 - 1e-12)).all() and (squared <= exact * (1 + 2.0**-14)).all())
    for b, size in enumerate(sizes(g, x)):
        exact = g[b].double().mT @ x[b].double()
        good = good and bool((G[b].double() - exact).norm() <= 2**-8 * exact.norm() + lost(g) * size)
    return good


def check_weighted(inputs: tuple, found: Tensor) -> bool:
    """Near the exact sum; and one sample's part is what ``direct`` measures, which rounds up."""
    g, x, c = inputs
    exact = sum(c[b].double() * (g[b].double().mT @ x[b].double()) for b in range(len(g)))
    close = (found.double() - exact).norm() <= (lost(g) + 2**-20) * (c * sizes(g, x)).sum()
    one_hot = (torch.arange(len(g), device=DEVICE) == len(g) - 1).float()
    alone, measured = launch_weighted(g, x, one_hot).double().square().sum(), launch_direct(g, x)[-1]
    return bool(close) and bool((measured >= alone * (1 - 1e-12)) & (measured <= alone * (1 + 2.0**-14)))


def check_kept_norms(inputs: tuple, found: Tensor) -> bool:
    return near(found, squared_norms_reference(inputs[0]), 1e-12)


def check_kept_sum(inputs: tuple, found: Tensor) -> bool:
    G, c = inputs
    return near(found, weighted_sum_reference(G, c, torch.float32), 1e-7)


def check_token_sums(inputs: tuple, found: tuple[Tensor, Tensor]) -> bool:
    reference = token_sums.token_sums_reference if len(inputs) == 1 else token_sums.token_product_sums_reference
    sums, squares = found
    size = math.prod(z.double().abs() for z in inputs).sum(1)  # pyright: ignore
    close = (sums - reference(*(z.double() for z in inputs))[0]).abs() <= 2**-17 * size
    return bool(close.all()) and near(squares.sum(1), sums.double().square().sum(1), 1e-12)


def check_embedding_norms(inputs: tuple, found: Tensor) -> bool:
    return near(found, embedding.embedding_norms_reference(*inputs), 1e-5)


def check_embedding_sum(inputs: tuple, found: Tensor) -> bool:
    ids, g, c = inputs
    return near(found, embedding.embedding_sum_reference(ids, g, c, VOCABULARY), 1e-5)


# ---------------------------------------------------------------- other kernels' operands and runs


def logits_and_targets(shape: Shape, cancelling: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    rows = shape.batch * shape.tokens
    logits = torch.randn(rows, shape.p, device=DEVICE, dtype=torch.bfloat16)
    return logits, torch.randint(0, shape.p, (rows,), device=DEVICE), logits.clone()


def check_softmax_gradient(inputs: tuple, losses: Tensor) -> bool:
    gradient, targets, logits = inputs
    rows = slice(0, 512)
    wide = logits[rows].double()
    expected = cross_entropy.softmax_gradient_reference(wide, targets[rows], None, 1.0)
    return near(losses[rows].double(), expected, 1e-5) and near(gradient[rows].double(), wide, 2**-8)


class Update(NamedTuple):
    """One leaf for AdamW, its reference's twin, and torch's optimizer on a third copy."""

    leaf: Any
    twin: Any
    tables: Any
    keys: Tensor
    scalars: Tensor
    fused: torch.optim.AdamW
    cast: Tensor


HYPER = noisy_adamw.Hyper(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01, noise_std=0.0, eps_root=0.0)


def update_of(shape: Shape, cancelling: bool = False) -> tuple[Update]:
    size = shape.p, shape.d
    rows, param = torch.randn(1, *size, device=DEVICE), torch.randn(size, device=DEVICE)

    def leaf() -> Any:
        copy = torch.empty(size, device=DEVICE, dtype=torch.bfloat16)
        mean, square = torch.zeros(size, device=DEVICE), torch.zeros(size, device=DEVICE)
        ones = torch.ones(1, device=DEVICE)
        return noisy_adamw.Leaf(rows, ones, param.clone(), mean, square, copy, first=0, decay=True)

    plain = param.clone().requires_grad_()
    plain.grad = rows[0].clone()
    optimizer = torch.optim.AdamW([plain], lr=1e-3, fused=True, capturable=DEVICE == "cuda")
    keys = torch.randint(0, 1 << 32, (1, 8), device=DEVICE)
    scalars = torch.tensor([1.0, 0.25, 10.0, 1000.0, 1e-3], dtype=torch.float64, device=DEVICE)
    cast = torch.empty(size, device=DEVICE, dtype=torch.bfloat16)
    return (Update(leaf(), leaf(), noisy_adamw.Tables(), keys, scalars, optimizer, cast),)


def run_update(update: Update) -> None:
    noisy_adamw.update_([update.leaf], update.keys, update.scalars, HYPER, update.tables)


def run_fused_adamw(update: Update) -> None:
    update.fused.step()
    update.cast.copy_(update.fused.param_groups[0]["params"][0].detach())


def check_update(inputs: tuple, found: None) -> bool:
    (update,) = inputs
    noisy_adamw.noisy_adamw_reference_([update.twin], update.keys, update.scalars, HYPER)
    return near(update.leaf.param, update.twin.param, 1e-5)


# ---------------------------------------------------------------- registry


def weight_gradient(shape: Shape) -> tuple[float, float]:
    return 2.0 * math.prod(shape), 0.0


def once(inputs: Callable[[Shape], float]) -> Callable[[Shape], tuple[float, float]]:
    """A kernel bound by the bytes it reads and writes."""
    return lambda shape: (0.0, inputs(shape))


def square(shape: Shape) -> bool:
    return (shape.d, shape.p) == (1280, 1280)


ENTRIES = [
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
            Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 3), Tile(128, 128, 128, 8, 3), Tile(128, 64, 64, 4, 3),
            Tile(128, 64, 64, 8, 4), Tile(64, 64, 64, 4, 4), Tile(64, 64, 128, 4, 3),
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
        tiles=(FLAT[1], FLAT[1]._replace(stages=3), FLAT[3], FLAT[3]._replace(stages=4), *LITTLE, GROUPS[2]),
    ),
    Entry(
        "squared_norms", kept, squared_norms, check_kept_norms, once(lambda s: 2.0 * s.batch * s.d * s.p),
        plain=lambda G: torch.linalg.vector_norm(G.flatten(1), dim=1, dtype=torch.float32),
        wants=lambda s: s.tokens == 512,
    ),
    Entry(
        "weighted_sum", lambda s, cancelling: (*kept(s), factors(s.batch)),
        lambda G, c: weighted_sum(G, c, torch.float32), check_kept_sum,
        once(lambda s: (2.0 * s.batch + 4) * s.d * s.p),
        plain=lambda G, c: torch.tensordot(c.to(G.dtype), G, dims=1),
        wants=lambda s: s.tokens == 512,
    ),
    Entry(
        "token_sums", lambda s, cancelling: pair(s, cancelling)[:1], token_sums.token_sums, check_token_sums,
        once(lambda s: 2.0 * s.batch * s.tokens * s.p), plain=lambda g: g.sum(1), wants=square,
    ),
    Entry(
        "token_product_sums", pair, token_sums.token_product_sums, check_token_sums,
        once(lambda s: 4.0 * s.batch * s.tokens * s.p), plain=lambda g, h: (g * h).sum(1), wants=square,
    ),
    Entry(
        "embedding_norms", lambda s, cancelling: (tokens_of(s), pair(s, cancelling)[0]), embedding.embedding_norms,
        check_embedding_norms, once(lambda s: 2.0 * s.batch * s.tokens * s.p), wants=square,
    ),
    Entry(
        "embedding_sum", lambda s, cancelling: (tokens_of(s), pair(s, cancelling)[0], factors(s.batch)),
        lambda ids, g, c: embedding.embedding_sum(ids, g, c, VOCABULARY), check_embedding_sum,
        once(lambda s: 2.0 * s.batch * s.tokens * s.p + 4.0 * VOCABULARY * s.p),
        plain=lambda ids, g, c: torch.zeros(VOCABULARY, g.shape[-1], device=DEVICE).index_add_(
            0, ids.flatten(), (g.float() * c[:, None, None]).flatten(0, 1)
        ),
        wants=square,
    ),
    Entry(
        "softmax_gradient_", logits_and_targets,
        lambda logits, targets, _: cross_entropy.softmax_gradient_(logits, targets, 1.0), check_softmax_gradient,
        once(lambda s: 4.0 * s.batch * s.tokens * s.p),
        plain=lambda logits, targets, _: (
            F.cross_entropy(logits, targets, reduction="none"), F.softmax(logits, dim=1).scatter_add_(
                1, targets[:, None], logits.new_full((len(targets), 1), -1.0)
            )
        ),
        wants=lambda s: s.p == VOCABULARY and s.batch * s.tokens <= 16384,
    ),
    Entry(
        "noisy_adamw", update_of, run_update, check_update, once(lambda s: 30.0 * s.d * s.p), plain=run_fused_adamw,
        wants=lambda s: s.batch == 4 and s.tokens == 512,
    ),
]  # fmt: skip


# ---------------------------------------------------------------- time

CACHE = 1.5e8
"""Bytes that push everything out of L2."""


def milliseconds(run: Callable[..., Any], operands: list[tuple], *, replays: int = 7) -> float:
    """Median time of a call: a captured round over all operands, repeated so that a replay takes milliseconds."""
    for inputs in operands:
        run(*inputs)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(*operands[0])
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(50, int(5.0 / (len(operands) * max(start.elapsed_time(end), 1e-2)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for inputs in operands:
                run(*inputs)
    times = []
    for _ in range(replays + 1):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / (rounds * len(operands)))
    return statistics.median(times[1:])


def bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(bytes_of, value)) if isinstance(value, (tuple, list)) else 0


def operands_of(entry: Entry, shape: Shape) -> list[tuple]:
    """As many sets of operands as it takes to pass over more than L2 in a round; at most eight."""
    first = entry.inputs(shape, False)
    copies = min(8, max(2, math.ceil(CACHE / max(bytes_of(first), 1)) + 1))
    return [first, *(entry.inputs(shape, False) for _ in range(copies - 1))]


def limits() -> tuple[float, float]:
    """flop/s of cuBLAS at 8192^3 in bfloat16, and bytes/s of a copy."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matrix = 2 * 8192.0**3 / milliseconds(torch.matmul, [(a, b), (b, a)]) * 1e3
    source, target = (torch.empty(1 << 29, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return matrix, 2 * source.nbytes / milliseconds(target.copy_, [(source,)]) * 1e3


# ---------------------------------------------------------------- rows


def failure(entry: Entry, shape: Shape, **options: Any) -> str:
    """Why the kernel must not be timed; empty if it is right on random and on cancelling data, twice the same."""
    for cancelling in (False, True):
        torch.manual_seed(7 + cancelling)
        inputs = entry.inputs(shape, cancelling)
        found = entry.kernel(*inputs, **options)
        if not entry.check(inputs, found):
            return f"differs from its reference on {'cancelling' if cancelling else 'random'} data"
    return ""


def attempt(run: Callable[[], Any]) -> Any:
    """The result, or the error as a line of text: one shape that does not fit stops no other."""
    try:
        return run()
    except Exception as error:
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def row_of(entry: Entry, shape: Shape, matrix: float, copy: float) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": entry.name, **shape._asdict()}
    failed = attempt(lambda: failure(entry, shape))
    if failed:
        return {**row, "failed": failed}
    operands = operands_of(entry, shape)
    flops, moved = entry.cost(shape)
    for column, run in (("ms", entry.kernel), ("plain_ms", entry.plain), ("library_ms", entry.library)):
        if run is not None:
            measured = attempt(lambda run=run: milliseconds(run, operands))
            row[column] = measured if isinstance(measured, float) else None
            if column == "ms" and not isinstance(measured, float):
                return {**row, "failed": measured}
    rate = (flops or moved) / row["ms"] * 1e3
    limit = matrix if flops else copy
    return {**row, "rate": rate, "unit": "TFLOP/s" if flops else "GB/s", "share": rate / limit}


def text_of(row: dict[str, Any]) -> list[str]:
    shape = f"{row['batch']} x {row['tokens']}, {row['d']} -> {row['p']}"
    if "failed" in row:
        return [row["kernel"], shape, f"FAILED: {row['failed']}", "", "", "", ""]
    scale = 1e12 if row["unit"] == "TFLOP/s" else 1e9
    others = [f"{row[name]:.3f}" if row.get(name) else "" for name in ("plain_ms", "library_ms")]
    rate = f"{row['rate'] / scale:.0f} {row['unit']}"
    return [row["kernel"], shape, f"{row['ms']:.3f}", rate, f"{row['share']:.2f}", *others]


HEADER = ["kernel", "samples x tokens, d -> p", "ms", "rate", "share", "plain ms", "library ms"]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(cells, (18, 26, 8, 11, 5, 8, 10))) + " |"


@cache
def wrong_tile(name: str, tile: Tile) -> str:
    """What is wrong with a tile, on one ragged shape for all."""
    entry = next(entry for entry in ENTRIES if entry.name == name)
    return attempt(lambda: failure(entry, RAGGED, tile=tile))


def tune(entry: Entry, shape: Shape, matrix: float) -> dict[str, Any]:
    """Every tile of the entry, best first; a wrong or failing one is named and left out."""
    operands, found = operands_of(entry, shape), []
    for tile in entry.tiles:
        run = lambda *inputs, tile=tile: entry.kernel(*inputs, tile=tile)  # noqa: E731
        failed = wrong_tile(entry.name, tile)
        measured = failed or attempt(lambda run=run: milliseconds(run, operands, replays=3))
        if isinstance(measured, float):
            found.append((measured, tile))
        else:
            print(f"  {entry.name} {shape}: {tile}: {measured}", flush=True)
    found.sort(key=lambda pair: pair[0])
    for measured, tile in found[:4]:
        share = entry.cost(shape)[0] / measured * 1e3 / matrix
        print(f"{entry.name:9} {tuple(shape)!s:24} {measured:8.3f} ms  {share:.2f}  {tile}", flush=True)
    return {"kernel": entry.name, **shape._asdict(), "tiles": [[ms, list(tile)] for ms, tile in found]}


# ---------------------------------------------------------------- command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes")
    parser.add_argument("--tune", action="store_true", help="try every tile of every kernel that has some")
    parser.add_argument("--only", nargs="*", default=[], help="kernels to run")
    parser.add_argument("--tokens", nargs="*", type=int, default=[], help="numbers of tokens to run")
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"), help="written with .json and .md")
    arguments = parser.parse_args()
    names = {entry.name for entry in ENTRIES}
    if unknown := set(arguments.only) - names:
        parser.error(f"--only: expected some of {sorted(names)}, got {sorted(unknown)}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    import triton

    began = time.perf_counter()
    matrix, copy = limits()
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(["python", "-m", "benchmarks.kernels", *(a.split("/")[-1] for a in sys.argv[1:])]),
        "matrix_flop_per_s": matrix,
        "copy_bytes_per_s": copy,
    }
    caption = f"{about['device']}, torch {about['torch']}, Triton {about['triton']}: cuBLAS {matrix / 1e12:.0f} TFLOP/s"
    print(f"{caption}, copy {copy / 1e9:.0f} GB/s", flush=True)
    shapes = [s for s in (QUICK if arguments.quick else SHAPES) if s.tokens in (arguments.tokens or [s.tokens])]
    chosen = [entry for entry in ENTRIES if entry.name in (arguments.only or names)]
    rows: list[dict[str, Any]] = []
    lines = [line(HEADER), line(["-" * 3] * len(HEADER))]
    if not arguments.tune:
        print("\n".join(lines), flush=True)
    for entry, shape in product(chosen, shapes):
        if arguments.tune and entry.tiles:
            rows.append(tune(entry, shape, matrix))
        elif not arguments.tune and entry.wants(shape):
            rows.append(row_of(entry, shape, matrix, copy))
            lines.append(line(text_of(rows[-1])))
            print(lines[-1], flush=True)
        torch.cuda.empty_cache()
        save(arguments.out, {**about, "tuned" if arguments.tune else "rows": rows}, caption, lines)
    failed = [row for row in rows if "failed" in row]
    print(f"{len(rows)} rows, {len(failed)} failed, {time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(bool(failed))


def save(out: Path, record: dict[str, Any], caption: str, lines: list[str]) -> None:
    """After every row, so that a run cut short has written what it found."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(record, indent=1))
    if "rows" in record:
        copy = f"copy {record['copy_bytes_per_s'] / 1e9:.0f} GB/s"
        out.with_suffix(".md").write_text(f"`{record['command']}`\n\n{caption}, {copy}.\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
