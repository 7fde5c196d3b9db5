"""Out of memory in a step: an error that says what was done and which size to use, instead of half a step.

Until the end of a step begins (noise, mean, update), nothing of the state has changed, and the same step can be made
again with smaller microbatches: the same draw, the same noise. From then on it is never made again: its batch would be
noised twice. The end marks that it begins; a traceback cannot tell, since the replay of a CUDA graph has no frames.

    >>> mark = EndMark()                                     # mark.set() just before the state is changed
    >>> step = explain_out_of_memory(step, mark)
    >>> try: step(state, batch, key)
    ... except OutOfMemory as error: smaller = error.size // 2
"""

from __future__ import annotations

from collections.abc import Callable
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


class EndMark:
    """Tell whether the end of the step that runs, which changes the state, has begun."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Note that the end begins: call it just before the end is called or replayed."""
        if not torch.compiler.is_compiling():
            self.is_set = True


def explain_out_of_memory(step: Callable[..., Any], mark: EndMark) -> Callable[..., Any]:
    """Return the step, with an error that says what to do if it runs out of memory.

    Guarantees:
      - :class:`OutOfMemory` is raised only if ``mark`` was not set: the state is what it was;
      - memory that runs out later, also after the update, is another error, which says that the step was made.
    """

    def explained(state: TrainState, batch: Batch, key: Key) -> Any:
        if torch.compiler.is_compiling():
            return step(state, batch, key)
        mark.is_set = False
        try:
            return step(state, batch, key)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size = max(len(mask) for _, mask in split_microbatches(batch))
            if not mark.is_set:
                raise OutOfMemory(size) from error
            raise FdpError(
                f"microbatch_size: out of memory in or after the update, beside microbatches of {size} samples; the "
                "step was made, at least in part, and is not made again, since its batch would be noised twice: resume "
                f"from the last checkpoint with --microbatch {max(1, size // 2)}, or --offload optimizer"
            ) from error

    return explained


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error, or an earlier one that led to it, is out of memory: a failed recording hides it."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__context__))
