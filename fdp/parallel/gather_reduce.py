"""What travels between ranks: a block's weights on their way in, its sums on their way out, a few numbers per sample.

The leaves of one block travel together: one gather in the compute dtype, one reduce-scatter of their sums.

    gather           whole_k = parts of leaf k from all ranks of ``shard``
    reduce-scatter   this rank's part of  sum over ranks of S_k;  then summed over ``replicate``

Each is begun and finished by different functions, so that other work goes on in between. With no sharding they move
nothing but, where parameters are kept on the CPU, the weights themselves.

    >>> pending = start_gather(sharding, paths, parts, dtype=torch.bfloat16, device=device, token=activation)
    >>> weights = finish_gather(sharding, pending)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdp import tree
from fdp.model import Model
from fdp.parallel import collectives
from fdp.parallel.sharding import Data, Sharding
from fdp.types import Axis, Flat, Norms, Path, Tree


class Pending(NamedTuple):
    """A block's weights on their way: those that are whole already, and the bucket of all ranks' parts of the rest."""

    whole: Flat
    cut: tuple[Path, ...]
    bucket: Tensor | None


class PendingSums(NamedTuple):
    """A block's sums on their way: the cut ones scattered over ``shard``, the others reduced over it."""

    sums: Flat
    cut: tuple[Path, ...]
    scattered: Tensor | None
    reduced: Tensor | None


def start_gather(
    sharding: Sharding | None,
    paths: Sequence[Path],
    parts: Flat,
    *,
    dtype: torch.dtype,
    device: torch.device,
    token: Tree,
) -> Pending:
    """Begin to make the whole leaves ``paths`` in the compute dtype on ``device``; one collective for all of them.

    The cast comes first, so that what travels is of the compute dtype. ``token`` is an activation that must exist
    before the gather may start: it keeps the gather at its place in a compiled graph.
    """
    local = {path: parts[path].to(dtype).to(device, non_blocking=True) for path in paths}
    cut = tuple(path for path in local if sharding is not None and sharding.leaves[path].cut_by("shard"))
    whole = {path: leaf for path, leaf in local.items() if path not in cut}
    if sharding is None or not cut:
        return Pending(whole, (), None)
    bucket = torch.cat([_padded(local[path], sharding.leaves[path].padded) for path in cut])
    tokens = [leaf for leaf in tree.leaves(token) if isinstance(leaf, Tensor)]
    bucket = collectives.after(bucket, tokens[0]) if tokens else bucket
    return Pending(whole, cut, collectives.all_gather(bucket, sharding.shard))


def finish_gather(sharding: Sharding | None, pending: Pending) -> Flat:
    """The whole leaves, once they have arrived."""
    if sharding is None or pending.bucket is None:
        return pending.whole
    bucket = collectives.wait(pending.bucket).view(sharding.shard.size, -1)
    arrived = {}
    for path, part in zip(pending.cut, bucket.split([sharding.leaves[path].padded for path in pending.cut], dim=1)):
        shape = sharding.leaves[path].whole
        arrived[path] = part.reshape(-1)[: math.prod(shape)].view(shape)
    return pending.whole | arrived


def start_reduce(sharding: Sharding | None, sums: Flat) -> PendingSums:
    """Begin to add up the sums of one block over all ranks with different samples; each rank will get its part."""
    if sharding is None or sharding.data is Data.REPLICATED or not sums:
        return PendingSums(sums, (), None, None)
    cut = tuple(path for path in sums if sharding.leaves[path].cut_by("shard"))
    whole = [path for path in sums if path not in cut]
    scattered = reduced = None
    dtype = sharding.reduce_dtype or next(iter(sums.values())).dtype
    if cut:
        ranks = sharding.shard.size
        columns = [_padded(sums[path], ranks * sharding.leaves[path].padded).view(ranks, -1) for path in cut]
        scattered = collectives.reduce_scatter(torch.cat(columns, dim=1).flatten().to(dtype), sharding.shard)
    if whole:
        bucket = torch.cat([sums[path].flatten() for path in whole]).to(dtype)
        reduced = collectives.all_reduce(bucket, sharding.shard) if sharding.shard.size > 1 else bucket
    # Of the sums themselves only dtype and shape are needed from here on.
    return PendingSums(
        {path: sums[path].new_empty(()).expand(sums[path].shape) for path in sums}, cut, scattered, reduced
    )


def finish_reduce(sharding: Sharding | None, pending: PendingSums) -> Flat:
    """This rank's part of the **sum** over all ranks with different samples, in the dtype of the sums."""
    sums, cut = pending.sums, pending.cut
    if sharding is None or not sums:
        return sums
    if sharding.data is Data.REPLICATED:  # every rank has the whole sum already
        return {path: _own_rows(sums[path], path, sharding) for path in sums}
    local: Flat = {}
    if pending.scattered is not None:
        arrived = _all_reduced(collectives.wait(pending.scattered), (sharding.replicate,))
        for path, part in zip(cut, arrived.split([sharding.leaves[path].padded for path in cut])):
            size = sharding.leaves[path].part
            local[path] = part[: math.prod(size)].view(size).to(sums[path].dtype)
    if pending.reduced is not None:
        whole = [path for path in sums if path not in cut]
        arrived = collectives.wait(pending.reduced) if sharding.shard.size > 1 else pending.reduced
        arrived = _all_reduced(arrived, (sharding.replicate,))
        for path, part in zip(whole, arrived.split([sums[path].numel() for path in whole])):
            local[path] = part.view(sums[path].shape).to(sums[path].dtype)
    return {path: local[path] for path in sums}


def reduced(sharding: Sharding | None, stream: Iterator[Flat], *, device: torch.device | None) -> Flat:
    """All blocks' sums, each reduced while the next one is made; kept on ``device`` (None: where they are)."""
    total: Flat = {}
    flying: PendingSums | None = None
    for sums in stream:
        started = start_reduce(sharding, sums)
        if flying is not None:
            total |= _moved(finish_reduce(sharding, flying), device)
        flying, sums = started, {}
    if flying is not None:
        total |= _moved(finish_reduce(sharding, flying), device)
    return total


def gather_all(
    sharding: Sharding | None, model: Model, params: Tree, *, dtype: torch.dtype, device: torch.device
) -> Tree:
    """Every leaf gathered over ``shard``, block by block, all on their way before the first is waited for."""
    flat = tree.flatten(params)
    pending = [
        start_gather(sharding, owned(model, i), flat, dtype=dtype, device=device, token=())
        for i in range(len(model.blocks))
    ]
    whole = {path: leaf for block in pending for path, leaf in finish_gather(sharding, block).items()}
    return tree.unflatten(params, whole)


def reduce_all(sharding: Sharding | None, model: Model, sums: Flat) -> Flat:
    """This rank's part of every leaf's sum over all ranks, block by block."""
    blocks = ({path: sums[path] for path in owned(model, i) if path in sums} for i in range(len(model.blocks)))
    total = reduced(sharding, blocks, device=None)
    return {path: total[path] for path in sums}


def owned(model: Model, i: int) -> list[Path]:
    """The leaves whose first block is ``i``: in a backward, the block after which their sums are complete."""
    earlier = {path for block in model.blocks[:i] for path in tree.leaves(block.params)}
    return [path for path in dict.fromkeys(tree.leaves(model.blocks[i].params)) if path not in earlier]


def sum_over_samples(sharding: Sharding | None, x: Tensor) -> Tensor:
    """The sum of ``x`` over all ranks that hold different samples."""
    if sharding is None or sharding.data is Data.REPLICATED:
        return x
    return _all_reduced(x, (sharding.shard, sharding.replicate))


def sum_over_parts(sharding: Sharding | None, norms: Norms) -> Norms:
    """Squared norms of whole leaves from those of the parts that ranks of ``tensor`` compute with; one collective.

    Ranks along the data axes hold other samples and are never summed over; a leaf that is not cut is counted once.
    """
    cut = [path for path in norms.squared if sharding is not None and sharding.leaves[path].cut_by("tensor")]
    if sharding is None or not cut:
        return norms
    summed = _all_reduced(torch.stack([norms.squared[path] for path in cut]), (sharding.tensor,))
    return Norms(norms.squared | dict(zip(cut, summed.unbind())))


def gather_samples(sharding: Sharding | None, x: Tensor) -> Tensor:
    """Per-sample values ``(microbatches, this rank's samples)`` as ``(microbatches, all samples)``, in global order."""
    if sharding is None or sharding.ranks == 1:
        return x
    columns = x.t().contiguous()
    for axis in (sharding.shard, sharding.replicate):
        if axis.size > 1:
            shape = (axis.size * columns.shape[0], columns.shape[1])
            columns = collectives.wait(collectives.all_gather(columns.flatten(), axis)).view(shape)
    return columns.t()


def _all_reduced(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        x = collectives.wait(collectives.all_reduce(x, axis)) if axis.size > 1 else x
    return x


def _own_rows(whole: Tensor, path: Path, sharding: Sharding) -> Tensor:
    leaf = sharding.leaves[path]
    if not leaf.cut_by("shard"):
        return whole
    rows = -(-leaf.whole[0] // sharding.shard.size)
    return whole.narrow(0, min(sharding.shard.rank * rows, leaf.whole[0]), leaf.part[0]).clone()


def _moved(flat: Flat, device: torch.device | None) -> Flat:
    return flat if device is None else {path: leaf.to(device) for path, leaf in flat.items()}


def _padded(x: Tensor, size: int) -> Tensor:
    return torch.cat([x.flatten(), x.new_zeros(size - x.numel())]) if x.numel() < size else x.flatten()
