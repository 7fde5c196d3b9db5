"""Compile a body for Hopper, without a GPU; print its tensor-core instructions, fused additions, spills and memory."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import triton
from fdp_kernels import ghost_hopper, keep_hopper, sum_hopper, weighted_hopper
from fdp_kernels.hopper import ring_layout
from fdp_kernels.keep import _sum_body, sum_options
from fdp_kernels.tile_gemm import Tile
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

POINTERS = {"tile_ptr": "*fp64", "size_ptr": "*fp32", "token_ptr": "*fp64", "row_ptr": "*fp64"}
POINTERS |= {f"partial_ptr{k}": "*fp64" for k in range(4)}


def type_of(name: str, boxes: dict[str, str], int8: bool) -> str:
    """Return the type of an argument, as Triton spells it."""
    if re.fullmatch(r"(g|x|out)[0-3]", name):
        dtype, bits = ("i8", 8) if int8 and name.startswith("out") else ("bf16", 16)
        return f"tensordesc<{dtype}{boxes[name[:-1]]},{ring_layout(bits)!r}>"
    if re.fullmatch("q[0-3]", name):
        return f"tensordesc<i32{boxes['q']},{ring_layout(32)!r}>"
    if name.startswith("exponent_ptr"):
        return "*i8" if int8 else "*fp64"
    if name.startswith("units"):
        return "fp32"
    return POINTERS.get(name, "*fp32" if "_ptr" in name else "i32")


def compile_body(
    body: Any, constants: dict[str, Any], boxes: dict[str, str], *, warps: int = 4, kind: Any = GluonASTSource
) -> Any:
    """Return the body, compiled for compute capability 9.0."""
    names = body.arg_names
    int8 = constants.get("INT8", "q" in boxes)
    signature = {name: "constexpr" if name in constants else type_of(name, boxes, int8) for name in names}
    source = kind(body, signature, {(names.index(name),): value for name, value in constants.items()}, {})
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def outer(body: Any, tile: Tile, registers: int, **more: bool) -> Any:
    """Return a compiled body whose tiles are products over tokens."""
    constants = {
        "BLOCK_P": tile.rows, "BLOCK_D": tile.columns, "BLOCK_T": tile.depth, "TILES_DOWN": tile.group,
        "SLOTS": tile.stages, "REGISTERS": registers, **more,
    }  # fmt: skip
    stored = keep_hopper.INT8_COLUMNS if more.get("INT8") else tile.columns
    boxes = {"g": "[1, 64, 64]", "x": f"[1, 64, {tile.columns}]", "out": f"[1, 64, {stored}]"}
    return compile_body(body, constants, boxes)


def weighted(tile: Tile) -> Any:
    """Return the compiled body of ``weighted_hopper``."""
    return outer(weighted_hopper._weighted_hopper_body, tile, weighted_hopper.REGISTERS)


def keep(tile: Tile) -> Any:
    """Return the compiled body of ``keep_hopper``."""
    return outer(keep_hopper._keep_hopper_body, tile, keep_hopper.REGISTERS[tile.columns], INT8=False)


def keep_int8() -> Any:
    """Return the compiled body of ``keep_hopper`` that stores integers."""
    return outer(keep_hopper._keep_hopper_body, keep_hopper.INT8_TILE, keep_hopper.INT8_REGISTERS, INT8=True)


def ghost() -> Any:
    """Return the compiled body of ``ghost_hopper``."""
    tile = ghost_hopper.TILE
    constants = {
        "C": tile.rows, "K": tile.depth, "CHUNK": ghost_hopper.CHUNK, "SLOTS": tile.stages,
        "REGISTERS": ghost_hopper.REGISTERS,
    }  # fmt: skip
    return compile_body(ghost_hopper._ghost_hopper_body, constants, dict.fromkeys("gx", "[1, 128, 64]"))


def sum_int8() -> Any:
    """Return the compiled body of ``sum_hopper``."""
    constants = {
        "BLOCKS": sum_hopper.BLOCKS, "MOST_SAMPLES": sum_hopper.MOST_SAMPLES, "SLOTS": sum_hopper.SLOTS,
    }  # fmt: skip
    return compile_body(sum_hopper._sum_hopper_body, constants, {"q": f"[{sum_hopper.BLOCKS}, 8, 32]"}, warps=1)


def sum_stored(elements: int, samples: int) -> Any:
    """Return the compiled body of ``keep.weighted_sum``; a number that is 1 becomes a constant, as in a launch."""
    constants = {"ONTO": True, **sum_options(elements, samples)}
    constants |= {name: 1 for name, number in (("n", elements), ("batch", samples)) if number == 1}
    return compile_body(_sum_body, constants, {}, kind=ASTSource)


def stack_bytes(compiled: Any) -> int:
    """Return the bytes of local memory that a thread uses: registers that were spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [
            triton.knobs.nvidia.cuobjdump.path,  # pyright: ignore
            "-res-usage",
            file.name,
        ]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"STACK:(\d+)", usage)))


BODIES = {
    "ghost": ghost,
    **{f"weighted_{tile.rows}": partial(weighted, tile) for tile in weighted_hopper.TILES},
    **{f"keep_{tile.rows}": partial(keep, tile) for tile in keep_hopper.TILES},
    "keep_int8": keep_int8,
    "sum_int8": sum_int8,
    **{f"sum_stored_{n}_{samples}": partial(sum_stored, n, samples) for n in (1, 5) for samples in (1, 5)},
}

if __name__ == "__main__":
    compiled = BODIES[sys.argv[1]]()
    ptx = compiled.asm["ptx"]
    print(
        ptx.count("mma_async") + ptx.count("mma.sync"),
        ptx.count("fma.rn.f32"),
        stack_bytes(compiled),
        compiled.metadata.shared,
    )
