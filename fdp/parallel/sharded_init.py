"""Initial parameters on many ranks: each rank draws its own shard, all from one key.

>>> params = init_params(model, shared_key(key, sharding), sharding)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fdp import keys, tree
from fdp.init import Initialiser
from fdp.model import Model
from fdp.parallel import collectives
from fdp.parallel.dtensors import as_dtensor
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError, Key, Path, Tree


def drawn_params(model: Model, sharding: Sharding | None, key: Key) -> Tree:
    """Draw the parameters of ``model`` from ``key``: plain tensors, or this rank's shards as DTensors.

    Its name is part of a run's fingerprint: renaming it would change the noise of a given seed.
    """
    return model.init(key) if sharding is None else init_params(model, key, sharding)


def init_params(
    model: Model,
    key: Key,
    sharding: Sharding,
    *,
    dtype: torch.dtype = torch.float32,
    inits: Mapping[Path, Initialiser] | None = None,
) -> Tree:
    """Return the parameters of ``model.init(key)`` as DTensors; each rank draws its own shard and nothing else.

    ``inits`` replaces the initialiser of the leaves it names.

    Guarantees:
      - keys that differ between ranks, from which samples would be drawn twice and noise not be shared, are refused.
    """
    _check_shared(key, sharding)
    own = {} if inits is None else dict(inits)
    if unknown := sorted(set(own) - set(model.leaves)):
        raise FdpError(f"inits: expected paths of leaves of {model.name}, got {unknown}")
    flat = {}
    for path, leaf in model.leaves.items():
        window = sharding.leaves[path].window
        local = own.get(path, leaf.init)(keys.fold_in(key, path), leaf.shape, dtype=dtype, window=window)
        flat[path] = as_dtensor(local, path, sharding)
    return tree.nest(flat)


def shared_key(key: Key, sharding: Sharding) -> Key:
    """Return the first rank's key on every rank. A key from the operating system differs between processes."""
    return collectives.wait(collectives.broadcast(key, sharding.world))


def _check_shared(key: Key, sharding: Sharding) -> None:
    differs = (shared_key(key, sharding) != key).any().long().reshape(1)
    if bool(collectives.wait(collectives.all_reduce(differs, sharding.world))):
        raise FdpError("key: expected the same key on every rank, got different ones; use shared_key(key, sharding)")
