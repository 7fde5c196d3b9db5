"""Private K-FAC: preconditioning before clipping, public sources, and noised statistics."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fdp.gradients.per_sample
import fdp.kfac.private.noised_factors
import fdp.step
from fdp import keys, tree
from fdp.data.datasets import digits
from fdp.data.digest import data_digest
from fdp.data.images import examples
from fdp.data.windows import windows
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.fast.fused_update import FusedUpdate
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.eight_bits import stored_gradient
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.linear_maps import LowRankMap, Map, MatrixMap, Sides, apply_rows
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.precondition import map_record, map_size
from fdp.gradients.rules import Dense, OneHot, Pair
from fdp.kfac import factors
from fdp.kfac.config import KfacConfig
from fdp.kfac.factor_forms import Form
from fdp.kfac.layers import survey
from fdp.kfac.measure.collect import collect
from fdp.kfac.measure.estimator import Estimator, Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.measure.per_sample_rows import factor_keys
from fdp.kfac.optimizer import kfac
from fdp.kfac.private.noised_factors import STATISTICS, clipped_statistics, release, statistic_name, statistic_scales
from fdp.kfac.private.public_data import NoiseImages, Public, ZipfTokens, draw, public, synthetic
from fdp.kfac.private.refresh import private_kfac, refresh_noised, refresh_public, sides_of
from fdp.kfac.private.separate_biases import separate_biases, sides_by_path
from fdp.kfac.types import ColumnsFactor, Layer, Product
from fdp.models import mlp
from fdp.optimizers import chain, clip_by_global_norm, sgd
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharding import Zero, make_sharding
from fdp.privacy import accounting, clipping
from fdp.privacy.mechanism import Mechanism, Statistics, statistics, without_noise
from fdp.privacy.sampling import TRAINING, poisson, sample_batch, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import Batch, FdpError, Tree
from tests.conftest import SAMPLES, case_named, reference_of
from tests.kfac_cases import forms_of, matrices, surveyed
from tests.ranks import run_on_ranks

METHODS = [method for method in Method if method is not Method.NONE]
KEY = keys.key(11)


def symmetric(n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    a = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (torch.eye(n, dtype=torch.float64) + (a + a.mT) / 4).to(dtype)


def diagonal(n: int, seed: int, dtype: torch.dtype = torch.float64) -> LowRankMap:
    each = 0.5 + torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return LowRankMap(each, each.new_zeros(n, 0), each.new_zeros(0, 0))


def low_rank(n: int, seed: int, dtype: torch.dtype = torch.float64) -> LowRankMap:
    u = torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return diagonal(n, seed, dtype)._replace(columns=u, core=symmetric(2, seed, dtype))


def maps_of(model: Any, *, dtype: torch.dtype = torch.float64, forms: str = "dense") -> dict[str, Sides]:
    """Return maps for both sides of every leaf except the first vector; diagonals for grouped kernels."""
    make = {"dense": lambda n, s: MatrixMap(symmetric(n, s, dtype)), "low-rank": lambda n, s: low_rank(n, s, dtype)}
    make["diagonal"] = lambda n, s: diagonal(n, s, dtype)
    found = {}
    for i, path in enumerate(sorted(model.trainable)):
        shape = model.leaves[path].shape
        if len(shape) == 1:
            found |= {path: Sides(diagonal(shape[0], i, dtype), None)} if i else {}
        elif path == "kernel":
            found[path] = Sides(diagonal(shape[0], i, dtype), make[forms](int(np.prod(shape[1:])), i + 50))
        else:
            found[path] = Sides(make[forms](shape[0], i), make[forms](int(np.prod(shape[1:])), i + 50))
    return found


def matrix_of(map: Map | None, n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64) if map is None else apply_rows(map, torch.eye(n, dtype=torch.float64))


def mapped_gradients(case: str, sides: dict[str, Sides]) -> dict[str, Tensor]:
    """Return every sample's gradient by the definition, multiplied by the matrices."""
    found = {}
    for path, gradient in reference_of(case).items():
        left, right = sides.get(path, Sides(None, None))
        rows = gradient.shape[1] if left is None else map_size(left)
        flat = gradient.reshape(len(gradient), rows, -1)
        done = matrix_of(left, rows) @ flat @ matrix_of(right, flat.shape[2])
        found[path] = done.reshape(gradient.shape)
    return found


def measured(case: str, method: Method, sides: dict[str, Sides], blocks: CompiledRunner | None = None):
    model, params, data = case_named(case)
    plan = make_plan(model, params, data, method=method, dtype=torch.float64)
    return per_sample_norms(
        model,
        params,
        data,
        plan=plan,
        execution=Execution(runner=blocks or EAGER),
        transform=lambda p, r: map_record(sides, p, r),
    )[1:]


def check_norms_and_sums(case: str, method: Method, forms: str, blocks: CompiledRunner | None = None) -> None:
    sides = maps_of(case_named(case).model, forms=forms)
    truth = mapped_gradients(case, sides)
    norms, stash = measured(case, method, sides, blocks)
    for path, square in norms.squared.items():
        torch.testing.assert_close(square, truth[path].flatten(1).square().sum(1), rtol=1e-8, atol=1e-12, msg=path)
    clip = clipping.clip_to(norms, max_norm=0.3)
    total = clipped_sum(stash, clip)
    whole = torch.cat([g.flatten(1) for g in truth.values()], 1).norm(dim=1)
    factor = (0.3 / whole).clamp(max=1)
    assert bool((factor < 1).any()), "nothing was clipped, so nothing was tested"
    for path, value in total.value.items():
        expected = torch.einsum("b,b...->...", factor, truth[path])
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9, msg=path)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_norms_and_sums_are_those_of_preconditioned_gradients(case_name, method):
    """Cover linear, embedding and convolution; tied, used twice, grouped and without pairs."""
    check_norms_and_sums(case_name, method, "dense")


@pytest.mark.parametrize("forms", ["low-rank", "diagonal"])
@pytest.mark.parametrize("method", [Method.GHOST, Method.GHOST_BK, Method.AUTO], ids=lambda m: m.value)
def test_norms_and_sums_with_maps_of_other_forms(method, forms):
    for case in ("gpt", "gpt-untied", "cnn", "convolutions"):
        check_norms_and_sums(case, method, forms)


@pytest.mark.parametrize(
    "case", [pytest.param("gpt", marks=pytest.mark.slow), pytest.param("gpt-untied", marks=pytest.mark.long)]
)
def test_compiled_blocks_and_fused_heads_are_preconditioned_alike(case):
    check_norms_and_sums(case, Method.AUTO, "dense", CompiledRunner(backend="aot_eager"))


def test_element_maps_of_a_leaf_that_is_used_in_every_way():
    model = case_named("all-ways").model
    sides = {"w": Sides(diagonal(20, 1), None)}
    truth = mapped_gradients("all-ways", sides)
    for method in METHODS:
        norms, _ = measured("all-ways", method, sides)
        torch.testing.assert_close(norms.squared["w"], truth["w"].flatten(1).square().sum(1), rtol=1e-8, atol=0.0)
    assert model.leaves["w"].shape == (5, 4)


def test_rows_are_rounded_before_they_are_measured():
    """In half precision, norm and sum must see the same numbers: the mapped rows in their own dtype."""
    left, right = (torch.randn(2, 1, 3, n).bfloat16() for n in (4, 5))
    sides = {"w": Sides(MatrixMap(symmetric(4, 0, torch.float32)), MatrixMap(symmetric(5, 1, torch.float32)))}
    done = map_record(sides, "w", Pair(left, right, (4, 5)))
    assert isinstance(done, Pair)
    assert isinstance(done.left, Tensor)
    assert done.left.dtype == done.right.dtype == torch.bfloat16
    diagonals = {"w": Sides(diagonal(4, 0, torch.float32), None)}
    one_hot = map_record(diagonals, "w", Pair(OneHot(torch.tensor([[0, 3, 1]] * 2)), right, (4, 5)))
    assert isinstance(one_hot, Pair)
    assert one_hot.right.dtype == torch.bfloat16
    dense = map_record(sides, "w", Dense(torch.randn(2, 4, 5).bfloat16(), torch.ones(2, 1)))
    assert isinstance(dense, Dense)
    assert dense.gradient.dtype == torch.bfloat16
    assert dense.squares is None, "the squares are of the gradient before the map"


@pytest.mark.parametrize("size", [1e30, torch.nan, torch.inf])
@pytest.mark.parametrize("method", [Method.GHOST, Method.GHOST_BK, Method.MATERIALIZE], ids=lambda m: m.value)
def test_maps_that_overflow_or_are_not_finite_move_the_sum_by_at_most_the_bound(method, size):
    """For any maps, a sample adds at most C to the sum, and nothing if it is not finite."""
    model, params, data = case_named("gpt")
    sides = {}
    for i, path in enumerate(sorted(model.trainable)):
        each = torch.ones(model.leaves[path].shape[0], dtype=torch.float64)
        each[0] = 1.0 if i else size
        sides[path] = Sides(LowRankMap(each, each.new_zeros(len(each), 0), each.new_zeros(0, 0)), None)
    plan = make_plan(model, params, data, method=method, dtype=torch.float32)
    narrow = tree.map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, (params, data))
    _, norms, stash = per_sample_norms(model, *narrow, plan=plan, transform=lambda p, r: map_record(sides, p, r))
    clip = clipping.clip_to(norms, max_norm=0.3)
    for b in range(SAMPLES):
        alone = clip.masked(torch.arange(SAMPLES) == b)
        added = (
            torch.stack([value.square().sum() for value in clipped_sum(stash.copy(), alone).value.values()])
            .sum()
            .sqrt()
        )
        assert float(added) <= 0.3 * (1 + 1e-6)


def norm_before_the_map(monkeypatch):
    """Make the mistake of preconditioning after the norm is taken."""
    real = fdp.gradients.per_sample.per_sample_norms

    def wrong(*args, transform, **options):
        losses, norms, _ = real(*args, **options)
        _, _, stash = real(*args, transform=transform, **options)
        return losses, norms, stash

    monkeypatch.setitem(globals(), "per_sample_norms", wrong)


def left_map_only(monkeypatch):
    real = map_record

    def wrong(sides, path, record):
        return real({p: s._replace(right=None) for p, s in sides.items()}, path, record)

    monkeypatch.setitem(globals(), "map_record", wrong)


def second_backward_not_mapped(monkeypatch):
    real = fdp.gradients.per_sample.Stash
    monkeypatch.setattr(
        fdp.gradients.per_sample, "Stash", lambda *a: real(*a)._replace(transform=fdp.gradients.per_sample.identity)
    )


@pytest.mark.parametrize("mutate", [norm_before_the_map, left_map_only, second_backward_not_mapped])
def test_the_check_notices(mutate, monkeypatch):
    check_norms_and_sums("gpt", Method.GHOST, "dense")
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_norms_and_sums("gpt", Method.GHOST, "dense")


def test_every_bias_is_a_layer_of_its_own():
    model, params, data = case_named("cnn")
    known = surveyed(model, params, data)
    alone = separate_biases(known)
    assert {layer.weight for layer in alone.layers} == model.trainable
    assert all(layer.bias is None for layer in alone.layers)
    assert alone.shapes[Layer("head.weight", None)] == (4, model.leaves["head.weight"].shape[1])
    assert alone.is_elementwise(Layer("head.bias", None))


def test_maps_that_are_not_of_one_leafs_two_sides_are_refused():
    with pytest.raises(FdpError, match="joined with b"):
        sides_by_path({Layer("w", "b"): Sides(None, None)})
    with pytest.raises(FdpError, match="product"):
        sides_by_path({Layer("w", None): Product(torch.eye(2), torch.eye(2), torch.ones(2, 2))})
    with pytest.raises(FdpError, match="groups"):
        map_record(
            {"k": Sides(MatrixMap(torch.eye(4)), None)}, "k",
            Pair(torch.ones(1, 2, 3, 2), torch.ones(1, 2, 3, 5), (4, 5)),
        )  # fmt: skip


# --- the step -------------------------------------------------------------------------------------------------------

MODEL = mlp(widths=(64, 6), classes=10)
TRAIN, _ = digits()
EIGHT = poisson(len(TRAIN), expected_batch_size=8)
MECHANISM = without_noise(EIGHT, clipping.flat(max_norm=0.5))
CONFIG = KfacConfig(damping=1e-2, factor_period=1, inverse_period=1, kl_clip=None, momentum=0.0)
NOISE = NoiseImages((1, 8, 8), 10, 32, exponent=1.0, mean=0.3, std=0.3, key=keys.key(1))


def kfac_of(microbatch: int = 8, **settings: Any):
    example = TRAIN.fetch(np.arange(microbatch))
    config = dataclasses.replace(CONFIG, **settings)
    return private_kfac(MODEL, example, learning_rate=1.0, config=config, largest=100)


def batch_of(count: int = 8) -> Batch:
    data = tree.map(lambda leaf: leaf[None], TRAIN.fetch(np.arange(count)))
    return trusted_batch(data, torch.ones(1, count), EIGHT, step=None)


def one_step(compile: Compile = Compile.NONE, method: Method = Method.GHOST_BK):
    k = kfac_of()
    params = MODEL.init(keys.key(3))
    batch = batch_of()
    plan = make_plan(MODEL, params, tree.map(lambda leaf: leaf[0], batch.data), method=method)
    state = k.place(init_state(MODEL, params, k.optimizer, MECHANISM))
    state = refresh_public(k, state, public(NOISE, private=TRAIN, digest=data_digest), KEY, 0)
    step = make_train_step(
        MODEL,
        k.optimizer,
        mechanism=MECHANISM,
        plan=plan,
        precondition=sides_of,
        execution=make_execution(compile=compile),
    )
    return state, *step(state, batch, keys.key(4))


def test_a_step_maps_clips_and_maps_again():
    state, after, metrics = one_step()
    sides = sides_of(state)
    assert set(sides) == MODEL.trainable
    assert all(tree.leaves(both) for both in sides.values())
    batch = batch_of()
    data = tree.map(lambda leaf: leaf[0], batch.data)
    plan = make_plan(MODEL, state.params, data, method=Method.MATERIALIZE)
    _, norms, stash = per_sample_norms(
        MODEL, state.params, data, plan=plan, transform=lambda p, r: map_record(sides, p, r)
    )
    torch.testing.assert_close(metrics.norms, norms.total().to(metrics.norms), rtol=1e-5, atol=0.0)
    total = clipped_sum(stash, clipping.clip_to(norms, max_norm=0.5))
    before, now = tree.flatten(state.params), tree.flatten(after.params)
    for path, value in total.value.items():
        record = map_record(sides, path, Dense(value.unsqueeze(0)))
        expected = stored_gradient(record)[0] / 8
        torch.testing.assert_close(before[path] - now[path], expected.float(), rtol=1e-3, atol=1e-5, msg=path)


@pytest.mark.slow
def test_a_compiled_step_is_the_same():
    _, after, _ = one_step()
    for compile in (Compile.STEP, Compile.BLOCK):
        _, compiled, _ = one_step(compile)
        for path, leaf in tree.flatten(after.params).items():
            torch.testing.assert_close(leaf, tree.flatten(compiled.params)[path], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("source", "microbatches"), [("noised", 2), pytest.param("public", 1, marks=pytest.mark.slow)])
def test_a_donated_step_of_compiled_blocks_is_the_plain_step(source, microbatches, monkeypatch):
    """Apply roots before clipping and after the noise, and the rest in one pass; frozen leaves do not change."""
    passes, real = [], FusedUpdate.__call__
    monkeypatch.setattr(FusedUpdate, "__call__", lambda self, *args: passes.append(0) or real(self, *args))
    clip = clipping.quantile(max_norm=0.5, target_quantile=0.5, learning_rate=0.3, count_noise=1.0)
    more = statistics(EIGHT, max_norm=1.0, noise_multiplier=0.5, period=2)
    mechanism = Mechanism(EIGHT, clip, 1.3, more if source == "noised" else None)
    model, size = MODEL._replace(frozen=frozenset({"head.bias"})), 8 // microbatches
    config = dataclasses.replace(CONFIG, momentum=0.8, weight_decay=0.1, kl_clip=1e-3)
    data, mask = TRAIN.fetch(np.arange(8)), torch.ones(microbatches, size)
    cut = tree.map(lambda leaf: leaf.unflatten(0, (-1, size)), data)
    batch, own = (trusted_batch(cut, mask, EIGHT, step=None, purpose=purpose) for purpose in (TRAINING, STATISTICS))
    params = model.init(keys.key(3))
    plan = make_plan(model, params, tree.map(lambda leaf: leaf[0], batch.data), method=Method.FLASH)
    made = []
    for compile in (Compile.NONE, Compile.BLOCK):
        donate = ("state",) if compile is Compile.BLOCK else ()
        runner = CompiledRunner(backend="eager") if compile is Compile.BLOCK else EAGER
        k = private_kfac(
            model,
            TRAIN.fetch(np.arange(size)),
            learning_rate=0.3,
            config=config,
            largest=100,
            execution=Execution(runner=runner),
        )
        step = make_train_step(
            model,
            k.optimizer,
            mechanism=mechanism,
            plan=plan,
            precondition=sides_of,
            execution=Execution(runner=runner),
            donate=donate,
        )
        state = k.place(init_state(model, tree.map(torch.clone, params), k.optimizer, mechanism))
        places = [leaf.data_ptr() for leaf in tree.leaves(state)]
        for t in range(3):
            if source == "public":
                known = public(NOISE, private=TRAIN, digest=data_digest)
                state = refresh_public(k, state, known, KEY, t, donate=bool(donate))
            else:
                options: Any = {"mechanism": mechanism, "scales": {}, "donate": bool(donate)}
                state = refresh_noised(k, state, lambda: own, KEY, t, **options)
            state, _ = step(state, batch, KEY)
        assert not donate or places == [leaf.data_ptr() for leaf in tree.leaves(state)]
        made.append(tree.flatten(state))
    assert len(passes) == 3
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(made[1]["params.head.bias"], tree.flatten(params)["head.bias"])


def test_bad_maps_are_refused_before_anything_is_computed():
    params, batch = MODEL.init(keys.key(3)), batch_of()
    data = tree.map(lambda leaf: leaf[0], batch.data)
    plan = make_plan(MODEL, params, data, method=Method.AUTO)
    for sides, message in [
        ({"nowhere": Sides(None, None)}, "nowhere"),
        ({"head.weight": Sides(None, MatrixMap(torch.eye(7)))}, "bias is a leaf of its own"),
    ]:
        step = make_train_step(MODEL, sgd(1.0), mechanism=MECHANISM, plan=plan, precondition=lambda _, s=sides: s)
        with pytest.raises(FdpError, match=message):
            step(init_state(MODEL, params, sgd(1.0), MECHANISM), batch, KEY)
    plain = make_plan(MODEL, params, data, method=Method.NONE)
    with pytest.raises(FdpError, match="method none"):
        make_train_step(MODEL, sgd(1.0), mechanism=MECHANISM, plan=plain, precondition=lambda _: {})


def test_curvature_of_a_batch_never_gets_into_a_private_step():
    """Refuse the optimizer of plain training, also in a chain, and refreshing roots from a batch."""
    params, batch = MODEL.init(keys.key(3)), batch_of()
    data = tree.map(lambda leaf: leaf[0], batch.data)
    private, plain = (make_plan(MODEL, params, data, method=method) for method in (Method.GHOST_BK, Method.NONE))
    measured = kfac(MODEL, data, learning_rate=1.0, config=CONFIG).optimizer
    for optimizer in (measured, chain(measured), chain(clip_by_global_norm(1.0), measured)):
        make_train_step(MODEL, optimizer, mechanism=MECHANISM, plan=plain)
        with pytest.raises(FdpError, match="K-FAC with factors measured on samples"):
            make_train_step(MODEL, optimizer, mechanism=MECHANISM, plan=private)
    k = kfac_of()
    state = k.place(init_state(MODEL, params, k.optimizer, MECHANISM))
    for step in (0, 1):
        with pytest.raises(FdpError, match="got roots for a private step"):
            k.refresh(state, data, torch.ones(8), KEY, step)


# --- public sources -------------------------------------------------------------------------------------------------


def test_the_private_dataset_is_refused_as_a_source():
    again, _ = digits()
    for same in (TRAIN, again):
        with pytest.raises(FdpError, match="got the private dataset"):
            public(same, private=TRAIN, digest=data_digest)
    with pytest.raises(FdpError, match="expected samples like"):
        public(dataclasses.replace(NOISE, shape=(1, 9, 8)), private=TRAIN, digest=data_digest)
    k, state = kfac_of(), None
    with pytest.raises(FdpError, match="expected a Public source"):
        draw(TRAIN, samples=4, key=KEY)  # pyright: ignore
    joint = kfac(MODEL, TRAIN.fetch(np.arange(8)), learning_rate=1.0, config=CONFIG)
    with pytest.raises(FdpError, match="roots"):
        refresh_public(joint, state, Public(NOISE, "of noise"), KEY, 0)  # pyright: ignore
    with pytest.raises(FdpError, match="so that they are accounted for"):
        refresh_noised(k, state, batch_of, KEY, 0, mechanism=MECHANISM, scales={})  # pyright: ignore


def test_synthetic_data_has_the_shapes_of_the_data_and_nothing_else_of_it():
    images = synthetic(TRAIN, outputs=10, key=keys.key(1))
    assert isinstance(images, NoiseImages)
    assert (images.shape, images.classes) == ((1, 8, 8), 10)
    black = examples(torch.zeros(7, 1, 8, 8), torch.zeros(7), where="black")
    few = np.arange(5)
    same = synthetic(black, outputs=10, key=keys.key(1)).fetch(few)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(images.fetch(few)), tree.leaves(same), strict=True))
    text = windows(np.zeros(90, dtype=np.uint8), context=8, vocab_size=50, where="text")
    tokens = synthetic(text, outputs=50, key=keys.key(1)).fetch(few)["tokens"]
    assert (tuple(tokens.shape), tokens.dtype, int(tokens.max()) < 50) == ((5, 9), torch.int64, True)
    flat_images = examples(torch.zeros(7, 64), torch.zeros(7), where="flat")
    with pytest.raises(FdpError, match="synthetic: expected samples of tokens"):
        synthetic(flat_images, outputs=10, key=keys.key(1))


def test_synthetic_samples_are_a_function_of_their_index():
    tokens = ZipfTokens(vocab_size=50, context=7, samples=400, exponent=1.0, key=keys.key(2))
    some = tokens.fetch(np.array([5, 2, 5]))["tokens"]
    assert some.shape == (3, 8)
    assert torch.equal(some[0], some[2])
    assert not torch.equal(some[0], some[1])
    counts = tokens.fetch(np.arange(400))["tokens"].flatten().bincount(minlength=50)
    assert int(counts.sum()) == 3200
    assert 1.6 < float(counts[0] / counts[1]) < 2.5  # Zipf: twice as often
    images = NOISE.fetch(np.arange(32))
    assert images["image"].shape == (32, 1, 8, 8)
    assert abs(float(images["image"].std()) - 0.3) < 0.06
    assert int(images["label"].max()) < 10
    steps = images["image"].diff(dim=-1).std() / images["image"].std()
    white = dataclasses.replace(NOISE, exponent=0.0).fetch(np.arange(32))["image"]
    assert float(steps) < 0.8 * float(white.diff(dim=-1).std() / white.std()), "pink noise is smooth"


# --- private statistics ---------------------------------------------------------------------------------------------


def noisable(case: str):
    model, params, data = case_named(case)
    known = separate_biases(surveyed(model, params, data))
    return model, params, data, Estimator(known, forms_of(known), Fisher.EMPIRICAL, Sharing.EXPAND)


def more_of(max_norm: float, noise: float = 1e-12) -> Statistics:
    return Statistics(poisson(100, expected_batch_size=SAMPLES), max_norm, noise, 1)


def own_batch(data: Tree, more: Statistics, mask: Tensor) -> Batch:
    whole = tree.map(lambda leaf: leaf[None], data)
    return trusted_batch(whole, mask[None], more.sampling, step=None, purpose=STATISTICS)


def statistics_of(case: str, more: Statistics, fisher: Fisher = Fisher.EMPIRICAL, mask: Tensor | None = None, **change):
    model, params, data, estimator = noisable(case)
    data = data | change
    batch = own_batch(data, more, torch.ones(SAMPLES) if mask is None else mask)
    options = {"statistics": more, "estimator": estimator._replace(fisher=fisher), "scales": {}}
    total = clipped_statistics(model, params, batch, key=KEY, **options)
    return total, release(total, key=keys.key(9), **options)


@pytest.mark.parametrize("case", ["mlp", "cnn", "gpt", "gpt-untied", "convolutions"])
def test_statistics_without_clipping_and_noise_equal_the_curvature(case):
    """Compare with ``collect``, which does not separate samples."""
    model, params, data, estimator = noisable(case)
    _, found = statistics_of(case, more_of(1e12, 1e-30))
    truth = collect(model, params, data, torch.ones(SAMPLES), estimator=estimator, key=KEY)
    ours, theirs = matrices(found), matrices(truth)
    assert ours.keys() == theirs.keys()
    for where, matrix in theirs.items():
        torch.testing.assert_close(ours[where], matrix.double(), rtol=1e-8, atol=1e-9, msg=str(where))


def check_one_sample_moves_statistics_by_at_most_the_bound(case: str, **change: Any) -> None:
    more = more_of(0.05)
    everyone, _ = statistics_of(case, more, **change)
    assert all(bool(leaf.isfinite().all()) for leaf in everyone.value.values())
    moved = []
    for b in range(SAMPLES):
        mask = torch.ones(SAMPLES)
        mask[b] = 0
        without, _ = statistics_of(case, more, mask=mask, **change)
        gaps = [(everyone.value[n] - without.value[n]).square().sum() for n in everyone.value]
        moved.append(float(sum(gaps) ** 0.5))
    assert max(moved) <= 0.05 * (1 + 1e-6)
    assert max(moved) > 0.04, "nothing was clipped, so nothing was tested"


@pytest.mark.parametrize("pixel", [1.0, 1e6, torch.nan, torch.inf])
@pytest.mark.parametrize("case", ["mlp", "cnn"])
def test_one_sample_moves_the_statistics_by_at_most_the_bound(case, pixel):
    image = case_named(case).data["image"].clone()
    image[1] = image[1] * pixel
    check_one_sample_moves_statistics_by_at_most_the_bound(case, image=image)


@pytest.mark.parametrize("pixel", [1.0, 1e3, torch.nan])
def test_statistics_of_groups_are_bounded_too(pixel):
    x = case_named("convolutions").data["x"].clone()
    x[1] = x[1] * pixel
    check_one_sample_moves_statistics_by_at_most_the_bound("convolutions", x=x)


def test_tied_and_embedded_statistics_are_bounded_too():
    for case in ("gpt", "gpt-untied"):
        check_one_sample_moves_statistics_by_at_most_the_bound(case)


def test_statistics_of_masked_tokens_are_bounded_and_a_sample_without_targets_has_none():
    model, params, data, estimator = noisable("gpt")
    counted = torch.ones(data["tokens"].shape[0], data["tokens"].shape[1] - 1, dtype=torch.bool)
    counted[0], counted[1, 2:] = False, False
    data = data | {"loss_mask": counted}
    known = separate_biases(survey(model, params, data, dtype=torch.float64))
    more = more_of(0.05)
    estimator = estimator._replace(survey=known, fisher=Fisher.SAMPLED)
    common: Any = {"statistics": more, "estimator": estimator, "scales": {}}
    sums = {}
    for b in range(SAMPLES):
        mask = (torch.arange(SAMPLES) == b).float()
        batch = own_batch(data, more, mask)
        total = clipped_statistics(model, params, batch, key=KEY, **common)
        sums[b] = float(torch.stack([value.square().sum() for value in total.value.values()]).sum().sqrt())
    assert sums[0] == 0.0
    assert all(0.04 < size <= 0.05 * (1 + 1e-6) for b, size in sums.items() if b)


def inputs_not_in_the_norm(monkeypatch):
    real = fdp.kfac.private.noised_factors._squared_norms
    monkeypatch.setattr(
        fdp.kfac.private.noised_factors, "_squared_norms", lambda k, r, e: real(k, r, e) * (not k.inputs)
    )


def rows_times_the_factor_itself(monkeypatch):
    real = fdp.kfac.private.noised_factors._weighted_sum
    monkeypatch.setattr(fdp.kfac.private.noised_factors, "_weighted_sum", lambda k, r, c, e: real(k, r, c.sqrt(), e))


@pytest.mark.parametrize("mutate", [inputs_not_in_the_norm, rows_times_the_factor_itself])
def test_the_check_of_statistics_notices(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_one_sample_moves_statistics_by_at_most_the_bound("mlp")


def check_noise_of_statistics() -> None:
    """Check that every element of every matrix has noise z C, and that the weight is the expected batch size."""
    _, _, _, estimator = noisable("mlp")
    more = more_of(0.5, 3.0)
    total, _ = statistics_of("mlp", more)
    zero = total._replace(value={n: torch.zeros_like(leaf) + 1e6 * _eye(leaf) for n, leaf in total.value.items()})
    found = release(zero, statistics=more, estimator=estimator, scales={}, key=KEY)
    for each in factor_keys(estimator):
        factor = found[each.layer].left if each.left else found[each.layer].right
        assert factor is not None
        assert float(factor.weight) == SAMPLES
        shape = tuple(zero.value[statistic_name(each)].shape)
        draw = 3.0 * 0.5 * keys.normal(keys.fold_in(KEY, statistic_name(each)), shape, dtype=torch.float64)
        assert not isinstance(factor, ColumnsFactor)
        noise = (factor.total - 1e6 * _eye(zero.value[statistic_name(each)])).double()
        expected = draw if draw.ndim == 1 else (draw + draw.mT) / 2
        torch.testing.assert_close(noise, expected, rtol=1e-4, atol=1e-6)
    # the mean square of the noise of a symmetric matrix: (z C)^2 on its diagonal, half of it beside
    draws = [
        release(zero, statistics=more, estimator=estimator, scales={}, key=keys.fold_in(KEY, i)) for i in range(40)
    ]
    layer = Layer("layers.0.weight", None)
    totals = torch.stack([d[layer].right.total for d in draws]) - 1e6 * torch.eye(6)  # pyright: ignore
    off = totals[:, *torch.triu_indices(6, 6, 1)]
    assert 0.8 < float(totals.diagonal(dim1=1, dim2=2).square().mean()) / 2.25 < 1.2
    assert 0.8 < float(off.square().mean()) / 1.125 < 1.2


def _eye(leaf: Tensor) -> Tensor:
    return torch.ones_like(leaf) if leaf.ndim == 1 else torch.eye(len(leaf), dtype=leaf.dtype)


def test_noise_of_statistics():
    check_noise_of_statistics()


def half_of_the_noise_only(monkeypatch):
    real = fdp.kfac.private.noised_factors.add_noise

    def wrong(total, **options):
        noisy = real(total, **options)
        return {n: v if v.ndim == 1 else v.triu() + total.value[n].tril(-1) for n, v in noisy.items()}

    monkeypatch.setattr(fdp.kfac.private.noised_factors, "add_noise", wrong)


def noise_without_the_bound(monkeypatch):
    real = fdp.kfac.private.noised_factors.add_noise

    def wrong(total, **options):
        return real(total._replace(sensitivity=total.sensitivity / 3), **options)

    monkeypatch.setattr(fdp.kfac.private.noised_factors, "add_noise", wrong)


@pytest.mark.parametrize("mutate", [half_of_the_noise_only, noise_without_the_bound])
def test_the_check_of_noise_notices(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_noise_of_statistics()


def test_noisy_factors_are_positive_and_can_be_inverted():
    _, found = statistics_of("mlp", more_of(0.05, 10.0))
    assert float(torch.linalg.eigvalsh(matrices(found)["layers.0.weight", "right"]).min()) > -1e-9
    for both in found.values():
        for factor in both:
            if factor is not None:
                factors.check_factor(factor, "noisy")


def test_estimators_that_cannot_be_noised_are_refused():
    model, params, data, estimator = noisable("mlp")
    batch = own_batch(data, more_of(1.0), torch.ones(SAMPLES))
    layer = Layer("layers.0.weight", None)
    options: Any = {"statistics": more_of(1.0), "scales": {}, "key": KEY}
    refused = {
        "rows of the data": estimator._replace(forms={**estimator.forms, layer: (Form.COLUMNS, Form.DENSE)}),
        "got exact": estimator._replace(fisher=Fisher.EXACT),
        "sharing: expected expand": estimator._replace(sharing=Sharing.REDUCE),
    }
    for message, each in refused.items():
        with pytest.raises(FdpError, match=message):
            clipped_statistics(model, params, batch, estimator=each, **options)
    for change in ({"max_norm": 0.0}, {"noise_multiplier": 0.0}, {"noise_multiplier": -1.0}, {"period": 0}):
        with pytest.raises(FdpError, match=next(iter(change))):
            statistics(more_of(1.0).sampling, **{"max_norm": 1.0, "noise_multiplier": 1.0, "period": 5} | change)


def test_scales_make_statistics_comparable():
    model, params, data, estimator = noisable("mlp")
    scales = statistic_scales(model, params, data, estimator=estimator, key=KEY)
    assert set(scales) == {statistic_name(each) for each in factor_keys(estimator)}
    batch = own_batch(data, more_of(1e9), torch.ones(SAMPLES))
    options: Any = {"statistics": more_of(1e9), "estimator": estimator, "scales": scales}
    total = clipped_statistics(model, params, batch, key=KEY, **options)
    ours = matrices(release(total, key=KEY, **options | {"statistics": more_of(1e9, 1e-30)}))
    theirs = matrices(statistics_of("mlp", more_of(1e9, 1e-30))[1])
    for where, matrix in theirs.items():
        torch.testing.assert_close(ours[where], matrix, rtol=1e-8, atol=1e-9)


# --- accounting -----------------------------------------------------------------------------------------------------

SAMPLING = poisson(1437, expected_batch_size=96)
MORE = statistics(poisson(1437, expected_batch_size=300), max_norm=1.0, noise_multiplier=3.0, period=10)


def check_releases_are_accounted_for() -> None:
    plain = Mechanism(SAMPLING, clipping.flat(max_norm=1.0), 1.5)
    both = plain._replace(statistics=MORE)
    for accountant in accounting.Accountant:
        alone = accounting.epsilon(plain, steps=41, delta=1e-5, accountant=accountant)
        spent = accounting.epsilon(both, steps=41, delta=1e-5, accountant=accountant)
        assert spent > alone * 1.02, "a release was not charged for"
    by_pld = accounting.epsilon(both, steps=41, delta=1e-5)
    # five releases, not four: the first comes before step 0
    four = accounting.epsilon(both, steps=40, delta=1e-5)
    assert by_pld > four + 0.01
    assert accounting.delta(both, steps=41, epsilon=by_pld) == pytest.approx(1e-5, rel=0.05)
    curve = accounting.epsilon_curve(both, steps=[1, 20, 41], delta=1e-5)
    assert curve[-1] == by_pld
    z = accounting.noise_multiplier_for(SAMPLING, plain.clip, epsilon=3.0, delta=1e-5, steps=41, statistics=MORE)
    without = accounting.noise_multiplier_for(SAMPLING, plain.clip, epsilon=3.0, delta=1e-5, steps=41)
    assert z > without
    assert 2.95 < accounting.epsilon(both._replace(noise_multiplier=z), steps=41, delta=1e-5) <= 3.0
    same = both._replace(statistics=MORE._replace(sampling=SAMPLING, noise_multiplier=1.5, period=1))
    twice = accounting.epsilon(plain, steps=82, delta=1e-5)
    assert accounting.epsilon(same, steps=41, delta=1e-5) == pytest.approx(twice, rel=2e-3)


def test_releases_are_accounted_for():
    check_releases_are_accounted_for()
    nothing = Mechanism(SAMPLING, clipping.flat(max_norm=1.0), 1.5, MORE._replace(noise_multiplier=0.0))
    assert accounting.epsilon(nothing, steps=5, delta=1e-5) == float("inf")


def test_the_check_of_accounting_notices_a_release_that_is_not_accounted_for(monkeypatch):
    real = accounting.event
    monkeypatch.setattr(accounting, "event", lambda m, steps: real(m._replace(statistics=None), steps))
    with pytest.raises(AssertionError):
        check_releases_are_accounted_for()


def test_a_release_happens_exactly_where_it_is_accounted_for():
    k, calls = kfac_of(fisher=Fisher.SAMPLED), []
    more = statistics(EIGHT, max_norm=1.0, noise_multiplier=0.5, period=3)
    mechanism = MECHANISM._replace(statistics=more)
    params = MODEL.init(keys.key(3))
    state = k.place(init_state(MODEL, params, k.optimizer, mechanism))
    first = sides_of(state)

    def batch() -> Batch:
        calls.append(None)
        return sample_batch(TRAIN, EIGHT, KEY, step=t, microbatch_size=8, purpose=STATISTICS)

    for t in range(7):
        state = refresh_noised(k, state, batch, KEY, t, mechanism=mechanism, scales={})
        assert len(calls) == more.releases(t + 1)
    assert len(calls) == 3
    changed = sides_of(state)
    assert all(not torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(changed)) if a.numel())
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(changed))
    again = k.place(init_state(MODEL, params, k.optimizer, mechanism))
    t = 0
    refresh_noised(k, again, batch, KEY, 0, mechanism=mechanism, scales={}, donate=True)
    pure = k.place(init_state(MODEL, params, k.optimizer, mechanism))
    pure = refresh_noised(k, pure, batch, KEY, 0, mechanism=mechanism, scales={})
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again.opt), tree.leaves(pure.opt)))


# --- ranks ----------------------------------------------------------------------------------------------------------


def on_ranks(ranks: int, fisher: Fisher) -> dict[tuple[str, str], Tensor]:
    """Return the noised factors of eight samples on one rank, or four on each of two."""
    sharding = None
    if ranks > 1:
        sharding = make_sharding(MODEL, make_mesh({"shard": ranks}, device_type="cpu"), zero=Zero.TWO)
    share = {} if sharding is None else {"rank": sharding.rank, "ranks": sharding.ranks}
    sampling = poisson(len(TRAIN), expected_batch_size=12)
    more = statistics(sampling, max_norm=0.3, noise_multiplier=0.7, period=1)
    batch = sample_batch(TRAIN, sampling, keys.key(5), step=0, microbatch_size=8, purpose=STATISTICS, **share)
    params = MODEL.init(keys.key(3))
    example = tree.map(lambda leaf: leaf[0], batch.data)
    known = separate_biases(surveyed(MODEL, params, example, torch.float32))
    estimator = Estimator(known, forms_of(known), fisher, Sharing.EXPAND)
    options: Any = {"statistics": more, "estimator": estimator, "scales": {}}
    parts = params
    if sharding is not None:
        flat = tree.flatten(params)
        cuts = {p: tuple(slice(a, a + n) for a, n in leaf.window) for p, leaf in sharding.leaves.items()}
        parts = tree.nest({path: flat[path][cut] for path, cut in cuts.items()})
    total = clipped_statistics(MODEL, parts, batch, key=KEY, execution=Execution(sharding), **options)
    return matrices(release(total, key=keys.key(9), **options))


@pytest.mark.ranks
def test_noised_factors_are_the_same_on_two_ranks():
    alone = on_ranks(1, Fisher.SAMPLED)
    for each in run_on_ranks(on_ranks, 2, 2, Fisher.SAMPLED):
        for where, matrix in alone.items():
            torch.testing.assert_close(each[where], matrix, rtol=1e-5, atol=1e-7, msg=str(where))
