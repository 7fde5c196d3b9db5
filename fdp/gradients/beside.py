"""Work on a second CUDA stream, beside the main one: it fills multiprocessors that the main stream leaves idle.

    main   backward 12 | backward 11 | backward 10 | ...  | join
    side                 norms 12    | norms 11    | ...  |

The backward of a block needs nothing from the norms of the one before. A kernel seldom has work for all
multiprocessors to its very end, and a kernel that only moves memory leaves the tensor cores idle: products of the other
stream run there. In a recorded step the two streams are branches of the graph.

    >>> beside = Beside(device)
    >>> with beside.branch():                            # starts after everything that the main stream was given so far
    ...     squared = norms(records)
    >>> beside.join()                                    # from here on the main stream may read squared

A caller must hold what a branch reads until it joins: freed memory belongs to the main stream at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """A second stream of a CUDA device; elsewhere, and in a graph of torch.compile, a branch is run in place.

    ``is_open``: the second stream has work that the main one has not waited for.
    """

    def __init__(self, device: torch.device):
        self._side = _side_stream(device)
        self.is_open = False

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Run what is inside on the second stream, after everything that the main stream was given so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        self.is_open = True
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Let the main stream wait for all branches."""
        if self.is_open:
            assert self._side is not None
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
            self.is_open = False


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda" or torch.compiler.is_compiling():
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
