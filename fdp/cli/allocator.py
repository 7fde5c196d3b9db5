"""Keep memory that is freed, so that the next step does not fetch it from the operating system again.

A step on a CPU allocates and frees tensors of megabytes, hundreds of times. By default the allocators return them to
the system, which hands out zeroed pages one fault at a time: a seventh of a step of gpt-nano on two ARM cores. A
training process needs the same memory again in the next step.

    >>> keep_freed_memory()        # before torch is imported
"""

from __future__ import annotations

import ctypes
import os
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Options of ``mallopt``, from malloc.h: what is larger is mapped by itself; how much may stay free at the end."""
LARGEST = 32 << 20
"""The largest threshold that glibc accepts."""


def keep_freed_memory() -> None:
    """Tell this process's allocators not to return memory: torch's own on ARM (mimalloc), and the C library's.

    Settings in the environment (``MIMALLOC_PURGE_DELAY``, ``MALLOC_TRIM_THRESHOLD_``) are left as they are. Tensors of
    more than 32 MiB that the C library allocates are returned as before.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")  # read when torch is loaded
    if not sys.platform.startswith("linux") or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None and mallopt(MMAP_THRESHOLD, LARGEST):
        mallopt(TRIM_THRESHOLD, -1)
