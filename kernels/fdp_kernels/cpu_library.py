"""Compile and call the loops of ``cpu_kernels.c``, which do in one pass what takes torch several on a CPU.

    source -> cc -> bytes -> a file without a name -> ctypes          the bytes are cached: <cache folder>/cpu-....so

The loops are compiled once per machine, in a quarter of a second, by the C compiler that Triton and torch.compile use
too, for this very processor. They run on the threads of torch's own OpenMP. Every operation in them is rounded as IEEE
754 says, so that all compilers and processors give the same bits. Without Linux, a compiler or fused multiply-add,
:func:`library` returns None and callers compute the same with torch's operations; the numbers agree up to the rounding
that each caller states.

    >>> if (loops := library()) is not None:
    ...     loops.weighted_sum(dense(G), dense(factors), out, rows, columns)     # tensors are passed by address
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fdp_kernels.cache_folder import cache_folder
from fdp_kernels.processor import ON_ARM

SOURCE = Path(__file__).with_name("cpu_kernels.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fPIC", "-shared", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FOR_THIS_PROCESSOR = ("-mcpu=native",) if ON_ARM else ("-march=native", "-mprefer-vector-width=512")
COMPILE_SECONDS = 20
_COUNT, _NUMBER = int, float
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "weighted_sum": (torch.float32, torch.float64, torch.float64, _COUNT, _COUNT),
    "gelu_and_slope": (torch.float32, torch.float32, torch.float32, _COUNT, _NUMBER, _NUMBER, _NUMBER),
    "layer_norm": (*[torch.float32] * 5, _COUNT, _COUNT, _COUNT, _NUMBER),
    "layer_norm_backward": (*[torch.float32] * 8, _COUNT, _COUNT, _COUNT),
    "lower_quantile": (torch.float64, torch.float64, _COUNT),
    "normal_from_bits": (torch.int64, torch.float64, _COUNT),
    "normals": (torch.int64, torch.int64, torch.float64, _COUNT),
    "add_on_grid": (torch.float64, torch.int64, torch.int64, torch.float64, _COUNT),
    "adamw": (torch.int64, torch.int64, torch.float32, _COUNT),
    "child_keys": (torch.int64, torch.int64, torch.int64, _COUNT),
}
"""The functions of the library: the dtypes of their tensors, and numbers. The number of threads comes last."""


class Library:
    """The compiled functions. Sizes are the caller's to check."""

    def __init__(self, loaded: ctypes.CDLL):
        self.handle = loaded._handle
        self.weighted_sum = _bind(loaded, "weighted_sum")
        self.gelu_and_slope = _bind(loaded, "gelu_and_slope")
        self.layer_norm = _bind(loaded, "layer_norm")
        self.layer_norm_backward = _bind(loaded, "layer_norm_backward")
        self.lower_quantile = _bind(loaded, "lower_quantile")
        self.normal_from_bits = _bind(loaded, "normal_from_bits")
        self.normals = _bind(loaded, "normals")
        self.add_on_grid = _bind(loaded, "add_on_grid")
        self.adamw = _bind(loaded, "adamw")
        self.child_keys = _bind(loaded, "child_keys")


def dense(x: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values, one after the other."""
    return (x.clone() if x._is_zerotensor() else x).contiguous().resolve_neg()


def addresses_of(leaves: Iterable[Iterable[Tensor]]) -> Tensor:
    """Return where the tensors of every leaf lie in memory, in a row for each; the caller keeps them alive."""
    return torch.tensor([[part.data_ptr() for part in leaf] for leaf in leaves], dtype=torch.int64, device="cpu")


def _bind(loaded: ctypes.CDLL, name: str) -> Callable[..., None]:
    """Return a function that passes tensors by address, and the number of torch's threads."""
    function, kinds = getattr(loaded, name), ARGUMENTS[name]
    types = {int: ctypes.c_int64, float: ctypes.c_float}
    function.argtypes = (*(types.get(kind, ctypes.c_void_p) for kind in kinds), ctypes.c_int)
    function.restype = None

    def call(*arguments: Any) -> None:
        if len(arguments) != len(kinds):
            raise ValueError(f"{name}: expected {len(kinds)} arguments, got {len(arguments)}")
        passed = (_passed(name, one, kind) for one, kind in zip(arguments, kinds))
        function(*passed, torch.get_num_threads())

    return call


def _passed(name: str, argument: Any, kind: Any) -> Any:
    """Return the address of a tensor, or a number; refuse tensors whose memory is not what the loop expects."""
    if not isinstance(kind, torch.dtype):
        return kind(argument)
    if not isinstance(argument, Tensor) or argument.dtype != kind or argument.device.type != "cpu":
        got = f"{argument.dtype} on {argument.device}" if isinstance(argument, Tensor) else f"a {type(argument)}"
        raise ValueError(f"{name}: expected a tensor of {kind} on the CPU, got {got}")
    if not argument.is_contiguous() or argument.is_neg() or (argument.numel() and not argument.data_ptr()):
        raise ValueError(f"{name}: expected a tensor whose memory holds its values; call dense() first")
    return argument.data_ptr()


# ---------------------------------------------------------------- loading


@functools.cache
def library() -> Library | None:
    """Return the compiled functions; None where they cannot be had.

    Guarantees:
      - what is loaded was compiled by this user, is what was compiled, and gives the right numbers for
        :func:`gives_known_answers`;
      - whatever the caller's thread is in when it asks first, such as a transform or another default device, is not
        what decides.
    """
    if not sys.platform.startswith("linux"):
        return None
    with ThreadPoolExecutor(1) as own_thread:
        return own_thread.submit(_first_that_works).result()


def _first_that_works() -> Library | None:
    openmp = _openmp_of_torch()
    for shared in (openmp, None) if openmp else (None,):
        for compiler in filter(None, map(shutil.which, COMPILERS)):
            try:
                return _load(compiler, shared)
            except subprocess.TimeoutExpired:
                return None  # the others may hang as well
            except FAILURES:
                continue
    return None


FAILURES = (OSError, ValueError, RuntimeError, subprocess.SubprocessError, AttributeError)
"""What is raised where a library cannot be read, compiled or loaded, or gives other numbers than it should."""


def _load(compiler: str, openmp: str | None) -> Library:
    """Return the library of the cache, or compile it and put it there, if the cache can be written."""
    name = f"cpu-{_digest(compiler, openmp)}"
    try:
        return _open(_read_cached(name))
    except FAILURES:
        content = _compile(compiler, openmp)
        found = _open(content)
        _write_cached(name, content)
        return found


def _open(content: bytes) -> Library:
    """Load a library from memory: no path is opened that another process could have exchanged.

    Each has a name of its own, since of two with one name the first is loaded again.
    """
    memory = os.memfd_create("fdp-cpu-loops", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(content)
        found = Library(ctypes.CDLL(f"/proc/self/fd/{'./' * next(_LOADED)}{memory}"))
    finally:
        os.close(memory)
    if not gives_known_answers(found):
        raise ValueError("the compiled loops give other numbers than they should")
    return found


_LOADED = itertools.count()
MOST_BYTES = 1 << 24
"""A larger file in the cache is not what was compiled, and not read."""


def _read_cached(name: str) -> bytes:
    """Return a file of the cache; its name has the digest of its content, and only its owner may have written it."""
    for path in _own_folder().glob(f"{name}-*.so"):
        with suppress(OSError):
            content = _read_own_file(path)
            if path.name == _file_name(name, content):
                return content
    raise FileNotFoundError(name)


def _own_folder() -> Path:
    """Return the folder of the cache, unless it is another user's or everybody may put files there."""
    folder = cache_folder().absolute()
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{folder}: expected a folder of this user, in which others cannot write")
    return folder


def _read_own_file(path: Path) -> bytes:
    """Return the content of a file that this user alone may write; raise OSError for anything else."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        ours = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not (stat.S_ISREG(found.st_mode) and ours and found.st_size <= MOST_BYTES):
            raise PermissionError(f"{path}: expected a file that this user alone may write")
        return opened.read()


def _write_cached(name: str, content: bytes) -> None:
    """Put a library into the cache, readable by its owner only; do nothing if that fails."""
    with suppress(OSError, RuntimeError):
        folder = cache_folder().absolute()
        for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        file, made = tempfile.mkstemp(dir=_own_folder())
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(content)
            os.replace(made, folder / _file_name(name, content))  # ranks may do this at the same time
        except OSError:
            os.unlink(made)


def _file_name(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _compile(compiler: str, openmp: str | None) -> bytes:
    """Return the compiled source. It is linked to the OpenMP that torch has loaded."""
    parallel = [] if openmp is None else ["-fopenmp", openmp, "-Wl,--as-needed"]
    with tempfile.TemporaryDirectory() as work:
        made = Path(work) / "loops.so"
        _run([compiler, *FLAGS, *FOR_THIS_PROCESSOR, str(SOURCE), *parallel, "-lm", "-o", str(made)])
        return made.read_bytes()


def _run(command: list[str]) -> None:
    """Run a compiler; if it takes too long, end it and what it has started."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, **quiet) as process:  # pyright: ignore
        try:
            code = process.wait(COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code != 0:
        raise subprocess.CalledProcessError(code, command)


def _digest(compiler: str, openmp: str | None) -> str:
    """Return a digest of all that the library depends on: source, compiler, flags and processor."""
    found = os.stat(os.path.realpath(compiler))
    parts = (SOURCE.read_bytes(), compiler, found.st_size, found.st_mtime_ns, FLAGS, FOR_THIS_PROCESSOR, openmp)
    return hashlib.sha256(repr((parts, _processor())).encode(errors="surrogateescape")).hexdigest()[:16]


def _processor() -> str:
    """Return the kind of processor and its instructions: a home folder may be shared by several machines."""
    names = ("model name", "flags", "Features", "CPU part")
    lines = _lines_of("/proc/cpuinfo")
    return platform.machine() + "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))


def _openmp_of_torch() -> str | None:
    """Return the path of GNU's OpenMP library that torch calls: a second one would compete for the cores.

    Another package may have loaded one of its own, as scikit-learn does.
    """
    try:
        calls = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    address = ctypes.cast(calls, ctypes.c_void_p).value or 0
    for line in _lines_of("/proc/self/maps"):
        window, *_, path = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in window.split("-"))
        if first <= address < last and "libgomp" in Path(path).name:
            return path
    return None


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


# ---------------------------------------------------------------- known answers


CHILD = (4254194826, 4126209183, 1353518875, 936777215, 2734493412, 3344092166, 4368259, 2182429776)
"""``chacha20.child_keys_reference`` of a key of bytes 0 to 31 and the nonce of RFC 7539, 2.3.2."""
QUANTILES = {0.5: 0.0, 0.3: -0.5244005127080408, 0.01: -2.326347874040841, 1e-9: -5.9978070150076865,
             1e-30: -11.464024688443615}  # fmt: skip
DRAWN = {0: 0.21609778664313506, 7: 1.6658438263036353, 8: -0.47062868890150983, 255: 0.12502001713744207,
         256: 1.8326154889914854, 299: 0.6140215061114913}  # fmt: skip
"""Elements that ``normal.foreach_normal_reference`` draws from that key."""
GELU = 1.5957691216057308, 0.07135481282052837, 30.0
GELU_ANSWERS = ([-0.0, -0.15880801, 0.345714, 30.0, 3e38], [0.0, -0.08296408, 0.8673699, 1.0, 1.0])


def gives_known_answers(loops: Library) -> bool:
    """Return True if the loops give the stored answers: a compiler or a disk may have changed them."""
    key = torch.arange(0, 32).view(8, 4) @ torch.tensor([1, 1 << 8, 1 << 16, 1 << 24])
    child = torch.empty(1, 8, dtype=torch.int64)
    loops.child_keys(key, torch.tensor([[0x09000000, 0x4A000000, 0]]), child, 1)
    p = torch.tensor(list(QUANTILES), dtype=torch.float64)
    z, drawn = torch.empty_like(p), torch.empty(300, dtype=torch.float64)
    loops.lower_quantile(p, z, len(p))
    loops.normals(key.expand(2, 8).contiguous(), torch.tensor([0, 300]), drawn, 2)
    rows = torch.tensor([[1.0, 2.0**-30, -3.0], [2.0**30, 1.0, 5.0]], dtype=torch.float32)
    total = torch.empty(3, dtype=torch.float64)
    loops.weighted_sum(rows, torch.tensor([1.0, 2.0**-40], dtype=torch.float64), total, 2, 3)
    x, y = torch.tensor([-100.0, -1.0, 0.5, 30.0, 3e38], dtype=torch.float32), torch.empty(2, 5, dtype=torch.float32)
    loops.gelu_and_slope(x, y[0], y[1], 5, *GELU)
    noisy = torch.tensor([0.25, 3.0, -0.5], dtype=torch.float64)
    values = torch.tensor([1.0, 1.5, 0.0], dtype=torch.float64)
    table, sizes = addresses_of([(values[:2],), (values[2:],)]), torch.tensor([2, 1])
    loops.add_on_grid(noisy, table, sizes, torch.tensor([4.0, 2.0, 0.5], dtype=torch.float64), 2)
    return (
        child.tolist() == [list(CHILD)]
        and _close(z, QUANTILES.values(), 1e-15)
        and _close(drawn[list(DRAWN)], DRAWN.values(), 1e-15)
        and total.tolist() == [1 + 2.0**-10, 2.0**-30 + 2.0**-40, 5 * 2.0**-40 - 3]
        and noisy.tolist() == [1.5, 7.5, -1.0]
        and _gives_known_layer_norm(loops)
        and _gives_known_adamw(loops)
        and all(_close(found, answers, 2e-6) for found, answers in zip(y, GELU_ANSWERS))
    )


def _gives_known_layer_norm(loops: Library) -> bool:
    """Two tokens of 18 features: 17 zeros beside a one, and the same negative, with gradients that do not cancel."""
    x, g, y, of_x, parts, of_own = torch.zeros(6, 2, 18, dtype=torch.float32)
    x[0, 17], x[1, 17], g[0, 17], g[1, 0] = 1.0, -1.0, 1.0, 2.0
    own = torch.tensor([[3.0] * 18, [1.0] * 18], dtype=torch.float32)
    moments = torch.zeros(2, 2, dtype=torch.float32)
    loops.layer_norm(x, own[0], own[1], y, moments, 1, 2, 18, 0.0)
    loops.layer_norm_backward(g, x, own[0], moments, of_x, parts, of_own[0], of_own[1], 1, 2, 18)
    n, rise = 17**-0.5, 18 / 17**0.5  # of the zeros, in size; of both tokens
    return (
        _close(y[:, 0], (1 - 3 * n, 1 + 3 * n), 1e-6)
        and _close(y[:, 17], (1 + 3 * 17 * n, 1 - 3 * 17 * n), 1e-6)
        and _close(of_x[1, :2], (3 * rise * (2 - 2 / 18 - n * 2 * n / 18), 3 * rise * (-2 / 18 - n * 2 * n / 18)), 1e-6)
        and _close(of_own[0, [0, 1, 17]], (2 * n, 0.0, 17 * n), 1e-6)
        and of_own[1, [0, 1, 17]].tolist() == [2.0, 0.0, 1.0]
    )


def _gives_known_adamw(loops: Library) -> bool:
    """Two leaves of 17 equal elements and of one: p, g, m and v are 2, 0.5, 1 and 0.25; then 0, 1, 0 and 0."""
    first = torch.tensor([2.0, 0.5, 1.0, 0.25, 0.0, 0.0, 0.0], dtype=torch.float32).unsqueeze(1).repeat(1, 17)
    last = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float32)
    numbers = torch.tensor([0.25, 0.5, 2.0, 4.0, 0.0, 0.0, 0.75, 0.5, 0.125], dtype=torch.float32)
    loops.adamw(addresses_of([first, last]), torch.tensor([17, 1]), numbers, 2)
    direction = 0.5 / (2**0.5 + 0.75)
    return (
        first[4:].tolist() == [[1.75] * 17, [0.875] * 17, [0.25] * 17]
        and last[5:].tolist() == [0.25, 0.5]
        and _close(last[4:5], [-0.125 * direction], 1e-6)
    )


def _close(found: Tensor, answers: Iterable[float], tolerance: float) -> bool:
    pairs = zip(found.tolist(), answers, strict=True)
    return all(abs(one - answer) <= tolerance * max(1e-3, abs(answer)) for one, answer in pairs)
