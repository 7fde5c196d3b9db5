"""Check every kernel against its float64 reference, then time it against plain torch, the library and the hardware.

    python -m benchmarks.kernels --quick                  # three shapes, and blocks
    python -m benchmarks.kernels --out runs/kernels       # all shapes; writes runs/kernels.json and .md
    python -m benchmarks.kernels --tune --only direct     # prints the best tiles for each shape

Prints a line per row. Shapes are those of GPT-2-Large: (inputs, outputs) of its linear layers, 4 samples of 512 to 8192
tokens, and 32 of 512. Kernels that take several matrices (``foreach_``) get the four of a block: flops are those of
all, and ``plain`` and ``library`` compute them one by one. Operands are bfloat16. A kernel is first compared with its
float64 reference, on random data and on data whose tokens cancel; one that differs is reported and not timed. A time is
the median of replays of a CUDA graph that calls the kernel on different operands in turn, together larger than L2.
``share`` is the share of the rate of an 8192^3 product by cuBLAS, or of the bandwidth of a copy, both measured in the
same run; flops and bytes are those of the problem, not of the tiles. ``plain`` is the same in torch, with stored
intermediates; ``library`` is the matrix products alone.

``kernel_checks`` has the operands and checks, ``kernel_entries`` the list of kernels.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, without an install
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from fdp_kernels.tile_gemm import Tile

from benchmarks.kernel_checks import DEVICE, Block, Shape
from benchmarks.kernel_entries import ENTRIES, Entry, problems

# ---------------------------------------------------------------- time

L2_FLUSH_BYTES = 1.5e8
"""Enough bytes to evict everything from L2."""


def milliseconds(run: Callable[..., Any], operands: list[tuple], *, replays: int = 7) -> float:
    """Return the median time of a call, from replays of a captured loop over all operands."""
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


def operands_of(entry: Entry, shape: Shape | Block) -> list[tuple]:
    """Return enough sets of operands to exceed L2 in a round; at most eight."""
    first = entry.inputs(shape, False)
    copies = min(8, max(2, math.ceil(L2_FLUSH_BYTES / max(bytes_of(first), 1)) + 1))
    return [first, *(entry.inputs(shape, False) for _ in range(copies - 1))]


def limits() -> tuple[float, float]:
    """Return flop/s of cuBLAS at 8192^3 in bfloat16, and bytes/s of a copy."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matrix = 2 * 8192.0**3 / milliseconds(torch.matmul, [(a, b), (b, a)]) * 1e3
    source, target = (torch.empty(1 << 29, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return matrix, 2 * source.nbytes / milliseconds(target.copy_, [(source,)]) * 1e3


# ---------------------------------------------------------------- rows


def failure(entry: Entry, shape: Shape | Block, **options: Any) -> str:
    """Return why the kernel must not be timed; empty if it is right on random and on cancelling data."""
    for cancelling in (False, True):
        torch.manual_seed(7 + cancelling)
        inputs = entry.inputs(shape, cancelling)
        found = entry.kernel(*inputs, **options)
        if not entry.check(inputs, found):
            return f"differs from its reference on {'cancelling' if cancelling else 'random'} data"
    return ""


def attempt(run: Callable[[], Any]) -> Any:
    """Return the result, or the error as a line of text: a shape that fails must not stop the others."""
    try:
        return run()
    except Exception as error:
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def name_of(entry: Entry, shape: Shape | Block) -> dict[str, Any]:
    return {"kernel": entry.name, "shape": shape.label, **shape._asdict()}


def row_of(entry: Entry, shape: Shape | Block, matrix: float, copy: float) -> dict[str, Any]:
    row = name_of(entry, shape)
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
    if "failed" in row:
        return [row["kernel"], row["shape"], f"FAILED: {row['failed']}", "", "", "", ""]
    scale = 1e12 if row["unit"] == "TFLOP/s" else 1e9
    others = [f"{row[name]:.3f}" if row.get(name) else "" for name in ("plain_ms", "library_ms")]
    rate = f"{row['rate'] / scale:.0f} {row['unit']}"
    return [row["kernel"], row["shape"], f"{row['ms']:.3f}", rate, f"{row['share']:.2f}", *others]


HEADER = ["kernel", "samples x tokens, d -> p", "ms", "rate", "share", "plain ms", "library ms"]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(cells, (18, 26, 8, 11, 5, 8, 10))) + " |"


@cache
def check_tile(entry: Entry, tile: Tile) -> str:
    """Return what is wrong with a tile, on one ragged shape."""
    return attempt(lambda: failure(entry, entry.ragged, tile=tile))


def tune(entry: Entry, shape: Shape | Block, matrix: float) -> dict[str, Any]:
    """Time every tile of the entry, best first; print and skip wrong or failing ones."""
    operands, found = operands_of(entry, shape), []
    for tile in entry.tiles:
        run = lambda *inputs, tile=tile: entry.kernel(*inputs, tile=tile)  # noqa: E731
        failed = check_tile(entry, tile)
        measured = failed or attempt(lambda run=run: milliseconds(run, operands, replays=3))
        if isinstance(measured, float):
            found.append((measured, tile))
        else:
            print(f"  {entry.name} {shape.label}: {tile}: {measured}", flush=True)
    found.sort(key=lambda pair: pair[0])
    for measured, tile in found[:4]:
        share = entry.cost(shape)[0] / measured * 1e3 / matrix
        print(f"{entry.name:13} {shape.label:24} {measured:8.3f} ms  {share:.2f}  {tile}", flush=True)
    return {**name_of(entry, shape), "tiles": [[ms, list(tile)] for ms, tile in found]}


# ---------------------------------------------------------------- command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes, and blocks")
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
    chosen = [entry for entry in ENTRIES if entry.name in (arguments.only or names)]
    cells = [(entry, shape) for entry in chosen for shape in problems(entry, quick=arguments.quick)]
    rows: list[dict[str, Any]] = []
    lines = [line(HEADER), line(["-" * 3] * len(HEADER))]
    if not arguments.tune:
        print("\n".join(lines), flush=True)
    for entry, shape in cells:
        if shape.tokens not in (arguments.tokens or [shape.tokens]):
            continue
        if arguments.tune and entry.tiles:
            rows.append(tune(entry, shape, matrix))
        elif not arguments.tune:
            rows.append(row_of(entry, shape, matrix, copy))
            lines.append(line(text_of(rows[-1])))
            print(lines[-1], flush=True)
        torch.cuda.empty_cache()
        save(arguments.out, {**about, "tuned" if arguments.tune else "rows": rows}, caption, lines)
    failed = [row for row in rows if "failed" in row]
    print(f"{len(rows)} rows, {len(failed)} failed, {time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(bool(failed))


def save(out: Path, record: dict[str, Any], caption: str, lines: list[str]) -> None:
    """Write the report; called after every row, so that an interrupted run loses nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(record, indent=1))
    if "rows" in record:
        copy = f"copy {record['copy_bytes_per_s'] / 1e9:.0f} GB/s"
        out.with_suffix(".md").write_text(f"`{record['command']}`\n\n{caption}, {copy}.\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
