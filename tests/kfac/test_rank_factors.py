"""Gather, ring and owner equal one process with all samples, for any mesh and token counts."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import keys, tree
from fdp.gradients.linear_maps import LowRankMap, MatrixMap, Sides, apply_map
from fdp.init import normal
from fdp.kfac import factors
from fdp.kfac.factors import CurvatureError
from fdp.kfac.inversion.damped_inverse import Damping, invert
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.inversion.woodbury import woodbury_cholesky
from fdp.kfac.preconditioning.one_layer import precondition
from fdp.kfac.preconditioning.sharded import precondition_sharded
from fdp.kfac.ranks.gather_columns import CAP_COLUMNS, CappedWarning, gather_columns
from fdp.kfac.ranks.owner_inverse import assign_owners, inversion_cost, invert_by_owner
from fdp.kfac.ranks.ring_inverse import apply_ring, invert_ring, precondition_ring, ring_inverse
from fdp.kfac.ranks.sum_factors import gather_factor_columns, sum_totals
from fdp.kfac.types import (
    ColumnsFactor,
    Curvature,
    DenseFactor,
    DiagonalFactor,
    Factor,
    Layer,
    Preconditioner,
    SoftmaxFactor,
)
from fdp.model import Block, LeafSpec, Model
from fdp.parallel import collectives
from fdp.parallel.dtensors import localize
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharding import Data, Sharding, Zero, make_sharding, over_tensor_axis
from fdp.types import FdpError
from tests.ranks import run_on_ranks

F64 = torch.float64
N, DAMPING = 7, 1e-3
LAYERS = (Layer("up", "up_bias"), Layer("down", "down_bias"), Layer("kernel", None), Layer("positions", None))


def model(tensor: collectives.Axis | None = None) -> Model:
    """Return leaves with rows that no mesh divides, rows and columns split over ``tensor``, 4 dims, or one row."""
    leaves = {
        "up": LeafSpec((6, 5), normal(1.0), tensor_dim=0),
        "up_bias": LeafSpec((6,), normal(1.0), tensor_dim=0),
        "down": LeafSpec((5, 6), normal(1.0), tensor_dim=1),
        "down_bias": LeafSpec((5,), normal(1.0)),
        "kernel": LeafSpec((3, 2, 2, 2), normal(1.0)),
        "positions": LeafSpec((4, 2), normal(1.0)),
        "norm": LeafSpec((1,), normal(1.0)),
    }
    return Model(
        "m", leaves, (Block("b", {path: path for path in leaves}, lambda *_: ()),), parallel=model, tensor=tensor
    )


MODEL = model()
MESHES: dict[int, list[dict[str, int]]] = {
    1: [{"shard": 1}],
    2: [{"shard": 2}, {"replicate": 2}, {"tensor": 2}],
    4: [{"shard": 4}, {"replicate": 2, "shard": 2}, {"tensor": 2, "shard": 2}],
}
# Tokens of the (up to four) ranks: fewer and more than rows in all, none on the first, the last, some, all of them.
COUNTS = [(1, 2, 0, 2), (0, 3, 1, 0), (5, 1, 4, 6), (0, 0, 0, 0), (0, 0, 3, 0), (2, 2, 2, 2)]


def sharding_on(axes: dict[str, int], zero: Zero = Zero.THREE, data: Data = Data.SPLIT) -> Sharding:
    mesh = make_mesh(axes, device_type="cpu")
    return make_sharding(over_tensor_axis(MODEL, mesh), mesh, zero=zero, data=data)


def rows_of(counts: tuple[int, ...], *, n: int = N) -> list[Tensor]:
    """Return every rank's rows: nearly parallel, some large, where roots and inverses lose digits."""
    generator = torch.Generator().manual_seed(sum(counts) + n)
    rows = torch.randn(sum(counts), n, dtype=F64, generator=generator) + 3.0
    return list(rows.split(list(counts)))


def factors_of(rows: Tensor) -> dict[str, Factor]:
    """Return all forms of a rank's rows, with weights that are not the number of tokens."""
    weight = 0.5 * len(rows)
    return {
        "dense": factors.dense(rows, weight=weight),
        "columns": factors.columns(rows, weight=weight),
        "diagonal": factors.diagonal(rows, weight=weight),
        "softmax": factors.softmax(rows.softmax(-1), weight=weight, extra=torch.full((len(rows),), 0.7, dtype=F64)),
    }


def right_side(n: int = N) -> Tensor:
    return torch.randn(n, 3, dtype=F64, generator=torch.Generator().manual_seed(9))


def gather(factor: Factor, sharding: Sharding | None, *, cap: int = CAP_COLUMNS) -> Factor:
    """Return the factor of all ranks' samples."""
    return gather_factor_columns(sum_totals(factor, sharding), sharding, cap=cap)


GRADIENT = torch.randn(N, N, dtype=F64, generator=torch.Generator().manual_seed(3))


def inverted(left: Factor, right: Factor) -> Tensor | None:
    """Return the result of one process, damped by pi; None if nothing was measured."""
    if not float(left.weight):
        return None
    whole = invert(Curvature(left, right), damping=DAMPING, method=Damping.PI, via=Via.CHOLESKY)
    return precondition(whole, GRADIENT)


def on_mesh(axes: dict[str, int], data: Data = Data.SPLIT) -> list[dict[str, Any]]:
    """Return this rank's gathered factors in all forms and its ring results, for every count."""
    sharding = sharding_on(axes, data=data)
    found = []
    for counts in COUNTS:
        rows = rows_of(counts[: sharding.ranks])[sharding.rank]
        own = factors_of(rows)
        answers = {}
        for form in ("columns", "softmax"):
            factor = own[form]
            assert isinstance(factor, ColumnsFactor | SoftmaxFactor)
            answers[form] = apply_ring(ring_inverse(factor, sharding, damping=DAMPING), right_side(), sharding)
        pairs = {"both": ("softmax", "columns"), "one": ("dense", "columns"), "none": ("dense", "diagonal")}
        for name, (left, right) in pairs.items():
            try:
                curvature = Curvature(own[left], own[right])
                sides = invert_ring(curvature, sharding, damping=DAMPING, via=Via.CHOLESKY)
                answers[name] = precondition_ring(sides, GRADIENT, sharding)
            except CurvatureError:
                answers[name] = None
        found.append({"gathered": {form: gather(factor, sharding) for form, factor in own.items()}, "ring": answers})
    return found


def everything(cases: list[dict[str, int]]) -> list[list[dict[str, Any]]]:
    return [on_mesh(axes) for axes in cases]


def shares(axes: dict[str, int]) -> int:
    return axes.get("replicate", 1) * axes.get("shard", 1)


def damped(factor: Factor) -> Tensor:
    return factors.matrix(factor) + DAMPING * torch.eye(N, dtype=F64)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gather_and_ring_equal_one_process_with_all_samples(ranks):
    for found in run_on_ranks(everything, ranks, MESHES[ranks]):
        for axes, per_count in zip(MESHES[ranks], found):
            for counts, got in zip(COUNTS, per_count):
                case = f"{axes} {counts}"
                rows = torch.cat(rows_of(counts[: shares(axes)]))
                one = factors_of(rows)
                for form, factor in one.items():
                    gathered = got["gathered"][form]
                    assert type(gathered) is type(factor)
                    for mine, expected in zip(gathered, factor):
                        torch.testing.assert_close(
                            mine, expected, rtol=1e-12, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}"
                        )
                solved = {
                    form: torch.linalg.solve(damped(one[form]), right_side()) if len(rows) else right_side() / DAMPING
                    for form in ("columns", "softmax")
                }
                solved["both"] = inverted(one["softmax"], one["columns"])
                solved["one"] = inverted(one["dense"], one["columns"])
                solved["none"] = inverted(one["dense"], one["diagonal"])
                assert list(got["ring"]) == list(solved)
                for form, answer in got["ring"].items():
                    expected = solved[form]
                    assert (answer is None) == (expected is None), f"{case} {form}"
                    if answer is None or expected is None:
                        continue
                    error = (answer - expected).norm() / expected.norm()
                    assert error < 1e-10, f"{case} {form}: {error:.1e}"


def in_order(orders: list[tuple[int, ...]]) -> list[Tensor]:
    sharding = sharding_on({"shard": 4})
    blocks, found = rows_of((5, 1, 0, 6)), []
    for order in orders:
        factor = factors_of(blocks[order[sharding.rank]])["columns"]
        assert isinstance(factor, ColumnsFactor)
        found.append(apply_ring(ring_inverse(factor, sharding, damping=DAMPING), right_side(), sharding))
        gathered = gather(factor, sharding)
        found.append(torch.linalg.solve(damped(gathered), right_side()))
    return found


def kept_under_a_cap(cap: int) -> tuple[list[Factor], list[str]]:
    """Gather twelve tokens, divided as (5, 1, 0, 6) and as (3, 3, 3, 3), under a cap."""
    sharding = sharding_on({"replicate": 2, "shard": 2})
    rows, found, said = torch.cat(rows_of((5, 1, 0, 6))), [], []
    for counts in ((5, 1, 0, 6), (3, 3, 3, 3)):
        for form in ("columns", "softmax"):
            own = factors_of(rows.split(list(counts))[sharding.rank])[form]
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                found.append(gather(own, sharding, cap=cap))
            said += [str(each.message) for each in seen if each.category is CappedWarning]
    return found, said


def stops_together() -> list[str]:
    """Fail on one rank by a warning, an inverse or a NaN: every rank must stop and none may wait."""
    sharding = sharding_on({"shard": 4})
    said = []
    rows = rows_of((5, 1, 0, 6))[sharding.rank]
    own = factors_of(rows)["columns"]
    assert isinstance(own, ColumnsFactor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            gather(own, sharding, cap=4)
        except CappedWarning as error:
            said.append(str(error))
    bad = own._replace(columns=own.columns * (math.nan if sharding.rank == 3 else 1.0))
    with pytest.raises(FdpError) as nan:
        ring_inverse(bad, sharding, damping=DAMPING)
    with pytest.raises(FdpError) as nan_trace:
        invert_ring(Curvature(bad, bad), sharding, damping=DAMPING, via=Via.CHOLESKY)

    def invert(own: Mapping[Layer, Curvature]) -> dict[Layer, Preconditioner]:
        for curvature in own.values():
            assert isinstance(curvature.left, DenseFactor)
            if len(curvature.left.total) == 3:
                raise FdpError("of no use")
        return {layer: Sides(None, None) for layer in own}

    curvatures = {
        Layer(f"w{n}", None): Curvature(DenseFactor(torch.eye(n), torch.tensor(1.0)), None) for n in (2, 3, 4)
    }
    with pytest.raises(FdpError) as inverse:
        invert_by_owner(curvatures, invert, sharding)
    failed = [nan.value, nan_trace.value, inverse.value]
    assert all(error.everywhere for error in failed)
    return said + [str(error) for error in failed]


def everyone_the_same() -> list[Factor]:
    """Gather on ranks that hold the same samples."""
    sharding = sharding_on({"shard": 2, "replicate": 2}, data=Data.REPLICATED)
    return [gather(factor, sharding) for factor in factors_of(rows_of((5,))[0]).values()]


def on_four_ranks(orders: list[tuple[int, ...]]) -> dict[str, Any]:
    return {
        "order": in_order(orders),
        "cap": kept_under_a_cap(5),
        "stops": stops_together(),
        "same": everyone_the_same(),
        "peaks": peaks(),
        "owner": owned(),
        "parts": [parts_on(axes, zero) for axes in MESHES[4] for zero in (Zero.NONE, Zero.THREE)],
    }


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_on_ranks(on_four_ranks, 4, ORDERS)


ORDERS = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)]


@pytest.mark.long
@pytest.mark.ranks
def test_the_order_of_ranks_does_not_matter(four):
    whole = factors_of(torch.cat(rows_of((5, 1, 0, 6))))["columns"]
    expected = torch.linalg.solve(damped(whole), right_side())
    for result in four:
        for answer in result["order"]:
            assert (answer - expected).norm() < 1e-10 * expected.norm()


@pytest.mark.ranks
def test_beyond_the_cap_evenly_spaced_columns_are_kept_the_same_on_every_rank(four):
    rows = torch.cat(rows_of((5, 1, 0, 6)))
    numbers = [m * 12 // 5 for m in range(5)]
    for result in four:
        found, said = result["cap"]
        assert [words.partition(";")[0] for words in said] == ["kept 5 of 12 columns, evenly spaced"] * 4
        assert all("--kfac-cap" in words and "--microbatch" in words for words in said)
        for columns, softmax in (found[:2], found[2:]):
            torch.testing.assert_close(columns.columns, rows[numbers].T * math.sqrt(12 / 5))
            torch.testing.assert_close(softmax.columns, rows.softmax(-1)[numbers].T * math.sqrt(0.7))
            torch.testing.assert_close(softmax.total, rows.softmax(-1).sum(0) * 0.7)


@pytest.mark.ranks
def test_an_error_on_one_rank_is_raised_on_all(four):
    for result in four:
        cap, nan, trace, inverse = result["stops"]
        assert "finite" in trace
        assert cap.startswith("kept 4 of 12")
        assert "positive definite" in nan
        assert inverse.endswith("of no use")


@pytest.mark.ranks
def test_ranks_with_the_same_samples_are_not_summed(four):
    for result in four:
        for mine, expected in zip(result["same"], factors_of(rows_of((5,))[0]).values()):
            assert all(torch.equal(a, b) for a, b in zip(mine, expected))


# ------------------------------------------------------------------------------------------------------------- memory
class LiveBytes(TorchDispatchMode):
    """A counter of the peak bytes of tensors created inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree.leaves(out):
            if isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() not in before:
                storage = x.untyped_storage()
                if id(storage) not in self.live:
                    weakref.finalize(storage, self.live.pop, id(storage))
                self.live[id(storage)] = storage.nbytes()
        self.peak = max(self.peak, sum(self.live.values()))
        return out


LONG, COLUMNS = 4000, 6


def peaks() -> dict[str, int]:
    """Return the peak bytes of a ring inverse and its application, and of gathering the columns."""
    sharding = sharding_on({"shard": 4})
    # in float64, of which sums of products need no wider copy
    rows = torch.randn(COLUMNS, LONG, dtype=F64, generator=torch.Generator().manual_seed(sharding.rank))
    factor, y = factors.columns(rows, weight=float(COLUMNS)), torch.ones(LONG, 1, dtype=F64)
    with LiveBytes() as by_ring:
        answer = apply_ring(ring_inverse(factor, sharding, damping=1e-2), y, sharding)
    with LiveBytes() as by_gather:
        whole = gather(factor, sharding)
    assert isinstance(whole, ColumnsFactor)
    expected = apply_map(woodbury_cholesky(whole.columns, weight=whole.weight, damping=1e-2), y)
    torch.testing.assert_close(answer, expected, rtol=1e-10, atol=1e-10)
    return {"ring": by_ring.peak, "gather": by_gather.peak}


@pytest.mark.ranks
def test_a_ring_holds_two_blocks_of_columns_and_a_gather_those_of_all_ranks(four):
    block = LONG * COLUMNS * 8
    for result in four:
        assert result["peaks"]["gather"] >= 4 * block
        assert 2 * block <= result["peaks"]["ring"] < 3 * block


# -------------------------------------------------------------------------------------------------------------- owner
def dense_inverse(curvature: Curvature) -> Preconditioner:
    """Return every kind of map for the factors of a curvature."""

    def side(factor: Factor | None) -> MatrixMap | LowRankMap | None:
        match factor:
            case None:
                return None
            case ColumnsFactor():
                k = factor.columns.shape[1]
                return LowRankMap(factor.columns[:, :1].flatten() * 0 + 2, factor.columns, torch.eye(k, dtype=F64))
            case _:
                return MatrixMap(torch.linalg.inv(damped(factor)).mT)

    return Sides(side(curvature.left), side(curvature.right))


def dense_inverses(curvatures: Mapping[Layer, Curvature]) -> dict[Layer, Preconditioner]:
    return {layer: dense_inverse(curvature) for layer, curvature in curvatures.items()}


def curvature_of(rows: Tensor) -> dict[Layer, Curvature]:
    forms = factors_of(rows)
    return {
        Layer("a", None): Curvature(forms["dense"], forms["columns"]),
        Layer("b", "bias"): Curvature(None, forms["diagonal"]),
        Layer("c", None): Curvature(forms["softmax"], forms["dense"]),
        Layer("d", None): Curvature(None, None),
    }


def owned() -> tuple[dict[Layer, Preconditioner], int]:
    sharding = sharding_on({"tensor": 2, "shard": 2})
    calls = 0

    def counted(own: Mapping[Layer, Curvature]) -> dict[Layer, Preconditioner]:
        nonlocal calls
        calls += len(own)
        return dense_inverses(own)

    mine = curvature_of(rows_of((3, 2))[sharding.rank])
    summed = {
        layer: Curvature(*(None if side is None else gather(side, sharding) for side in both))
        for layer, both in mine.items()
    }
    return invert_by_owner(summed, counted, sharding), calls


@pytest.mark.ranks
def test_every_inverse_is_computed_once_and_known_to_all(four):
    whole = curvature_of(torch.cat(rows_of((3, 2))))
    expected = dense_inverses(whole)
    assert sum(result["owner"][1] for result in four) == len(whole)
    for result in four:
        got, first = result["owner"][0], four[0]["owner"][0]
        assert list(got) == list(expected)
        for layer in whole:
            assert tree.paths(got[layer]) == tree.paths(expected[layer])
            for mine, rank0, one in zip(*(tree.leaves(each[layer]) for each in (got, first, expected))):
                assert torch.equal(mine, rank0)
                torch.testing.assert_close(mine, one, rtol=1e-10, atol=1e-10)


def test_one_process_owns_everything():
    whole = curvature_of(rows_of((3,))[0])
    for layer, made in invert_by_owner(whole, dense_inverses, None).items():
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(made), tree.leaves(dense_inverse(whole[layer]))))


@example(costs=[1, 1, 2], ranks=2)  # the small ones first would be half as much again
@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=9), ranks=st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_the_largest_load_is_within_four_thirds_of_the_best(costs, ranks):
    layers = {Layer(f"w{i:02}", None): float(cost) for i, cost in enumerate(costs)}
    owners = assign_owners(layers, ranks=ranks)
    backwards = dict(reversed(list(layers.items())))
    assert owners == assign_owners(backwards, ranks=ranks)
    most = max(sum(layers[layer] for layer in layers if owners[layer] == rank) for rank in range(ranks))
    loads = {(0.0,) * ranks}
    for each in layers.values():
        loads = {tuple(sorted((*load[:i], load[i] + each, *load[i + 1 :]))) for load in loads for i in range(ranks)}
    assert most <= (4 - 1 / ranks) / 3 * min(max(load) for load in loads) + 1e-9


def test_ties_are_broken_by_path_and_zero_ranks_are_refused():
    layers = {Layer(name, None): 1.0 for name in "cab"}
    for order in ("cab", "abc", "bca", "cba"):
        owners = assign_owners({Layer(name, None): 1.0 for name in order}, ranks=2)
        assert owners == {Layer("c", None): 0, Layer("a", None): 0, Layer("b", None): 1}
    with pytest.raises(FdpError, match="at least 1"):
        assign_owners(layers, ranks=0)


def test_inversion_cost_of_each_form():
    one = torch.tensor(1.0)
    dense, diagonal = DenseFactor(torch.eye(10), one), DiagonalFactor(torch.ones(10), one)
    few, many = ColumnsFactor(torch.ones(10, 2), one), ColumnsFactor(torch.ones(10, 20), one)
    assert [inversion_cost(Curvature(side, None)) for side in (dense, diagonal, few, many)] == [
        1000,
        10,
        4 * 12,
        100 * 30,
    ]
    assert inversion_cost(Curvature(dense, diagonal)) == 1010


# -------------------------------------------------------------------------------------------------------------- parts
def mixing(shape: tuple[int, int]) -> Sides:
    """Return a left and a right matrix that mix all rows and all columns."""
    generator = torch.Generator().manual_seed(shape[0])
    return Sides(*(MatrixMap(torch.randn(n, n, dtype=F64, generator=generator)) for n in shape))


def times(sides: Sides, gradient: Tensor) -> Tensor:
    assert isinstance(sides.left, MatrixMap)
    assert isinstance(sides.right, MatrixMap)
    return sides.left.matrix @ gradient @ sides.right.matrix


SHAPES = dict(zip(LAYERS, ((6, 6), (5, 7), (3, 8), (8, 1))))
PRECONDITIONERS = {layer: mixing(shape) for layer, shape in SHAPES.items()}
preconditioned = partial(precondition_sharded, shapes=SHAPES, apply=times)


def parts_on(axes: dict[str, int], zero: Zero) -> bool:
    """Compare this rank's shards of the preconditioned gradient with those of the full one."""
    sharding = sharding_on(axes, zero)
    cut = over_tensor_axis(MODEL, sharding.mesh)
    gradients = tree.flatten(localize(init_params(cut, keys.key(0), sharding, dtype=F64)))
    whole = tree.flatten(MODEL.init(keys.key(0), dtype=F64))
    got = preconditioned(PRECONDITIONERS, gradients, sharding)
    want = preconditioned(PRECONDITIONERS, whole, None)
    for path, part in got.items():
        expected = want[path]
        for dim, (start, length) in enumerate(sharding.leaves[path].window):
            expected = expected.narrow(dim, start, length)
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(got["norm"], gradients["norm"])
    return list(got) == list(gradients)


@pytest.mark.ranks
def test_shards_are_preconditioned_like_full_gradients_on_every_mesh(four):
    for result in four:
        assert all(result["parts"])


def test_a_layer_is_a_matrix_with_its_bias_last():
    whole = tree.flatten(MODEL.init(keys.key(0), dtype=F64))
    got = preconditioned(PRECONDITIONERS, whole, None)
    joined = torch.cat([whole["down"], whole["down_bias"][:, None]], 1)
    expected = times(PRECONDITIONERS[LAYERS[1]], joined)
    torch.testing.assert_close(got["down"], expected[:, :-1])
    torch.testing.assert_close(got["down_bias"], expected[:, -1])
    kernel = times(PRECONDITIONERS[LAYERS[2]], whole["kernel"].reshape(3, 8))
    torch.testing.assert_close(got["kernel"], kernel.view(3, 2, 2, 2))
    positions = times(PRECONDITIONERS[LAYERS[3]], whole["positions"].reshape(8, 1))
    torch.testing.assert_close(got["positions"], positions.view(4, 2))


def test_leaves_without_a_gradient_and_leaves_in_two_layers_are_refused():
    whole = tree.flatten(MODEL.init(keys.key(0), dtype=F64))
    with pytest.raises(FdpError, match=r"none for \['lost'\]"):
        preconditioned({Layer("lost", None): mixing((6, 5))}, whole, None)
    twice = {Layer("down", None): mixing((5, 6)), Layer("down", "down_bias"): mixing((5, 7))}
    with pytest.raises(FdpError, match="in several"):
        preconditioned(twice, whole, None)


# --------------------------------------------------------------------------------------------------------- one process
def test_without_ranks_factors_are_unchanged():
    for factor in factors_of(rows_of((5,))[0]).values():
        assert all(torch.equal(a, b) for a, b in zip(gather(factor, None), factor))
        assert all(torch.equal(a, b) for a, b in zip(sum_totals(factor, None), factor))


def test_a_capped_softmax_stays_positive_and_only_grows():
    """Only kept tokens have one of the classes: scaled columns would exceed the diagonal."""
    rows = torch.full((10, 4), 0.0, dtype=F64)
    rows[::2, 0], rows[1::2, 1] = 1.0, 1.0
    factor = factors.softmax(rows, weight=10.0)
    with pytest.warns(CappedWarning, match="kept 5 of 10"):
        capped = gather(factor, None, cap=5)
    assert torch.linalg.eigvalsh(factors.matrix(capped))[0] >= -1e-12
    assert torch.linalg.eigvalsh(factors.matrix(capped) - factors.matrix(factor))[0] >= -1e-12


def test_a_cap_keeps_the_trace_of_columns_of_one_length():
    factor = factors.columns(torch.randn(50, 8, dtype=F64).sign(), weight=50.0)
    with pytest.warns(CappedWarning):
        capped = gather(factor, None, cap=7)
    torch.testing.assert_close(factors.mean_trace(capped), factors.mean_trace(factor))


def test_no_column_is_dropped_up_to_the_cap():
    columns = torch.randn(3, 20)
    assert torch.equal(gather_columns(columns, None, cap=20).columns, columns)
    assert CAP_COLUMNS == 8192


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_below_one_is_refused(cap):
    with pytest.raises(FdpError, match="cap: expected at least 1"):
        gather(factors.columns(torch.randn(3, 2), weight=3.0), None, cap=cap)


@pytest.mark.parametrize("damping", [0.0, -1.0, math.nan])
def test_a_ring_without_damping_is_refused(damping):
    with pytest.raises(FdpError, match="damping"):
        ring_inverse(factors.columns(torch.randn(3, 2), weight=3.0), None, damping=damping)


@pytest.mark.parametrize("damping", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("tokens", [0, 3, 7, 20])
def test_a_ring_of_one_is_the_inverse(damping, tokens):
    own = factors_of(rows_of((tokens,))[0] if tokens else torch.zeros(0, N, dtype=F64))
    for form in ("columns", "softmax"):
        factor = own[form]
        assert isinstance(factor, ColumnsFactor | SoftmaxFactor)
        got = apply_ring(ring_inverse(factor, None, damping=damping), right_side(), None)
        dense = damping * torch.eye(N, dtype=F64) + (factors.matrix(factor) if tokens else 0)
        expected = torch.linalg.solve(dense, right_side())
        assert (got - expected).norm() < 1e-8 * expected.norm()


def test_a_ring_takes_the_diagonal_of_a_softmax_from_its_columns():
    """A rounded total makes no difference, and one that is no softmax's is refused."""
    probabilities = (4 * torch.randn(5, 40, generator=torch.Generator().manual_seed(1))).softmax(-1)
    factor = factors.softmax(probabilities, weight=5.0)
    rounded = factor._replace(total=factor.total * (1 - 40 * torch.finfo(torch.float32).eps))
    for mine, theirs in zip(
        ring_inverse(rounded, None, damping=1e-6)[:2], ring_inverse(factor, None, damping=1e-6)[:2]
    ):
        assert torch.equal(mine, theirs)
    with pytest.raises(CurvatureError, match="expected columns with U U"):
        ring_inverse(factor._replace(total=factor.total * 0.9), None, damping=1e-6)


def test_half_precision_columns_are_upcast():
    rows = torch.randn(3, 8)
    exact, half = (factors.columns(each, weight=3.0) for each in (rows, rows.half()))
    y = torch.randn(8, 2)
    solve = partial(ring_inverse, sharding=None, damping=0.1)
    a, b = apply_ring(solve(exact), y, None), apply_ring(solve(half), y, None)
    assert b.dtype == torch.float32
    assert (a - b).norm() < 1e-2 * a.norm()
