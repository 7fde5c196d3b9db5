"""Exchanges of a step between ranks: all-gather of a block's weights, reduce-scatter of its sums, per-sample values.

All leaves of a block share one bucket: one gather in the compute dtype, one reduce-scatter of their sums.

    gather           full leaf k = shards of leaf k from all ranks of ``shard``
    reduce-scatter   this rank's shard of  sum over ranks of S_k;  then summed over ``replicate``

Starting and finishing are separate functions, so that other work overlaps with the exchange. Without a sharding they
only move weights that live on the CPU to the device.

    >>> pending = start_gather(sharding, paths, parts, dtype=torch.bfloat16, device=device, token=activation)
    >>> weights = finish_gather(sharding, pending)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdp import tree
from fdp.model import Model
from fdp.parallel import collectives
from fdp.parallel.offload import CPU, send, to_cpu
from fdp.parallel.sharding import Data, Sharding
from fdp.types import Axis, Flat, Norms, Path, Tree


class PendingGather(NamedTuple):
    """A gather in flight: leaves that are already full, and the bucket with all ranks' shards of the others."""

    full: Flat
    sharded: tuple[Path, ...]
    bucket: Tensor | None


class PendingReduce(NamedTuple):
    """A reduction in flight: sharded leaves reduce-scattered over ``shard``, the others all-reduced over it.

    ``like`` has the shape and dtype of every sum.
    """

    like: Flat
    sharded: tuple[Path, ...]
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
) -> PendingGather:
    """Start to gather the leaves ``paths`` in the compute dtype on ``device``, with one collective for all of them.

    Leaves are cast before ranks exchange them. ``token`` is an activation that must exist before the gather
    may start: it keeps the gather at its place in a compiled graph.
    """
    local = {path: send(parts[path], dtype, device) for path in paths}
    sharded = tuple(path for path in local if sharding is not None and sharding.leaves[path].is_sharded_over("shard"))
    full = {path: leaf for path, leaf in local.items() if path not in sharded}
    if sharding is None or not sharded:
        return PendingGather(full, (), None)
    bucket = torch.cat([_pad_flat(local[path], sharding.leaves[path].padded_numel) for path in sharded])
    tokens = [leaf for leaf in tree.leaves(token) if isinstance(leaf, Tensor)]
    bucket = collectives.after(bucket, tokens[0]) if tokens else bucket
    return PendingGather(full, sharded, collectives.all_gather(bucket, sharding.shard))


def finish_gather(sharding: Sharding | None, pending: PendingGather) -> Flat:
    """Wait for a gather and return the full leaves."""
    if sharding is None or pending.bucket is None:
        return pending.full
    bucket = collectives.wait(pending.bucket).view(sharding.shard.size, -1)
    sizes = [sharding.leaves[path].padded_numel for path in pending.sharded]
    arrived = {}
    for path, part in zip(pending.sharded, bucket.split(sizes, dim=1)):
        shape = sharding.leaves[path].gathered_shape
        arrived[path] = part.reshape(-1)[: math.prod(shape)].view(shape)
    return pending.full | arrived


def start_reduce(sharding: Sharding | None, sums: Flat) -> PendingReduce:
    """Start to sum one block's sums over all ranks with different samples; each rank will get its shard."""
    if sharding is None or sharding.data is Data.REPLICATED or not sums:
        return PendingReduce(sums, (), None, None)
    sharded = tuple(path for path in sums if sharding.leaves[path].is_sharded_over("shard"))
    full = [path for path in sums if path not in sharded]
    scattered = reduced = None
    dtype = sharding.reduce_dtype or next(iter(sums.values())).dtype
    if sharded:
        ranks = sharding.shard.size
        columns = [
            _pad_flat(sums[path], ranks * sharding.leaves[path].padded_numel).view(ranks, -1) for path in sharded
        ]
        scattered = collectives.reduce_scatter(torch.cat(columns, dim=1).flatten().to(dtype), sharding.shard)
    if full:
        bucket = torch.cat([sums[path].flatten() for path in full]).to(dtype)
        reduced = collectives.all_reduce(bucket, sharding.shard) if sharding.shard.size > 1 else bucket
    # Keep only dtype and shape of the sums, so that their memory can be freed.
    like = {path: sums[path].new_empty(()).expand(sums[path].shape) for path in sums}
    return PendingReduce(like, sharded, scattered, reduced)


def finish_reduce(sharding: Sharding | None, pending: PendingReduce) -> Flat:
    """Return this rank's shard of the **sum** over all ranks with different samples, in the dtype of the sums."""
    like, sharded = pending.like, pending.sharded
    if sharding is None or not like:
        return like
    if sharding.data is Data.REPLICATED:  # every rank has the full sum already
        return {path: _local_rows(like[path], path, sharding) for path in like}
    local: Flat = {}
    if pending.scattered is not None:
        arrived = _all_reduce(collectives.wait(pending.scattered), (sharding.replicate,))
        for path, part in zip(sharded, arrived.split([sharding.leaves[path].padded_numel for path in sharded])):
            size = sharding.leaves[path].local_shape
            local[path] = part[: math.prod(size)].view(size).to(like[path].dtype)
    if pending.reduced is not None:
        full = [path for path in like if path not in sharded]
        arrived = collectives.wait(pending.reduced) if sharding.shard.size > 1 else pending.reduced
        arrived = _all_reduce(arrived, (sharding.replicate,))
        for path, part in zip(full, arrived.split([like[path].numel() for path in full])):
            local[path] = part.view(like[path].shape).to(like[path].dtype)
    return {path: local[path] for path in like}


def reduce_stream(
    sharding: Sharding | None,
    stream: Iterator[Flat],
    *,
    device: torch.device | None,
    store: Callable[[Flat], Flat] = dict,
) -> Flat:
    """Reduce each block's sums while the next block's are computed, on ``device`` (None: where they are).

    ``store(sums)`` gets a block's reduced sums and returns what is to be stored of them.
    """
    total: Flat = {}
    in_flight: PendingReduce | None = None
    for sums in stream:
        started = start_reduce(sharding, sums)
        if in_flight is not None:
            total |= store(_move(finish_reduce(sharding, in_flight), device))
        in_flight, sums = started, {}
    if in_flight is not None:
        total |= store(_move(finish_reduce(sharding, in_flight), device))
    return total


def gather_all(
    sharding: Sharding | None, model: Model, params: Tree, *, dtype: torch.dtype, device: torch.device
) -> Tree:
    """Gather every leaf over ``shard``, block by block; all gathers start before the first is waited for."""
    flat = tree.flatten(params)
    pending = [
        start_gather(sharding, owned_paths(model, i), flat, dtype=dtype, device=device, token=())
        for i in range(len(model.blocks))
    ]
    full = {path: leaf for block in pending for path, leaf in finish_gather(sharding, block).items()}
    return tree.unflatten(params, full)


def reduce_all(sharding: Sharding | None, model: Model, sums: Flat) -> Flat:
    """Return this rank's shard of every leaf's sum over all ranks, reduced block by block."""
    blocks = ({path: sums[path] for path in owned_paths(model, i) if path in sums} for i in range(len(model.blocks)))
    total = reduce_stream(sharding, blocks, device=None)
    return {path: total[path] for path in sums}


def owned_paths(model: Model, i: int) -> list[Path]:
    """Return the leaves whose first block is ``i``; a backward pass has completed their sums after that block."""
    earlier = {path for block in model.blocks[:i] for path in tree.leaves(block.params)}
    return [path for path in dict.fromkeys(tree.leaves(model.blocks[i].params)) if path not in earlier]


def sum_over_samples(sharding: Sharding | None, x: Tensor) -> Tensor:
    """Sum ``x`` over all ranks that hold different samples."""
    if sharding is None or sharding.data is Data.REPLICATED:
        return x
    return _all_reduce(x, (sharding.shard, sharding.replicate))


def sum_over_tensor_axis(sharding: Sharding | None, norms: Norms) -> Norms:
    """Return the squared norms of full leaves from those of their shards along ``tensor``; one collective.

    Ranks along the data axes hold other samples and are never summed over; a leaf that is not split is counted once.
    """
    split = [path for path in norms.squared if sharding is not None and sharding.leaves[path].is_sharded_over("tensor")]
    if sharding is None or not split:
        return norms
    summed = _all_reduce(torch.stack([norms.squared[path] for path in split]), (sharding.tensor,))
    return Norms(norms.squared | dict(zip(split, summed.unbind())))


def gather_samples(sharding: Sharding | None, x: Tensor) -> Tensor:
    """Gather per-sample values (microbatches, local samples) to (microbatches, all samples), in global order."""
    if sharding is None or sharding.ranks == 1:
        return x
    columns = x.t().contiguous()
    for axis in (sharding.shard, sharding.replicate):
        if axis.size > 1:
            shape = (axis.size * columns.shape[0], columns.shape[1])
            columns = collectives.wait(collectives.all_gather(columns.flatten(), axis)).view(shape)
    return columns.t()


def _all_reduce(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        x = collectives.wait(collectives.all_reduce(x, axis)) if axis.size > 1 else x
    return x


def _local_rows(full: Tensor, path: Path, sharding: Sharding) -> Tensor:
    leaf = sharding.leaves[path]
    if not leaf.is_sharded_over("shard"):
        return full
    rows = -(-leaf.gathered_shape[0] // sharding.shard.size)
    start = min(sharding.shard.rank * rows, leaf.gathered_shape[0])
    return full.narrow(0, start, leaf.local_shape[0]).clone()


def _move(flat: Flat, device: torch.device | None) -> Flat:
    if device is None:
        return flat
    return {path: to_cpu(leaf) if device == CPU else leaf.to(device) for path, leaf in flat.items()}


def _pad_flat(x: Tensor, size: int) -> Tensor:
    return torch.cat([x.flatten(), x.new_zeros(size - x.numel())]) if x.numel() < size else x.flatten()
