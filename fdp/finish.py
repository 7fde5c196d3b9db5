"""The end of a step: add the noise, divide by the expected batch size, update the parameters.

noise   total + z C N(0, I)                             one draw per element, once per step
mean    / B                                             the public expected batch size
update  params + optimizer(mean)

There are two implementations of one signature: :func:`plain_finish`, leaf by leaf for any optimizer and placement, and
:class:`fdp.fast.fused_update.FusedUpdate`, one pass over every leaf.

>>> finish = plain_finish(model, optimizer, mechanism, execution)
>>> state = finish.run(state, total, tally, key)         # key: that of this step's noise
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fdp import tree
from fdp.cpu.adamw import next_params
from fdp.gradients.execution import LOCAL, Execution
from fdp.gradients.lazy_sum import LazySum, take
from fdp.model import Model
from fdp.optimizers import LOCAL as LOCAL_REDUCTIONS
from fdp.optimizers import Optimizer
from fdp.optimizers.foreach import groups_of
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.offload import CPU, like_on_cpu, to_cpu
from fdp.parallel.sharded_norms import sharded_reductions
from fdp.parallel.sharding import shard_windows
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.noise import add_noise, expected_mean
from fdp.types import ClippedSum, Flat, Key, Path, ShardWindow, TrainState, Tree

ELEMENTS_AT_A_TIME = 1 << 24
"""Elements of an offloaded leaf, if it is not a shard, that a GPU noises at a time: 128 MiB in float64."""


Then: TypeAlias = Callable[[Path, Tensor], Tensor]
"""What is done with a noised leaf, and returned in its place."""


class NoiseAdder(Protocol):
    """``noise(total, key, then)``: see :func:`noise_adder`."""

    def __call__(self, total: ClippedSum, key: Key, then: Then = ...) -> Flat: ...


class Finish(NamedTuple):
    """Everything after the sum over all ranks.

    ``run(state, total, tally, key)`` returns the next state and uses up ``total``; ``tally`` is the count that adaptive
    clipping adds noise to. ``noise_added(before, total, key, after)`` returns the
    noise that ``run`` added to the sum, given as tensors, for those who look between the stages of a step.
    """

    run: Callable[[TrainState, ClippedSum, Tensor, Key], TrainState]
    noise_added: Callable[[TrainState, ClippedSum, Key, TrainState], Flat]


def plain_finish(model: Model, optimizer: Optimizer, mechanism: Mechanism, execution: Execution = LOCAL) -> Finish:
    """Return the end of a step, leaf by leaf: ``add_noise``, ``expected_mean``, ``next_params``.

    Guarantees:
      - the state depends on the sum only through its noised value, and on the tally only through its own noise;
      - every full-precision sum is freed as soon as it is noised.
    """
    sharding, expected = execution.sharding, mechanism.sampling.expected_batch_size
    reductions = LOCAL_REDUCTIONS if sharding is None else sharded_reductions(sharding)
    noise = noise_adder(mechanism, execution)

    def run(state: TrainState, total: ClippedSum, tally: Tensor, key: Key) -> TrainState:
        mean = noisy_mean(noise, mechanism, total, key, state.params)
        flat = tree.flatten(state.params)
        trained = {path: leaf.to(mean[path].device) for path, leaf in flat.items() if path in model.trainable}
        after, opt = next_params(optimizer, mean, state.opt, trained, reductions)
        changed = {path: leaf.to(flat[path].device) for path, leaf in after.items()}
        clip = mechanism.clip.update(state.clip, sum_over_samples(sharding, tally), key, expected)
        return TrainState(tree.unflatten(state.params, flat | changed), opt, clip, state.step + 1)

    def noise_added(before: TrainState, total: ClippedSum, key: Key, after: TrainState) -> Flat:
        noisy = noise(total, key)
        return {path: leaf - total.value[path].to(leaf) for path, leaf in noisy.items()}

    return Finish(run, noise_added)


def noise_adder(mechanism: Mechanism, execution: Execution = LOCAL) -> NoiseAdder:
    """Return ``noise(total, key, then)``: ``then(path, leaf)`` of every noised leaf, where the optimizer's state is.

    ``then`` runs where the noise is drawn; the default leaves the noised sum as it is.
    """
    windows = None if execution.sharding is None else shard_windows(execution.sharding)
    on_cpu = execution.memory.offload.optimizer

    def noise(total: ClippedSum, key: Key, then: Then = _as_it_is) -> Flat:
        home, z = CPU if on_cpu else key.device, mechanism.noise_multiplier
        if z == 0:  # asked for explicitly, see checks.gate.check_settings
            return {path: then(path, to_cpu(leaf) if on_cpu else leaf.to(home)) for path, leaf in total.value.items()}
        if on_cpu and (faster := total.sensitivity.device) != home:
            key = key.to(faster)
            return {path: _noised_by(key, total, path, z, windows, then) for path in total.value}
        value = {path: leaf.to(home) for path, leaf in total.value.items()}
        noisy = add_noise(total._replace(value=value), key=key.to(home), noise_multiplier=z, shard_windows=windows)
        return {path: then(path, leaf) for path, leaf in noisy.items()}

    return noise


def _as_it_is(path: Path, leaf: Tensor) -> Tensor:
    return leaf


def _noised_by(
    key: Key,
    total: ClippedSum,
    path: Path,
    noise_multiplier: float,
    windows: Mapping[Path, ShardWindow] | None,
    then: Then = _as_it_is,
) -> Tensor:
    """Return ``then`` of one leaf of ``add_noise`` on the CPU, computed where the key is, a piece at a time."""
    leaf = total.value[path]

    def noised(part: Tensor, place: ShardWindow | None) -> Tensor:
        there = part.to(key.device, non_blocking=True)
        alone, places = total._replace(value={path: there}), None if place is None else {path: place}
        return then(path, add_noise(alone, key=key, noise_multiplier=noise_multiplier, shard_windows=places)[path])

    if windows is not None or leaf.numel() <= ELEMENTS_AT_A_TIME or torch.compiler.is_compiling() or leaf.is_meta:
        return to_cpu(noised(leaf, None if windows is None else windows[path]))
    noisy: Tensor | None = None
    for start, piece in zip(range(0, leaf.numel(), ELEMENTS_AT_A_TIME), leaf.flatten().split(ELEMENTS_AT_A_TIME)):
        part = noised(piece, ShardWindow((leaf.numel(),), ((start, len(piece)),)))
        noisy = like_on_cpu(part, leaf.shape) if noisy is None else noisy
        noisy.view(-1)[start : start + len(part)] = part
    assert noisy is not None
    return noisy


def noisy_mean(noise: NoiseAdder, mechanism: Mechanism, total: ClippedSum, key: Key, params: Tree) -> Flat:
    """Return the noised sum over the expected batch size, leaf by leaf, in float32 at least. Uses up ``total``."""
    flat, mean = tree.flatten(params), {}

    def mean_of(path: Path, noisy: Tensor) -> Tensor:
        (leaf,) = expected_mean({path: noisy}, mechanism.sampling).values()
        return leaf.to(torch.promote_types(flat[path].dtype, torch.float32))

    for paths in _group_small_leaves(total.value):
        values = {path: take(total.value, path) for path in paths}
        for path, value in values.items():
            values[path] = value.evaluate() if isinstance(value, LazySum) else value
        mean |= noise(total._replace(value=values), key, mean_of)
        del value, values
    return mean


def _group_small_leaves(values: dict[Path, Any]) -> list[list[Path]]:
    """Return the paths in groups: on a CPU, leaves share a pass of the noise until it is large enough."""
    rows = [value.rows[0] if isinstance(value, LazySum) else value for value in values.values()]
    share = all(row.device.type == "cpu" for row in rows)
    return [list(values)[group] for group in groups_of([row.numel() for row in rows], share=share)]
