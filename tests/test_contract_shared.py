"""What many samples share: accumulators of kernels and microbatches, sums over ranks, statistics, counts.

Each is attacked as ``tests.adversary`` attacks the sum of one microbatch.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fdp_kernels.direct import direct_reference
from fdp_kernels.embedding import embedding_norms_reference, embedding_sum_reference
from fdp_kernels.ghost import ghost_reference
from fdp_kernels.keep import keep_reference, squared_norms_reference, weighted_sum_reference
from fdp_kernels.launch_tables import Leaf
from fdp_kernels.noisy_adamw import Hyper, update_leaf_reference_
from fdp_kernels.weighted import weighted_reference
from torch import Tensor

from fdp import keys, ops, tree
from fdp.fast.compile_modes import make_execution
from fdp.gradients.accumulate import add_microbatches
from fdp.gradients.lazy_sum import LazySum
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.kfac.measure.estimator import Estimator, Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.private.noised_factors import STATISTICS, clipped_statistics
from fdp.kfac.private.separate_biases import separate_biases
from fdp.model import Model, from_loss
from fdp.optimizers import sgd
from fdp.parallel.dtensors import shard_leaf
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharded_norms import sharded_global_norm
from fdp.parallel.sharding import Data, Reduce, Sharding, Zero, abstract_params, make_sharding
from fdp.privacy import clipping
from fdp.privacy.clipping import clip_factors
from fdp.privacy.mechanism import Mechanism, Statistics
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.stages import make_stages
from fdp.types import ClippedSum, Norms
from tests.adversary import ARENAS, BEFORE, MAGNITUDES, STYLES, WAYS, Target, attacked, forced
from tests.kfac_cases import forms_of, surveyed
from tests.ranks import run_on_ranks

PARTS = ("tokens +-1e+20", "uses +-1e+20", "tokens +-1e+08, gradients 1e+08", "squares of 1.04858e+06 less 1",
         "nan token", "all equal", "products just below")  # fmt: skip


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    size = float(torch.stack([(a[p].double() - b[p].double()).square().sum() for p in a]).sum().sqrt())
    return size if math.isfinite(size) else math.inf


# --- microbatches ---------------------------------------------------------------------------------------------------


def with_and_without(target: Target, plan: Plan, made: bool, first: bool) -> dict[str, float]:
    """Ratios of attackers that share a step with two microbatches of ordinary samples, before or after them."""
    style = STYLES["flat"](target.model.trainable)
    mechanism = Mechanism(poisson(1000, expected_batch_size=10), style, 1.0)
    stages = make_stages(target.model, sgd(0.1), mechanism=mechanism, plan=plan)
    weights = stages.weights(target.params, torch.device("cpu"))
    everyone = torch.ones(target.size)

    def total(mask: Tensor) -> ClippedSum:
        quiet = [(target.quiet, everyone)] * 2
        several = [(target.data, mask), *quiet] if first else [*quiet, (target.data, mask)]
        added = add_microbatches(
            lambda i, onto: stages.gradient(weights, style.init(), *several[i], onto=onto), len(several)
        )
        return added.total

    alone = torch.zeros(target.size)
    alone[:BEFORE], alone[BEFORE + len(target.attackers) :] = 1.0, 1.0
    absent, found = total(alone), {}
    for k, name in enumerate(target.attackers):
        one = alone.clone()
        one[BEFORE + k] = 1.0
        present = total(one)
        found[name] = distance(present.value, absent.value) / float(present.sensitivity)
    return found


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[2]], ids=lambda way: way[0].value)
@pytest.mark.parametrize("name", ["linear", "linear+embedding", "linear+add"])
def test_a_sample_of_one_microbatch_moves_the_sum_of_all_by_at_most_the_bound(name, way, first):
    target = attacked(ARENAS[name](), torch.float32, few=True, parts=PARTS)
    plan = make_plan(target.model, target.params, target.data, method=Method.AUTO)
    found = with_and_without(target, forced(plan, *way), True, first)
    assert max(found.values()) <= 1 + 1e-6, found
    assert max(found.values()) > 0.9, "nothing was clipped, so nothing was tested"


# --- references of kernels ------------------------------------------------------------------------------------------

B, T, D = 12, 6, 5


def pair(M: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output gradients and inputs; the last sample but one has tokens +M and -M."""
    draw = torch.Generator().manual_seed(1)
    g, x = torch.randn(B, T, D, generator=draw), torch.randn(B, T, D, generator=draw) + 1
    x[-2], g[-2] = 0.0, 1.0
    x[-2, 0], x[-2, 1] = M, -M
    return g.to(dtype), x.to(dtype)


def moved(norms: Tensor, total: Any) -> float:
    """Return how far the last sample but one moves a sum that is clipped to 1 by these squared norms."""
    factors = clip_factors(norms.double().sqrt(), max_norm=1.0)
    without = factors.clone()
    without[-2] = 0
    size = float((total(factors).double() - total(without).double()).norm())
    return size if math.isfinite(size) else math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("M", MAGNITUDES)
@pytest.mark.parametrize("norms", [direct_reference, ghost_reference], ids=["direct", "ghost"])
def test_references_of_pairs_share_no_accumulator_that_a_sample_can_fill(norms, M, dtype):
    g, x = pair(M, dtype)
    slack = 1e-6 + (B + 3) ** 2 * 2.0**-24  # the total is rounded to float32, see the kernel
    assert moved(norms(g, x), lambda f: weighted_reference(g, x, f.float())) <= 1 + slack


@pytest.mark.parametrize("M", MAGNITUDES)
def test_references_of_kept_gradients_share_no_accumulator_that_a_sample_can_fill(M):
    g, x = pair(M, torch.bfloat16)
    kept, parts = keep_reference(g, x)
    for norms in (parts.sum(1), squared_norms_reference(kept)):
        assert moved(norms, lambda f: weighted_sum_reference(kept, f, torch.float64)) <= 1 + 1e-6


@pytest.mark.parametrize("M", MAGNITUDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_references_of_embeddings_share_no_accumulator_that_a_sample_can_fill(M, dtype):
    """All tokens are one word: its row of the sum is one accumulator for everyone."""
    ids, g = torch.zeros(B, T, dtype=torch.long), torch.full((B, T, D), 0.2)
    g[-2, 0], g[-2, 1], g[-2, 2:] = M, -M, 0.0
    g = g.to(dtype)
    slack = 1e-6 + (B + 3) ** 2 * 2.0**-24
    assert moved(embedding_norms_reference(ids, g), lambda f: embedding_sum_reference(ids, g, f, 3)) <= 1 + slack


@pytest.mark.parametrize("M", MAGNITUDES)
def test_a_fused_update_adds_what_was_clipped(M):
    """Sums that an update makes itself, without noise and at rate 1."""
    g, x = pair(M, torch.float32)
    kept, _ = keep_reference(g, x)

    def total(factors: Tensor) -> Tensor:
        param = torch.zeros(D, D, dtype=torch.float64)
        leaf = Leaf(kept, factors, param, torch.zeros_like(param), None, None, 0, False)
        update_leaf_reference_(
            leaf, None, torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]).double(), Hyper(0.0, None, 0, 0, 0, 0)
        )
        return param

    assert moved(squared_norms_reference(kept), total) <= 1 + 1e-6
    assert moved(squared_norms_reference(kept), lambda f: LazySum(kept, f).evaluate()) <= 1 + 1e-6


# --- statistics and counts ------------------------------------------------------------------------------------------


def statistics_target(M: float, kind: str) -> tuple[Model, Any, dict[str, Tensor]]:
    params = {"w": torch.full((D, D), 0.1, dtype=torch.float64), "b": torch.zeros(D, dtype=torch.float64)}
    params["e"] = torch.full((4, D), 0.1, dtype=torch.float64)

    def loss(p: Any, d: Any) -> Tensor:
        h = ops.linear(d["x"], p["w"], p["b"]) + ops.embedding(d["ids"], p["e"])
        return (h * d["g"]).sum((1, 2))

    draw = torch.Generator().manual_seed(1)
    g, x = torch.randn(B, T, D, generator=draw).double(), torch.randn(B, T, D, generator=draw).double() + 1
    ids = torch.randint(0, 4, (B, T), generator=draw)
    x[-2], g[-2], ids[-2] = 0.0, 1.0, 0
    if kind in ("tokens", "both"):
        x[-2, 0], x[-2, 1] = M, -M
    if kind in ("gradients", "both"):
        g[-2], g[-2, 0], g[-2, 1] = 0.0, M, -M
    return from_loss(loss, params), params, {"x": x, "g": g, "ids": ids}


@pytest.mark.parametrize("kind", ["tokens", "gradients", "both"])
@pytest.mark.parametrize("M", [1.0, 1e8, 1e20, 1e30, 3e38])
def test_private_statistics_share_no_accumulator_that_a_sample_can_fill(M, kind):
    model, params, data = statistics_target(M, kind)
    known = separate_biases(surveyed(model, params, data))
    more = Statistics(poisson(100, expected_batch_size=B), 1.0, 1.0, 1)
    sums = []
    for last in (1.0, 0.0):
        mask = torch.ones(2, B)
        mask[0, -2] = last
        mask[1, -2] = 0.0
        both = tree.map(lambda leaf: torch.stack([leaf, leaf]), data)
        batch = trusted_batch(both, mask, more.sampling, step=0, purpose=STATISTICS)
        estimator = Estimator(known, forms_of(known), Fisher.EMPIRICAL, Sharing.EXPAND)
        total = clipped_statistics(
            model, params, batch, estimator=estimator, statistics=more, scales={}, key=keys.key(0)
        )
        sums.append(total)
    assert distance(sums[0].value, sums[1].value) <= float(sums[0].sensitivity) * (1 + 1e-6)


def test_one_sample_moves_the_count_of_a_quantile_by_a_half():
    style = clipping.quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=1.0)
    norms = torch.rand(4096, dtype=torch.float64).mul(2)
    everyone = torch.ones(4096)
    for odd in (0.0, 0.5, 1.0, 1e30, math.nan, math.inf):
        norms[7] = odd
        squared = Norms({"a": norms.square() / 2, "b": norms.square() / 2})
        mask = everyone.clone()
        mask[7] = 0.0
        present, absent = (float(style.tally(squared, m, style.init())) for m in (everyone, mask))
        assert abs(present - absent) == 0.5


# --- ranks ----------------------------------------------------------------------------------------------------------

SHARDED = [("linear", 1), ("linear+embedding", 2), ("linear+add", 1), ("add|add", 4)]


def parts_of(params: Any, sharding: Sharding) -> Any:
    return tree.nest({path: shard_leaf(leaf, path, sharding).to_local() for path, leaf in tree.flatten(params).items()})


def ratios(options: dict[str, Any]) -> dict[str, float]:
    """Attackers on the last rank; both ranks hold the same ordinary samples."""
    found = {}
    for name, i in SHARDED:
        target = attacked(ARENAS[name](), torch.float32, few=True, parts=PARTS[:3])
        model, style = target.model, STYLES["flat"](target.model.trainable)
        sharding = make_sharding(model, make_mesh({"shard": 2}, device_type="cpu"), **options)
        last = sharding.rank == sharding.ranks - 1
        data = target.data if last else target.quiet
        plan = make_plan(model, abstract_params(model, sharding), data, method=Method.AUTO)
        mechanism = Mechanism(poisson(1000, expected_batch_size=10), style, 1.0)
        stages = make_stages(
            model,
            sgd(0.1),
            mechanism=mechanism,
            plan=forced(plan, *WAYS[i]),
            execution=make_execution(sharding=sharding),
        )
        weights = stages.weights(parts_of(target.params, sharding), torch.device("cpu"))
        alone = torch.zeros(target.size)
        alone[:BEFORE], alone[BEFORE + len(target.attackers) :] = 1.0, 1.0

        def total(mask: Tensor, data: Any = data, stages: Any = stages, weights: Any = weights) -> ClippedSum:
            part = stages.gradient(weights, (), data, mask)
            return stages.reduce(part.total)

        absent = total(alone)
        for k, attack in enumerate(target.attackers):
            one = alone.clone()
            one[BEFORE + k] = 1.0 if last else 0.0
            present = total(one)
            gap = {path: present.value[path].double() - absent.value[path].double() for path in present.value}
            found[f"{name}, {WAYS[i][0].value}, {attack}"] = float(sharded_global_norm(gap, sharding)) / float(
                present.sensitivity
            )
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        {"zero": Zero.THREE},
        pytest.param({"zero": Zero.TWO, "reduce": Reduce.PER_MICROBATCH}, marks=pytest.mark.slow),
        pytest.param({"zero": Zero.NONE}, marks=pytest.mark.slow),
    ],
    ids=["zero-3", "zero-2", "zero-0"],
)
def test_no_attack_on_one_rank_moves_the_sum_of_all_too_far(options):
    first, second = run_on_ranks(ratios, 2, options)
    assert first == pytest.approx(second)
    assert {name: ratio for name, ratio in first.items() if not ratio <= 1 + 1e-6} == {}
    assert max(first.values()) > 0.2


MANY = 1024


def aligned(dtype: torch.dtype | None) -> tuple[float, float]:
    """Return how far one of 2 x 1024 equal samples moves a sum that travels in ``dtype``, and the stated bound."""
    params = {"w": torch.zeros(4, 4)}
    model = from_loss(lambda p, d: ops.linear(d["x"], p["w"]).sum((1, 2)), params)
    mesh = make_mesh({"shard": 2}, device_type="cpu")
    sharding = make_sharding(model, mesh, zero=Zero.THREE, reduce_dtype=dtype)
    x = torch.full((MANY, 1, 4), 3.0)
    mechanism = Mechanism(poisson(10 * MANY, expected_batch_size=2 * MANY), clipping.flat(max_norm=1.0), 1.0)
    plan = make_plan(model, abstract_params(model, sharding), {"x": x}, method=Method.AUTO)
    stages = make_stages(model, sgd(0.1), mechanism=mechanism, plan=plan, execution=make_execution(sharding=sharding))
    weights = stages.weights(parts_of(params, sharding), torch.device("cpu"))
    worst = 0.0
    for last in torch.linspace(0.5, 1, 9).tolist():
        x = torch.full((MANY, 1, 4), 3.0)
        x[-1] = torch.tensor([-3.0, -3.0, -3.0, -3.0 * last])
        sums = []
        for counted in (1.0, 0.0):
            mask = torch.ones(MANY)
            mask[-1] = counted if sharding.rank == 1 else 1.0
            sums.append(stages.reduce(stages.gradient(weights, (), {"x": x}, mask).total))
        gap = {path: sums[0].value[path].double() - sums[1].value[path].double() for path in sums[0].value}
        worst = max(worst, float(sharded_global_norm(gap, sharding)))
    return worst, float(sums[0].sensitivity)


def both_ways() -> list[tuple[float, float]]:
    return [aligned(None), aligned(torch.float32)]


@pytest.mark.ranks
def test_rounding_on_the_way_is_in_the_stated_sensitivity():
    ((exact, bound), (moved, stated)), _ = run_on_ranks(both_ways, 2)
    assert exact <= bound * (1 + 1e-6)
    assert bound == 1.0
    assert 1 + 1e-6 < moved <= stated < 1 + 1e-2


def tallies(data: Data) -> float:
    """The next bound of a quantile, of which each rank has counted all samples, or half of them."""
    arena = ARENAS["linear"]()
    style = clipping.quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.5, count_noise=1e-9)
    mechanism = Mechanism(poisson(1000, expected_batch_size=7.0), style, 1.0)
    sharding = make_sharding(arena.model, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.THREE, data=data)
    samples = attacked(arena, torch.float32, few=True, parts=("all equal", "zeros")).data
    size = len(next(iter(samples.values())))
    mask = torch.ones(size)
    if data is Data.SPLIT:  # every other sample is padding here and counted there
        mask[sharding.rank :: 2] = 0.0
    plan = make_plan(arena.model, abstract_params(arena.model, sharding), samples, method=Method.AUTO)
    stages = make_stages(
        arena.model, sgd(0.1), mechanism=mechanism, plan=plan, execution=make_execution(sharding=sharding)
    )
    bound = style.init()
    weights = stages.weights(parts_of(arena.params, sharding), torch.device("cpu"))
    part = stages.gradient(weights, bound, samples, mask)
    assert abs(float(part.tally)) > 0.4, "nothing was counted, so nothing was tested"
    return float(style.update(bound, sum_over_samples(sharding, part.tally), keys.key(3), 7.0))


@pytest.mark.ranks
def test_the_count_of_a_quantile_is_of_every_sample_once():
    """Ranks that all hold the same samples count them once; ranks that hold different ones count them together."""
    (same, again), (split, other) = (run_on_ranks(tallies, 2, data) for data in (Data.REPLICATED, Data.SPLIT))
    assert same == again == split == other
