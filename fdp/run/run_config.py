"""The configuration of a training run, and the checks of it that nothing further down makes.

>>> config = RunConfig(model=model, dataset=dataset, method=Method.AUTO, ...)
>>> check_config(config)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fdp import tree
from fdp.arguments import nonnegative_number, probability, whole_number
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method
from fdp.kfac.private.curvature_sources import KfacOptimizer, check_source
from fdp.model import Model
from fdp.optimizers import Optimizer
from fdp.parallel import launch
from fdp.parallel.offload import NO_OFFLOAD, Offload
from fdp.parallel.sharded_init import drawn_params
from fdp.parallel.sharding import Data, Reduce, Sharding, Zero
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.guarantee import Guarantee
from fdp.privacy.microbatches import Dataset, sizes_from
from fdp.privacy.releases import Release
from fdp.run.evaluation_config import EvaluationConfig
from fdp.types import FdpError, Key, Tree

LEAST_NOISE_FOR_INT8 = 0.1
"""With less noise, rounding a gradient by up to 9 % of its norm could show in what is trained."""


class Layout(NamedTuple):
    """The distribution of a run over several ranks: the sizes of the mesh's axes, and what is sharded along them.

    ``timeout`` is how many seconds a rank waits for another; None: torch's default.
    """

    axes: Mapping[str, int]
    zero: Zero
    data: Data = Data.SPLIT
    reduce: Reduce | None = None
    reduce_dtype: torch.dtype | None = None
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that decides a run.

    Exactly one of ``noise_multiplier`` and ``epsilon`` is given; with ``Method.NONE``, neither. ``batch_size`` is the
    expected batch size of Poisson sampling. ``population`` is the public number of samples for its rate; None: the
    number of samples, rounded up. ``seed=None`` draws a key from the system. ``values`` gives the first parameters;
    ``before`` lists guarantees about the data that these were trained on. ``epsilon`` covers ``spent``, releases of
    earlier runs on the same data, too. ``evaluation`` changes no parameter. ``ema`` is the decay of an average of the
    parameters, which is then the result (``fdp.run.averaging``).

    ``microbatch_size``, ``smaller_microbatches`` (the end of a batch may have smaller sizes, so that less of it is
    padding), ``memory_budget`` (bytes), ``compile``, ``compile_backend``, ``cuda_graph``, ``repeatable``, ``device``,
    ``layout`` (None: one process), ``offload`` and ``checkpoint_activations`` change how a run computes, not what.
    ``sum_dtype`` float32 rounds private sums, and adds noise that covers the rounding. ``stored_dtype`` int8 lets
    ``auto`` store gradients in 8 bits, before norms are taken; with ``stored_by_default`` nobody asked for it, and too
    little noise to hide the rounding means that it is left out, not refused.
    """

    model: Model
    dataset: Dataset
    method: Method
    clip: ClipStyle
    noise_multiplier: float | None
    epsilon: float | None
    delta: float
    batch_size: int
    steps: int
    optimizer: Optimizer | KfacOptimizer
    seed: int | None
    dtype: torch.dtype
    microbatch_size: int
    memory_budget: float | None
    compile: Compile
    device: torch.device
    layout: Layout | None = None
    offload: Offload = NO_OFFLOAD
    checkpoint_activations: bool = False
    cuda_graph: bool = False
    compile_backend: str = "inductor"
    sum_dtype: torch.dtype = torch.float64
    stored_dtype: torch.dtype | None = None
    stored_by_default: bool = False
    values: Callable[[Model, Sharding | None, Key], Tree] = drawn_params
    population: int | None = None
    before: tuple[Guarantee, ...] = ()
    spent: tuple[Release, ...] = ()
    evaluation: EvaluationConfig | None = None
    ema: float | None = None
    smaller_microbatches: bool = False
    repeatable: bool = False

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The sizes of microbatches, largest first."""
        if not self.smaller_microbatches:
            return (self.microbatch_size,)
        return sizes_from(self.microbatch_size, expected=self.batch_size)


def check_config(config: RunConfig) -> None:
    """Check what nothing further down does: counts, and that privacy is asked for in exactly one way."""
    for name in ("steps", "microbatch_size"):
        whole_number(name, getattr(config, name))
    probability("delta", config.delta, advice="; below 1 / samples is usual")
    if config.noise_multiplier is not None:
        nonnegative_number("noise multiplier", config.noise_multiplier)
    if config.method is Method.NONE and (config.epsilon is not None or config.noise_multiplier):
        raise FdpError("method none trains without privacy: expected no epsilon and no noise; leave them out")
    if config.method is not Method.NONE and (config.epsilon is None) == (config.noise_multiplier is None):
        raise FdpError("privacy: expected either an epsilon or a noise multiplier, got both or neither")
    if isinstance(config.optimizer, KfacOptimizer):
        check_source(config.optimizer, private=config.method is not Method.NONE)
    if config.layout is None and launch.world_size() > 1:
        raise FdpError(
            f"mesh: expected the axes of a mesh for {launch.world_size()} processes, such as "
            f"shard={launch.world_size()}, got none; each would train, and spend, on its own"
        )


def round_only_under_noise(config: RunConfig, noise_multiplier: float) -> RunConfig:
    """Return the configuration, without gradients in 8 bits if too little noise hides the rounding.

    A run that was asked to round is refused then, also if a large budget is what so little noise follows from.
    """
    if config.stored_dtype is None or noise_multiplier >= LEAST_NOISE_FOR_INT8:
        return config
    if config.stored_by_default:
        return replace(config, stored_dtype=None)
    raise FdpError(
        f"--stored-dtype int8: expected noise, which hides that gradients are rounded, with a noise multiplier of "
        f"at least {LEAST_NOISE_FOR_INT8}, got {noise_multiplier:.7g}; leave it out"
    )


def check_example(model: Model, example: Tree) -> None:
    """Refuse sequences longer than the model's context, and samples with NaN or infinity."""
    tokens = example.get("tokens") if isinstance(example, dict) else None
    if tokens is not None and model.context is not None and tokens.shape[-1] - 1 > model.context:
        raise FdpError(
            f"data: expected sequences of at most the {model.context} tokens of {model.name}'s context, "
            f"got {tokens.shape[-1] - 1}; cut the data into shorter windows"
        )
    for path, leaf in tree.flatten(example).items():
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise FdpError(f"data {path}: holds NaN or infinity; repair or drop those samples")
