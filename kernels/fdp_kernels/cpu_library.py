"""Compile and call the loops of ``cpu_kernels.c``, which do in one pass what takes torch several on a CPU.

    source -> cc -> <cache folder>/cpu-<digest>.so -> ctypes

The loops are compiled once per machine, in a quarter of a second, by the C compiler that Triton and torch.compile use
too, for this very processor. They run on the threads of torch's own OpenMP. Without a compiler, or where that does not
work, :func:`library` returns None and callers compute the same with torch's operations: the numbers agree up to the
rounding that each caller states.

    >>> if (loops := library()) is not None:
    ...     loops.weighted_sum(G, factors, out, rows, columns)        # tensors are passed by address
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fdp_kernels.cache_folder import cache_folder
from fdp_kernels.processor import ON_ARM

SOURCE = Path(__file__).with_name("cpu_kernels.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
FOR_THIS_PROCESSOR = ("-mcpu=native",) if ON_ARM else ("-march=native", "-mprefer-vector-width=512")
COMPILE_SECONDS = 60
_ARRAY, _COUNT, _NUMBER, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
ARGUMENTS = {
    "weighted_sum": (_ARRAY, _ARRAY, _ARRAY, _COUNT, _COUNT),
    "gelu_and_slope": (_ARRAY, _ARRAY, _ARRAY, _COUNT, _NUMBER, _NUMBER, _NUMBER),
    "lower_quantile": (_ARRAY, _ARRAY, _COUNT),
    "normal_from_bits": (_ARRAY, _ARRAY, _COUNT),
    "normals": (_ARRAY, _ARRAY, _ARRAY, _COUNT),
    "child_keys": (_ARRAY, _ARRAY, _ARRAY, _COUNT),
}
"""The functions of the library and their arguments, without the number of threads, which comes last."""


class Library:
    """The compiled functions. Tensors must be contiguous, on the CPU, and of the dtypes in ``cpu_kernels.c``."""

    def __init__(self, path: Path):
        loaded = ctypes.CDLL(str(path))
        self.weighted_sum = _bind(loaded, "weighted_sum")
        self.gelu_and_slope = _bind(loaded, "gelu_and_slope")
        self.lower_quantile = _bind(loaded, "lower_quantile")
        self.normal_from_bits = _bind(loaded, "normal_from_bits")
        self.normals = _bind(loaded, "normals")
        self.child_keys = _bind(loaded, "child_keys")


def _bind(loaded: ctypes.CDLL, name: str) -> Callable[..., None]:
    """Return a function that passes tensors by address, and the number of torch's threads."""
    function = getattr(loaded, name)
    function.argtypes, function.restype = (*ARGUMENTS[name], _THREADS), None

    def call(*arguments: Any) -> None:
        for one in arguments:
            if isinstance(one, Tensor) and not (one.is_contiguous() and one.device.type == "cpu"):
                raise ValueError(f"{name}: expected contiguous tensors on the CPU, got one on {one.device}")
        function(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments), torch.get_num_threads())

    return call


@functools.cache
def library() -> Library | None:
    """Return the compiled functions; None without a C compiler, or if it fails.

    Guarantees:
      - nothing is loaded that another user could have written.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None or os.name != "posix":
        return None
    openmp = _openmp_of_torch()
    for shared in (openmp, None) if openmp else (None,):
        try:
            return _load(compiler, shared)
        except (OSError, subprocess.SubprocessError, AttributeError):
            continue
    return None


def _load(compiler: str, openmp: str | None) -> Library:
    """Load the library of the cache, or compile it; if the cache cannot be written, only for this process."""
    name = f"cpu-{_digest(compiler, openmp)}.so"
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours(folder):
            raise PermissionError(folder)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            path = folder / name
            if not (path.exists() and _is_ours(path)):
                os.replace(_compile(compiler, openmp, Path(work)), path)  # ranks may do this at the same time
            return Library(path)
    except OSError:
        with tempfile.TemporaryDirectory() as work:
            return Library(_compile(compiler, openmp, Path(work)))


def _compile(compiler: str, openmp: str | None, work: Path) -> Path:
    """Compile the source in a folder and return the library. It is linked to the OpenMP that torch has loaded."""
    parallel = [] if openmp is None else ["-fopenmp"]
    made, library = work / "loops.o", work / "loops.so"
    _run([compiler, "-c", *FLAGS, *FOR_THIS_PROCESSOR, *parallel, str(SOURCE), "-o", str(made)])
    _run([compiler, "-shared", str(made), *([] if openmp is None else [openmp]), "-lm", "-o", str(library)])
    library.chmod(0o700)
    return library


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)


def _digest(compiler: str, openmp: str | None) -> str:
    """Return a digest of all that the library depends on: source, compiler, flags and processor."""
    found = os.stat(os.path.realpath(compiler))
    parts = (SOURCE.read_text(), compiler, found.st_size, found.st_mtime_ns, FLAGS, FOR_THIS_PROCESSOR, openmp)
    return hashlib.sha256(repr((parts, _processor())).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the kind of processor and its instructions: a home folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))


def _openmp_of_torch() -> str | None:
    """Return the path of GNU's OpenMP library, if torch has loaded it: a second one would compete for the cores."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((path for line in lines if "libgomp" in (path := line.split()[-1])), None)


def _is_ours(path: Path) -> bool:
    """Return True if only this user can have written the file or folder."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
