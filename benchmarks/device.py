"""Device helpers of the benchmarks: wait for its work, count and free its memory, choose its attention kernel.

On a CPU there is nothing to wait for, and memory is not counted.

    >>> free(device)
    >>> peak = peak_gib(device)     # most GiB allocated since the last call
"""

from __future__ import annotations

import gc

import torch

GIB = 2**30
SDPA = ("default", "flash", "cudnn")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Free what the last mode left: compiled code, graphs, cached memory."""
    torch._dynamo.reset()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Return the most GiB allocated since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) / GIB
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def choose_sdpa(name: str) -> None:
    """Restrict ``scaled_dot_product_attention`` to one kernel (and plain math where that cannot run)."""
    if name != "default":
        torch.backends.cuda.enable_flash_sdp(name == "flash")
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
