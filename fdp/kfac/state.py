"""K-FAC's part of a training state, and what is known of it before there is any: layers, forms, sizes.

KfacState   step, kept factors, preconditioners, how often they were measured, how often that failed

>>> plan = plan_kfac(model, microbatch, config=config, sharding=sharding, dtype=dtype)
>>> state = init(plan, dtype=torch.float32, device=device)
>>> found = find(train_state.opt)                        # wherever in a chain it is
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
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.forms import Form
from fdp.kfac.invert.batched_inverse import ENTRIES
from fdp.kfac.invert.inverse import Damping
from fdp.kfac.layers import Survey, survey
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.measure.sums import Sharing
from fdp.kfac.policy import Row, forms_of, plan_forms
from fdp.kfac.slots import Kept, Placed, RingPart, Side, Window, empty, identity
from fdp.kfac.store import store_device
from fdp.kfac.types import Layer
from fdp.model import Model
from fdp.parallel.mesh import AXES
from fdp.parallel.sharding import Data, Sharding, abstract_params
from fdp.types import FdpError, Path, TrainState, Tree


class KfacState(NamedTuple):
    """Updates so far; what is known of each layer, by its weight's path; and counts of measurements and failures.

    ``failures`` counts layers whose measurement was not finite, or whose inverse could not be made: they keep the last.
    """

    step: Int[Tensor, ""]
    factors: dict[Path, tuple[Kept | None, Kept | None]]
    maps: dict[Path, Placed]
    measured: Int[Tensor, ""]
    failures: Int[Tensor, ""]


class LayerPlan(NamedTuple):
    """A layer's two sides as they are kept; ``product``: damped as one."""

    left: Side
    right: Side
    product: bool


class KfacPlan(NamedTuple):
    """All that is fixed: shapes only, the same on every rank and in every run."""

    config: KfacConfig
    model: Model
    sharding: Sharding | None
    known: Survey
    rows: tuple[Row, ...]
    layers: dict[Layer, LayerPlan]
    shapes: dict[Path, tuple[int, ...]]


def plan_kfac(
    model: Model,
    microbatch: Tree,
    *,
    config: KfacConfig,
    sharding: Sharding | None = None,
    dtype: torch.dtype = torch.float32,
    view: Callable[[Survey], Survey] = lambda known: known,
) -> KfacPlan:
    """Which layers are preconditioned, and how, for microbatches with the shapes, and on the device, of this rank's.

    ``view`` is what to make of the layers that were met: by ``separate_biases`` biases are layers
    of their own.
    """
    device = tree.leaves(microbatch)[0].device
    known = view(survey(model, abstract_params(model, sharding, device=device), microbatch, dtype=dtype))
    ranks = 1 if sharding is None else sharding.ranks
    rows = plan_forms(
        model,
        known,
        policy=config.policy,
        sharing=config.sharing,
        via=config.via,
        samples=ranks * known.plan.batch_size,
        factor_period=config.factor_period,
        inverse_period=config.inverse_period,
        column_bytes=4 if config.column_dtype is None else config.column_dtype.itemsize,
    )
    layers = {}
    for layer, forms in forms_of(rows).items():
        left, right = (_side(known, layer, forms, side, config, sharding) for side in (0, 1))
        product = config.method is Damping.PRODUCT and left.form is right.form is Form.DENSE
        layers[layer] = LayerPlan(left, right, product)
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(microbatch).items()}
    return KfacPlan(config, model, sharding, known, rows, layers, shapes)


def init(plan: KfacPlan, *, dtype: torch.dtype, device: torch.device) -> KfacState:
    """Nothing measured, identities."""
    config = plan.config
    factors, maps = {}, {}
    for layer, (left, right, product) in plan.layers.items():
        factors[layer.weight] = tuple(
            empty(side, window=config.window, dtype=dtype, column_dtype=config.column_dtype, device=device)
            for side in (left, right)
        )
        maps[layer.weight] = identity(
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


def find(opt: Tree) -> KfacState:
    """The one K-FAC state among the states of a chain."""
    found = _all(opt)
    if len(found) != 1:
        raise FdpError(f"state: expected one K-FAC state in the optimizer's, got {len(found)}; use kfac(...).optimizer")
    return found[0]


def count_measurements(opt: Tree) -> int:
    """How often the curvature in an optimizer's state was measured; 0 without K-FAC."""
    return sum(int(found.measured) for found in _all(opt))


def replaced(opt: Tree, new: KfacState) -> Tree:
    """The same states, with another K-FAC state."""
    if isinstance(opt, KfacState):
        return new
    if type(opt) is tuple:
        return tuple(replaced(part, new) for part in opt)
    return opt


def stored(kf: KfacState, config: KfacConfig) -> KfacState:
    """The state with factors where they wait: with the parameters or, if they are large, in CPU memory."""
    size = sum(x.numel() * x.element_size() for x in tree.leaves(kf.factors))
    home = tree.leaves(kf.factors)[0].device if kf.factors else torch.device("cpu")
    away = store_device(config.store, size, home=home)
    return kf._replace(factors=tree.map(lambda x: x.to(away), kf.factors))


def inverse_bytes(plan: KfacPlan) -> int:
    """About what inverting takes at its peak, beside factors and inverses: six times the matrices, in float64.

    Dense sides of a kind are stacked up to ``fdp.kfac.invert.batched_inverse.ENTRIES``; of columns, the small matrix
    and a copy.
    """
    kinds: dict[tuple[int, ...], int] = {}
    most = 0
    for left, right, _ in plan.layers.values():
        dense = tuple(side.size for side in (left, right) if side.form is Form.DENSE)
        kinds[dense] = kinds.get(dense, 0) + 1
        for side in (left, right):
            if side.form in (Form.COLUMNS, Form.SOFTMAX):
                columns = side.columns * plan.config.window
                most = max(most, 6 * 8 * columns**2 + 2 * 4 * side.size * columns)
    for sizes, count in kinds.items():
        entries = sum(n**2 for n in sizes)
        many = min(count, max(1, ENTRIES // max(1, entries)))
        most = max(most, 6 * 8 * entries * many)
    return most


def settled(state: TrainState, plan: KfacPlan) -> TrainState:
    """The state with factors where they wait, and columns that stay with their rank marked as such (DTensors).

    Call it once, after ``init_state``. Without it factors stay with the parameters, and a checkpoint of a ring's
    columns would be the first rank's.
    """
    kf = stored(find(state.opt), plan.config)
    factors, maps = kf.factors, kf.maps
    sharding = plan.sharding
    if plan.config.distribution is Distribution.RING and sharding is not None and sharding.world.size > 1:
        factors = {path: tuple(_window_parts(kept, sharding) for kept in both) for path, both in factors.items()}
        maps = {path: type(sides)(*(_map_parts(m, sharding) for m in sides)) for path, sides in maps.items()}
    return state._replace(opt=replaced(state.opt, kf._replace(factors=factors, maps=maps)))


def _side(
    known: Survey,
    layer: Layer,
    forms: tuple[Form, Form],
    side: int,
    config: KfacConfig,
    sharding: Sharding | None,
) -> Side:
    form, size, groups = forms[side], known.shapes[layer][side], known.groups(layer)
    if form not in (Form.COLUMNS, Form.SOFTMAX):
        return Side(form, size if side == 0 else size * groups, 0, groups)
    # A gradient's side has a row for every backward of the exact Fisher information, an input's side one for all.
    many = math.prod((known.scores or (1, 1))[1:]) if config.fisher is Fisher.EXACT else 1
    tokens: dict[bool, int] = {}  # of inputs and of gradients; a tied leaf has both
    for use in known.met[layer]:
        inputs = use.inputs_left == (side == 0)
        tokens[inputs] = tokens.get(inputs, 0) + use.tokens
    rows = tokens if config.sharing is Sharing.EXPAND else dict.fromkeys(tokens, 1)
    places = sum(count if inputs else many * count for inputs, count in rows.items())
    if form is Form.SOFTMAX:
        places = math.prod((known.scores or (1, 1))[1:-1])
    own = known.plan.batch_size * places
    ring = config.distribution is Distribution.RING
    ranks = 1 if sharding is None else sharding.ranks
    columns = own if ring else min(config.cap, ranks * own)
    everyones = columns * (ranks if ring else 1)
    return Side(Form.DENSE, size, 0) if everyones * config.window >= size else Side(form, size, columns)


def _all(opt: Tree) -> list[KfacState]:
    if isinstance(opt, KfacState):
        return [opt]
    return [found for part in opt for found in _all(part)] if type(opt) is tuple else []


def _window_parts(kept: Kept | None, sharding: Sharding) -> Kept | None:
    """Columns and scales are this rank's part of those of all; totals and weights are all ranks' sums."""
    if not isinstance(kept, Window):
        return kept
    return kept._replace(columns=_cut(kept.columns, 1, sharding), scale=_cut(kept.scale, 0, sharding))


def _map_parts(part: Tree, sharding: Sharding) -> Tree:
    return part._replace(columns=_cut(part.columns, 1, sharding)) if isinstance(part, RingPart) else part


def _cut(local: Tensor, dim: int, sharding: Sharding) -> Tensor:
    """This rank's part, along ``dim``, of what ranks with different samples hold together."""
    split = sharding.data is Data.SPLIT
    over = {"replicate": split, "tensor": False, "shard": split}
    placements: list[Placement] = [Shard(dim) if over[name] else Replicate() for name in AXES]
    shape = [*local.shape]
    shape[dim] *= sharding.ranks
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    mesh = sharding.host if local.device.type == "cpu" else sharding.mesh
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))
