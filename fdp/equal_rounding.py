"""Products and sums of a GPU that round a sample in one way, however many samples there are.

    y_r = sum_k x_rk w_k                   in one piece, not in parts that several multiprocessors add up
    b_s = sum_t g_st                       in the same order on every rank

If there are few rows, cuBLAS splits such a sum, and the parts are rounded, to half precision by default, before they
are added. Then the gradient of a sample depends on the size of its microbatch: in bfloat16 by half a per cent (gpt2's
widths, 64 samples against 72, on an H200). If a sample is added to a batch, others come into microbatches of other
sizes, and the sum would move by more than the new sample's part. With a workspace too small for parts, and without sums
in half precision, cuBLAS does not split; a step of gpt2 takes as long as with it. Compiled blocks run the same code for
every size (:mod:`fdp.fast.compiled`). :mod:`fdp.checks.equal_sizes` checks that all this helped.

    >>> import fdp                                  # calls limit_workspaces, before the first product on a GPU
    >>> with whole_sums(device):
    ...     loss.backward()
    >>> torch.compile(run, options=compiler_options("inductor", one_order=True))
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WORKSPACE, REPEATABLE_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":16:8", ":4096:8")
"""A variable of the environment, and its values with which torch allows deterministic algorithms."""
WORKSPACES = {WORKSPACE: REPEATABLE_WORKSPACES[0], "CUBLASLT_WORKSPACE_SIZE": "0"}
"""128 KiB, too little to split any but the smallest products; with less than 16 KiB products may fail."""

RESERVED: dict[str, str] = {}
"""What the environment said when fdp was imported."""
HALF_PRECISION_SUMS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
"""Settings of ``torch.backends.cuda.matmul``."""


def limit_workspaces() -> None:
    """Tell torch to give cuBLAS little memory for parts of sums. What the environment says already is left as it is."""
    for name, value in WORKSPACES.items():
        RESERVED[name] = os.environ.setdefault(name, value)


def check_workspace() -> None:
    """Raise :class:`FdpError` if the environment gives cuBLAS another workspace than when fdp was imported.

    Torch allocates it at the first product and reads its size again at every product: with a larger one cuBLAS would
    write beyond the memory that it has.
    """
    from fdp.types import FdpError  # here, since it imports torch

    found, before = os.environ.get(WORKSPACE), RESERVED.get(WORKSPACE)
    if before is not None and found != before:
        raise FdpError(
            f"{WORKSPACE}: expected {before}, as when fdp was imported, got {found}: cuBLAS may have less memory, and "
            "would write beyond it. Set it before the program starts"
        )


def check_repeatable() -> None:
    """Raise :class:`NotRepeatable` if torch would refuse repeatable products for cuBLAS' workspace."""
    from fdp.types import NotRepeatable

    if (found := os.environ.get(WORKSPACE)) not in REPEATABLE_WORKSPACES:
        raise NotRepeatable(
            f"{WORKSPACE}: expected {' or '.join(REPEATABLE_WORKSPACES)}, got {found}: gradients must be the same each "
            "time they are computed. Set it before the program starts, or unset it and leave it to fdp"
        )


@contextmanager
def whole_sums(device: torch.device) -> Iterator[None]:
    """Let no sum of a product be rounded to half precision on its way. Nothing changes while a graph is traced.

    Raises :class:`FdpError` if the workspace was changed (:func:`check_workspace`).
    """
    import torch

    if device.type != "cuda" or torch.compiler.is_compiling():
        yield
        return
    check_workspace()
    options = torch.backends.cuda.matmul
    before = {name: _setting(options, name) for name in HALF_PRECISION_SUMS}
    for name, setting in before.items():
        setattr(options, name, (False, *setting[1:]))
    try:
        yield
    finally:
        for name, setting in before.items():
            setattr(options, name, setting)


def compiler_options(backend: str, *, one_order: bool) -> dict[str, Any] | None:
    """Return options of torch.compile by which, if ``one_order``, every process adds up sums in one order.

    By default that order may be chosen by the time it takes. In a sharded run one more sample brings others to another
    rank, where they have to be rounded alike; a run that is to be repeatable has to choose the same each time.
    Otherwise any order will do, and the default is faster (by 2 % of a step of gpt2).
    """
    if not one_order or backend != "inductor":
        return None  # no other backend takes them
    from torch._inductor import config

    return {name: True for name in ("deterministic", "batch_invariant") if hasattr(config, name)}


def _setting(options: Any, name: str) -> tuple[bool, ...]:
    """Return whether sums may be rounded, and whether they may be split: torch forgets the second if only the first is
    set."""
    return getattr(options, name), getattr(options, f"{name}_split_k")
