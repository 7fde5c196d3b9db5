"""Many ranks without processes: collectives that move nothing, for tests that look at what would travel and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_ranks(count: int, *, rank: int = 0) -> Iterator[None]:
    """This process as ``rank`` of ``count``; what the others would send is whatever memory holds."""
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
