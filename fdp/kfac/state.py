"""The plan of K-FAC (layers, forms, sizes) and its part of the training state.

KfacState   step, factors, preconditioners, number of measurements, number of failures

>>> plan = plan_kfac(model, microbatch, config=config, execution=execution, dtype=dtype)
>>> state = init_kfac_state(plan, dtype=torch.float32, device=device)
>>> found = find_kfac_state(train_state.opt)             # anywhere in a chain of optimizers
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fdp import tree
from fdp.gradients.execution import LOCAL, Execution
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.factor_forms import Form
from fdp.kfac.factor_storage import store_device
from fdp.kfac.form_policy import CostModel, FormRow, forms_of, plan_forms
from fdp.kfac.inversion.batched_inverse import BATCH_ENTRIES
from fdp.kfac.inversion.damped_inverse import Damping
from fdp.kfac.layers import Survey, survey
from fdp.kfac.measure.estimator import Estimator, Sharing, shard_of_samples
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.state_slots import (
    ColumnWindow,
    FactorSlot,
    PreconditionerSlot,
    RingSlot,
    SideSpec,
    empty_slot,
    identity_slot,
)
from fdp.kfac.types import Layer
from fdp.model import Model
from fdp.parallel.mesh import AXES
from fdp.parallel.sharding import Data, Sharding, abstract_params
from fdp.types import FdpError, Path, TrainState, Tree


class KfacState(NamedTuple):
    """The number of updates, the factors and preconditioners by the path of their layer's weight, and two counts.

    ``measured`` counts measurements. ``failures`` counts layers whose measurement was not finite or whose inversion
    failed; they keep their last preconditioner.
    """

    step: Int[Tensor, ""]
    factors: dict[Path, tuple[FactorSlot | None, FactorSlot | None]]
    maps: dict[Path, PreconditionerSlot]
    measured: Int[Tensor, ""]
    failures: Int[Tensor, ""]


class LayerPlan(NamedTuple):
    """The slots of a layer's two sides; ``product``: they are damped as one product."""

    left: SideSpec
    right: SideSpec
    product: bool


class KfacPlan(NamedTuple):
    """Everything that is fixed before training: settings, layers, forms and shapes, the same on every rank.

    ``shapes`` are those of a microbatch's leaves.
    """

    config: KfacConfig
    model: Model
    execution: Execution
    survey: Survey
    rows: tuple[FormRow, ...]
    layers: dict[Layer, LayerPlan]
    shapes: dict[Path, tuple[int, ...]]

    @property
    def sharding(self) -> Sharding | None:
        """Return the sharding of the model; None on one device."""
        return self.execution.sharding

    @property
    def estimator(self) -> Estimator:
        """Return the factors to measure, in the forms in which they are measured."""
        return Estimator(self.survey, forms_of(self.rows), self.config.fisher, self.config.sharing)

    @property
    def slot_estimator(self) -> Estimator:
        """Return the factors to measure, in the forms of their slots."""
        forms = {layer: (left.form, right.form) for layer, (left, right, _) in self.layers.items()}
        return self.estimator._replace(forms=forms)


def plan_kfac(
    model: Model,
    microbatch: Tree,
    *,
    config: KfacConfig,
    execution: Execution = LOCAL,
    dtype: torch.dtype = torch.float32,
    view: Callable[[Survey], Survey] = lambda found: found,
) -> KfacPlan:
    """Choose the layers to precondition and their forms, for this rank's microbatches of the given shapes and device.

    ``execution`` is that of the step; ``dtype`` is the compute dtype of a measurement. ``view`` transforms the survey
    of the model; ``fdp.kfac.private.separate_biases`` makes each bias a layer.
    """
    device, sharding = tree.leaves(microbatch)[0].device, execution.sharding
    found = view(survey(model, abstract_params(model, sharding, device=device), microbatch, dtype=dtype))
    column_bytes = 4 if config.column_dtype is None else config.column_dtype.itemsize
    rows = plan_forms(
        model,
        found,
        policy=config.policy,
        sharing=config.sharing,
        samples=shard_of_samples(sharding)[1] * found.plan.batch_size,
        costs=CostModel(config.via, config.factor_period, config.inverse_period, column_bytes),
    )
    layers = {}
    for layer, forms in forms_of(rows).items():
        left, right = (_side_spec(found, layer, forms, side, config, execution) for side in (0, 1))
        product = config.method is Damping.PRODUCT and left.form is right.form is Form.DENSE
        layers[layer] = LayerPlan(left, right, product)
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(microbatch).items()}
    return KfacPlan(config, model, execution, found, rows, layers, shapes)


def init_kfac_state(plan: KfacPlan, *, dtype: torch.dtype, device: torch.device) -> KfacState:
    """Return a state with empty factors and identity preconditioners."""
    config = plan.config
    factors, maps = {}, {}
    for layer, (left, right, product) in plan.layers.items():
        factors[layer.weight] = tuple(
            empty_slot(side, window=config.window, dtype=dtype, column_dtype=config.column_dtype, device=device)
            for side in (left, right)
        )
        maps[layer.weight] = identity_slot(
            left,
            right,
            window=config.window,
            product=product,
            ring=config.distribution is Distribution.RING,
            dtype=dtype,
            device=device,
        )
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return KfacState(zero, factors, maps, zero.clone(), zero.clone())


def find_kfac_state(opt: Tree) -> KfacState:
    """Return the only K-FAC state among the states of a chain of optimizers."""
    found = _kfac_states(opt)
    if len(found) != 1:
        raise FdpError(
            f"state: expected one K-FAC state in the optimizer's state, got {len(found)}; use kfac(...).optimizer"
        )
    return found[0]


def count_measurements(opt: Tree) -> int:
    """Return how often the curvature in an optimizer's state has been measured; 0 without K-FAC."""
    return sum(int(found.measured) for found in _kfac_states(opt))


def replace_kfac_state(opt: Tree, new: KfacState) -> Tree:
    """Return the optimizer's state with another K-FAC state."""
    if isinstance(opt, KfacState):
        return new
    if type(opt) is tuple:
        return tuple(replace_kfac_state(part, new) for part in opt)
    return opt


def move_factors(kf: KfacState, config: KfacConfig) -> KfacState:
    """Move factors to their storage device (``config.store``)."""
    size = sum(x.numel() * x.element_size() for x in tree.leaves(kf.factors))
    home = tree.leaves(kf.factors)[0].device if kf.factors else torch.device("cpu")
    away = store_device(config.store, size, home=home)
    return kf._replace(factors=tree.map(lambda x: x.to(away), kf.factors))


def inversion_bytes(plan: KfacPlan) -> int:
    """Estimate the peak memory of inversion, without factors and inverses: six times the matrices, in float64.

    Dense sides of a kind are batched (``fdp.kfac.inversion.batched_inverse.BATCH_ENTRIES``). Columns need the small
    matrix and a copy of themselves.
    """
    kinds: dict[tuple[int, ...], int] = {}
    peak = 0
    for left, right, _ in plan.layers.values():
        dense = tuple(side.size for side in (left, right) if side.form is Form.DENSE)
        kinds[dense] = kinds.get(dense, 0) + 1
        for side in (left, right):
            if side.form in (Form.COLUMNS, Form.SOFTMAX):
                columns = side.columns * plan.config.window
                peak = max(peak, 6 * 8 * columns**2 + 2 * 4 * side.size * columns)
    for sizes, count in kinds.items():
        entries = sum(n**2 for n in sizes)
        many = min(count, max(1, BATCH_ENTRIES // max(1, entries)))
        peak = max(peak, 6 * 8 * entries * many)
    return peak


def place_kfac_state(state: TrainState, plan: KfacPlan) -> TrainState:
    """Move factors to their storage device, and make the columns of a ring DTensors, sharded over ranks.

    Call it once, after ``init_state``. Otherwise factors stay with the parameters, and a checkpoint would contain the
    ring columns of the first rank only.
    """
    kf = move_factors(find_kfac_state(state.opt), plan.config)
    factors, maps = kf.factors, kf.maps
    sharding = plan.sharding
    if plan.config.distribution is Distribution.RING and sharding is not None and sharding.world.size > 1:
        factors = {path: tuple(_shard_window(slot, sharding) for slot in both) for path, both in factors.items()}
        maps = {path: type(both)(*(_shard_map(m, sharding) for m in both)) for path, both in maps.items()}
    return state._replace(opt=replace_kfac_state(state.opt, kf._replace(factors=factors, maps=maps)))


def _side_spec(
    survey: Survey,
    layer: Layer,
    forms: tuple[Form, Form],
    side: int,
    config: KfacConfig,
    execution: Execution,
) -> SideSpec:
    form, size, groups = forms[side], survey.shapes[layer][side], survey.groups(layer)
    if form not in (Form.COLUMNS, Form.SOFTMAX):
        return SideSpec(form, size if side == 0 else size * groups, 0, groups)
    # With the exact Fisher information, gradients have a row for every backward, while inputs are added once.
    scores = survey.scores_shape or (1, 1)
    passes = math.prod(scores[1:]) if config.fisher is Fisher.EXACT else 1
    tokens: dict[bool, int] = {}  # of inputs (True) and of gradients; a tied leaf has both
    for use in survey.uses[layer]:
        inputs = use.inputs_left == (side == 0)
        tokens[inputs] = tokens.get(inputs, 0) + use.tokens
    rows = tokens if config.sharing is Sharing.EXPAND else dict.fromkeys(tokens, 1)
    positions = sum(count if inputs else passes * count for inputs, count in rows.items())
    if form is Form.SOFTMAX:
        positions = math.prod(scores[1:-1])
    own = survey.plan.batch_size * positions
    ring = config.distribution is Distribution.RING
    ranks = shard_of_samples(execution.sharding)[1]
    columns = own if ring else min(config.cap, ranks * own)
    total = columns * (ranks if ring else 1)
    return SideSpec(Form.DENSE, size, 0) if total * config.window >= size else SideSpec(form, size, columns)


def _kfac_states(opt: Tree) -> list[KfacState]:
    if isinstance(opt, KfacState):
        return [opt]
    return [found for part in opt for found in _kfac_states(part)] if type(opt) is tuple else []


def _shard_window(slot: FactorSlot | None, sharding: Sharding) -> FactorSlot | None:
    """Make columns and scales DTensors; totals and weights are sums and the same on every rank."""
    if not isinstance(slot, ColumnWindow):
        return slot
    columns, scale = _as_dtensor(slot.columns, 1, sharding), _as_dtensor(slot.scale, 0, sharding)
    return slot._replace(columns=columns, scale=scale)


def _shard_map(slot: Tree, sharding: Sharding) -> Tree:
    return slot._replace(columns=_as_dtensor(slot.columns, 1, sharding)) if isinstance(slot, RingSlot) else slot


def _as_dtensor(local: Tensor, dim: int, sharding: Sharding) -> Tensor:
    """Return the DTensor whose shards along ``dim`` are the tensors of the ranks that hold different samples."""
    split = sharding.data is Data.SPLIT
    over = {"replicate": split, "tensor": False, "shard": split}
    placements: list[Placement] = [Shard(dim) if over[name] else Replicate() for name in AXES]
    shape = [*local.shape]
    shape[dim] *= sharding.ranks
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    mesh = sharding.host if local.device.type == "cpu" else sharding.mesh
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))
