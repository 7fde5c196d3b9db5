"""A refresh waits for the device a fixed number of times, and equals one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import keys, tree
from fdp.gradients.execution import Execution
from fdp.kfac import refresh as module
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.factor_forms import Form
from fdp.kfac.factor_storage import Where
from fdp.kfac.form_policy import by_path, everything
from fdp.kfac.optimizer import Kfac, kfac
from fdp.kfac.state import KfacState, find_kfac_state, replace_kfac_state
from fdp.kfac.types import Curvature, DenseFactor, Layer
from fdp.models import GPTConfig, gpt, mlp
from fdp.parallel.dtensors import localize
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharding import Zero, make_sharding
from fdp.types import TrainState, Tree
from tests.conftest import randn
from tests.ranks import run_on_ranks

KEY = keys.key(3)
SHARED = [Distribution.GATHER, Distribution.OWNER]
COLUMNS = by_path({"layers.*.weight": Form.COLUMNS, "head.weight": (Form.SOFTMAX, Form.COLUMNS)})


class Operations(TorchDispatchMode):
    """A counter of operations, and of those that make the host wait for a GPU."""

    WAIT = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.all = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all += 1
        self.waits += func.overloadpacket.__name__.lstrip("_") in [name.lstrip("_") for name in self.WAIT]
        return func(*args, **(kwargs or {}))


class Lists(TorchFunctionMode):
    """A counter of ``tolist`` and other transfers to the host that are not operations."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += func in (Tensor.tolist, Tensor.numpy, Tensor.cpu)
        return func(*args, **(kwargs or {}))


def counted(act: Callable[[], Any]) -> tuple[int, int]:
    """Return how often the host waits, and the number of operations."""
    with Lists() as lists, Operations() as operations:
        act()
    return lists.waits + operations.waits, operations.all


def test_the_counting_mode_counts() -> None:
    x = torch.ones(3)
    for wait in (x.tolist, lambda: bool(x[0]), lambda: float(x[0]), lambda: int(x[0]), x[0].item, x.nonzero):
        assert counted(wait)[0] == 1
    assert counted(lambda: x.isfinite().all())[0] == 0


def gpt_of(layers: int, **changes: Any) -> tuple[Kfac, TrainState, Tree]:
    model = gpt(GPTConfig(layers=layers, width=8, heads=2, context=32, vocab_size=13))
    data = {"tokens": torch.randint(0, 13, (2, 33), generator=torch.Generator().manual_seed(1))}
    k = kfac(model, data, learning_rate=1.0, config=KfacConfig(policy=everything(), **changes))
    params = model.init(keys.key(1))
    return k, TrainState(params, k.optimizer.init(params), (), torch.zeros((), dtype=torch.int64)), data


def refreshed(k: Kfac, state: TrainState, data: Tree, step: int = 0, donate: bool = False) -> TrainState:
    mask = torch.ones(len(tree.leaves(data)[0]), device=tree.leaves(data)[0].device)
    return k.refresh(state, data, mask, keys.fold_in(KEY, step).to(mask.device), step, donate=donate)


def a_dense_one(k: Kfac) -> Layer:
    return [layer for layer, how in k.plan.layers.items() if how.left.form is how.right.form is Form.DENSE][3]


def counts(k: Kfac, state: TrainState, data: Tree) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return :func:`counted` of collecting, and of the rest of a refresh."""
    real, collecting = module.collect, []

    def collect(*args: Any, **options: Any) -> Mapping[Layer, Curvature]:
        found: list[Mapping[Layer, Curvature]] = []
        collecting.append(counted(lambda: found.append(real(*args, **options))))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "collect", collect)
        waits, operations = counted(lambda: refreshed(k, state, data, 10, donate=True))
    return collecting[0], (waits - collecting[0][0], operations - collecting[0][1])


@pytest.mark.long
@pytest.mark.parametrize("distribution", SHARED)
def test_the_host_waits_as_often_for_six_blocks_as_for_two(distribution: Distribution) -> None:
    collecting, rest, layers = [], [], []
    for blocks in (2, 6):
        k, state, data = gpt_of(blocks, distribution=distribution)
        state = refreshed(k, state, data)
        assert int(find_kfac_state(state.opt).failures) == 0
        for each, found in zip((collecting, rest), counts(k, state, data)):
            each.append(found)
        layers.append(len(k.plan.layers))
    assert collecting[0][0] == collecting[1][0] == 0
    assert rest[0][0] == rest[1][0] == 2  # whether what was measured is finite; and what could be inverted
    # What grows are the copies of results: one at a time a layer took more than a hundred operations.
    assert (rest[1][1] - rest[0][1]) / (layers[1] - layers[0]) < 5


def inverses(k: Kfac, state: TrainState) -> dict[str, list[Tensor]]:
    return {path: tree.leaves(maps) for path, maps in find_kfac_state(state.opt).maps.items()}


@pytest.mark.parametrize("distribution", SHARED)
def test_batched_inversion_equals_one_layer_at_a_time(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, state, data = gpt_of(2, distribution=distribution)
    together = inverses(k, refreshed(k, state, data))
    monkeypatch.setattr(module, "invert_batched", lambda layers, **_: dict.fromkeys(layers))
    alone = inverses(k, refreshed(k, state, data))
    for path, leaves in alone.items():
        torch.testing.assert_close(together[path], leaves, rtol=1e-6, atol=0)
        assert not torch.equal(leaves[0], inverses(k, state)[path][0]), "it stayed the identity"


def poisoned(state: TrainState, value: float, victim: str) -> TrainState:
    """Put a wrong number into the slot of one layer."""
    kf = find_kfac_state(state.opt)
    left, right = kf.factors[victim]
    assert isinstance(left, DenseFactor)
    wrong = left._replace(total=left.total + value * torch.eye(len(left.total)))
    return state._replace(opt=replace_kfac_state(state.opt, kf._replace(factors=kf.factors | {victim: (wrong, right)})))


@pytest.mark.parametrize("value", [math.nan, -1e9])
@pytest.mark.parametrize("distribution", SHARED)
def test_only_a_layer_that_cannot_be_inverted_keeps_its_last(value: float, distribution: Distribution) -> None:
    k, state, data = gpt_of(2, distribution=distribution)
    state = refreshed(k, state, data)
    victim = a_dense_one(k).weight
    spoiled = poisoned(state, value, victim)
    good, bad = refreshed(k, state, data, 10), refreshed(k, spoiled, data, 10)
    assert int(find_kfac_state(bad.opt).failures) == 1
    assert int(find_kfac_state(good.opt).failures) == 0
    for path, leaves in inverses(k, bad).items():
        expected = inverses(k, state if path == victim else good)[path]
        torch.testing.assert_close(leaves, expected, rtol=0, atol=0)
        assert not torch.equal(leaves[0], inverses(k, good if path == victim else state)[path][0])


def test_only_the_layer_that_is_not_finite_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    k, state, data = gpt_of(2)
    state = refreshed(k, state, data)
    victim = a_dense_one(k)
    good = find_kfac_state(refreshed(k, state, data, 10).opt)
    real = module.collect

    def collect(*args: Any, **options: Any) -> Mapping[Layer, Curvature]:
        found = real(*args, **options)
        left, right = found[victim]
        assert isinstance(left, DenseFactor)
        return found | {victim: Curvature(left._replace(total=left.total * math.nan), right)}

    monkeypatch.setattr(module, "collect", collect)
    bad = find_kfac_state(refreshed(k, state, data, 10).opt)
    assert int(bad.failures) == 1
    for path, kept in bad.factors.items():
        expected = (find_kfac_state(state.opt) if path == victim.weight else good).factors[path]
        torch.testing.assert_close(tree.leaves(kept), tree.leaves(expected), rtol=0, atol=0)


# Ranks


def decided(distribution: Distribution) -> tuple[int, bool]:
    """Return failures, and whether all factors stayed, if only one rank has a sample that is not finite."""
    model = mlp(widths=(6, 5, 7), classes=4)
    sharding = make_sharding(model, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.THREE)
    batch = {"image": randn(1, 6, seed=sharding.rank).float(), "label": torch.tensor([1])}
    config = KfacConfig(policy=COLUMNS, distribution=distribution)
    k = kfac(model, batch, learning_rate=0.1, config=config, execution=Execution(sharding))
    own = {layer: torch.tensor([1.0, math.nan if sharding.rank == 1 else 1.0]) for layer in k.plan.layers}
    failed = module._find_unusable(own, torch.ones(()), sharding)
    assert failed == set(own)  # before ranks that disagree wait for each other
    params = init_params(model, KEY, sharding)
    state = TrainState(params, k.optimizer.init(params), (), torch.zeros((), dtype=torch.int64))
    state = refreshed(k, state, batch)
    if sharding.rank == 1:
        batch["image"][0, 2] = math.nan
    before, after = (find_kfac_state(localize(each).opt) for each in (state, refreshed(k, state, batch, 10)))
    return int(after.failures) - int(before.failures), same(before, after)


def same(a: KfacState, b: KfacState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a.factors), tree.leaves(b.factors)))


def all_decided() -> list[tuple[int, bool]]:
    return [decided(distribution) for distribution in Distribution]


@pytest.mark.ranks
def test_a_measurement_not_finite_on_one_rank_is_added_on_none() -> None:
    first, second = run_on_ranks(all_decided, 2)
    assert first == second
    for failures, stayed in first:
        assert failures > 0
        assert stayed


# A GPU


@pytest.mark.gpu
@pytest.mark.parametrize("store", [Where.DEVICE, Where.CPU])
def test_the_gpu_equals_the_cpu_wherever_factors_are_stored(store: Where) -> None:
    k, state, data = gpt_of(2, damping=1e-1)
    expected = inverses(k, refreshed(k, refreshed(k, state, data), data, 10))
    model = k.plan.model
    there = tree.map(Tensor.cuda, data)
    other = kfac(model, there, learning_rate=1.0, config=KfacConfig(policy=everything(), damping=1e-1, store=store))
    params = tree.map(Tensor.cuda, state.params)
    moved = TrainState(params, other.optimizer.init(params), (), torch.zeros((), dtype=torch.int64, device="cuda"))
    moved = other.place(moved)
    devices = {x.device.type for x in tree.leaves(find_kfac_state(moved.opt).factors)}
    assert devices == {store.value.replace("device", "cuda")}
    moved = refreshed(other, refreshed(other, moved, there), there, 10, donate=True)
    assert int(find_kfac_state(moved.opt).failures) == 0
    for path, leaves in inverses(other, moved).items():
        torch.testing.assert_close([x.cpu() for x in leaves], expected[path], rtol=2e-2, atol=2e-3)
