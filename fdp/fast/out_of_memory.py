"""Out of memory in a step: an error that says what was done and which size to use, instead of half a step.

Until the end of a step begins (noise, mean, update), nothing of the state has changed, and the same step can be made
again with smaller microbatches: the same draw, the same noise.

    >>> step = explain_out_of_memory(step, end=end)          # end: the function that changes the state
    >>> try: step(state, batch, key)
    ... except OutOfMemory as error: smaller = error.size // 2
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from fdp.privacy.microbatches import split_microbatches
from fdp.types import Batch, FdpError, Key, TrainState


class OutOfMemory(FdpError):
    """A microbatch of ``size`` samples did not fit, and nothing of the step was done."""

    def __init__(self, size: int) -> None:
        less = f"give {size // 2}" if size > 1 else "checkpoint activations, or offload (--offload all)"
        super().__init__(
            f"microbatch_size: out of memory with {size} samples at once; nothing of the step was done: {less}"
        )
        self.size = size


def explain_out_of_memory(step: Callable[..., Any], *, end: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step, with an error that says what to do if it runs out of memory.

    Guarantees:
      - :class:`OutOfMemory` is raised only if ``end`` was not called: the state is what it was.
    """

    def explained(state: TrainState, batch: Batch, key: Key) -> Any:
        if torch.compiler.is_compiling():
            return step(state, batch, key)
        try:
            return step(state, batch, key)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size = max(len(mask) for _, mask in split_microbatches(batch))
            if not _was_called(error, end):
                raise OutOfMemory(size) from error
            raise FdpError(
                f"microbatch_size: out of memory in the update, beside microbatches of {size} samples; the state may "
                f"be half written: resume from the last checkpoint with {max(1, size // 2)}, or --offload optimizer"
            ) from error

    return explained


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error, or an earlier one that led to it, is out of memory: a failed recording hides it."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__context__))


def _was_called(error: BaseException, function: Callable[..., Any]) -> bool:
    """Return True if the error, or one that led to it, came out of ``function``."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is function.__code__:
            return True
        trace = trace.tb_next
    return error.__context__ is not None and _was_called(error.__context__, function)
