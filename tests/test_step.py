"""The step as a whole: the limit of plain training, purity, microbatches, methods, compilation."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from fdp import keys, tree
from fdp.checks.first_call import Checks
from fdp.fast.compile_modes import Compile, make_execution
from fdp.gradients.accumulate import MicrobatchSum, add_microbatches, add_outside
from fdp.gradients.execution import Execution, Memory
from fdp.gradients.lazy_sum import LazySum
from fdp.gradients.plan import Method, make_plan
from fdp.models import GPTConfig, gpt, mlp
from fdp.optimizers import adamw, sgd
from fdp.parallel.offload import Offload
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.stages import make_stages
from fdp.step import init_state, make_train_step
from fdp.types import Batch, ClippedSum, FdpError, Metrics

PRIVATE = [Method.MATERIALIZE, Method.GHOST, Method.GHOST_BK, Method.AUTO]
GPT = gpt(GPTConfig(layers=2, width=16, heads=2, context=8, vocab_size=13))
SMALL_GPT = gpt(GPTConfig(layers=1, width=8, heads=2, context=8, vocab_size=13))
MLP = mlp(widths=(5, 7), classes=3)
SAMPLING = poisson(100, expected_batch_size=6)


def tokens(samples: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(0, 13, (samples, 9), generator=torch.Generator().manual_seed(0))}


def images(samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.randn(samples, 5, generator=generator),
        "label": torch.randint(0, 3, (samples,), generator=generator),
    }


def batch_of(data, *, microbatch: int) -> Batch:
    """Return samples in order, padded to full microbatches with copies of the first one and mask 0."""
    samples = len(tree.leaves(data)[0])
    padded = -(-samples // microbatch) * microbatch
    rows = torch.arange(padded) * (torch.arange(padded) < samples)
    mask = (torch.arange(padded) < samples).float().view(-1, microbatch)
    cut = tree.map(lambda leaf: leaf[rows].reshape(-1, microbatch, *leaf.shape[1:]), data)
    return trusted_batch(cut, mask, SAMPLING, step=None)


def train(model, data, *, method, z=1.0, microbatch=6, style=None, optimizer=None, steps=3, wrap=None, **options):
    style = style or clipping.flat(max_norm=0.5)
    mechanism = Mechanism(SAMPLING, style, z) if z else without_noise(SAMPLING, style)
    params = model.init(keys.key(0))
    batch = batch_of(data, microbatch=microbatch)
    plan = make_plan(model, params, tree.map(lambda leaf: leaf[0], batch.data), method=method)
    optimizer = optimizer or adamw(1e-2)
    step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan, **options)
    step = wrap(step) if wrap else step
    state = init_state(model, params, optimizer, mechanism)
    for _ in range(steps):
        state, metrics = step(state, batch, keys.key(1))
    return state, metrics


def assert_same(a, b, *, rtol=1e-5, atol=1e-6):
    a, b = tree.flatten(a.params), tree.flatten(b.params)
    for path, leaf in a.items():
        torch.testing.assert_close(leaf, b[path], rtol=rtol, atol=atol, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.parametrize("method", [*PRIVATE, Method.NONE], ids=lambda m: m.value)
def test_without_clipping_and_noise_it_is_torch_optim_on_the_mean_loss(method):
    data = tokens(6)
    style = clipping.flat(max_norm=1e6)
    state, _ = train(GPT, data, method=method, z=0.0, style=style, optimizer=adamw(1e-2, weight_decay=0.1))
    params = tree.map(lambda leaf: leaf.requires_grad_(), GPT.init(keys.key(0)))
    optimizer = torch.optim.AdamW(tree.leaves(params), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        GPT.loss(params, data).mean().backward()
        optimizer.step()
    # Adam turns a gradient of rounding size into a full step where the true gradient is zero (the key bias).
    expected = {p: leaf.detach() for p, leaf in tree.flatten(params).items()}
    for path, leaf in tree.flatten(state.params).items():
        if "qkv_bias" not in path:
            torch.testing.assert_close(
                leaf, expected[path], rtol=1e-4, atol=2e-5, msg=lambda m, path=path: f"{path}: {m}"
            )


@pytest.mark.parametrize("style", ["flat", "per-layer", "automatic", "quantile"])
@pytest.mark.parametrize("method", PRIVATE, ids=lambda m: m.value)
def test_every_method_takes_the_same_steps(method, style):
    styles = {
        "flat": clipping.flat(max_norm=0.5),
        "per-layer": clipping.per_layer(max_norm=0.5),
        "automatic": clipping.automatic(max_norm=0.5),
        "quantile": clipping.quantile(max_norm=0.5, target_quantile=0.5, learning_rate=0.3, count_noise=1.0),
    }
    options = {"z": 1.0, "style": styles[style], "optimizer": sgd(0.1)}
    state, metrics = train(GPT, tokens(6), method=method, **options)
    truth, expected = train(GPT, tokens(6), method=Method.MATERIALIZE, **options)
    assert_same(state, truth)
    torch.testing.assert_close(metrics.norms, expected.norms, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.clip, truth.clip)
    assert bool((metrics.factors < 1).any()), "the bound must clip someone for this test to mean anything"


@pytest.mark.parametrize("method", PRIVATE, ids=lambda m: m.value)
@pytest.mark.parametrize("microbatch", [1, 4])
def test_the_microbatch_size_changes_nothing_but_rounding(microbatch, method):
    whole, _ = train(GPT, tokens(6), method=method, microbatch=6, optimizer=sgd(0.1))
    parts, metrics = train(GPT, tokens(6), method=method, microbatch=microbatch, optimizer=sgd(0.1))
    assert_same(whole, parts)
    assert int(metrics.mask.sum()) == 6


def test_records_of_a_microbatch_are_freed_before_the_next_one_begins():
    alive = []

    def gradient(i: int) -> MicrobatchSum:
        assert not [rows for rows in alive if rows() is not None]
        rows = torch.full((2, 4), float(i), dtype=torch.float64)
        alive.append(weakref.ref(rows))
        total = ClippedSum({"w": LazySum(rows, torch.ones(2, dtype=torch.float64))}, torch.ones(()))
        return MicrobatchSum(total, torch.zeros(()), Metrics(*torch.zeros(4, 2)))

    total = add_microbatches(lambda i, onto: add_outside(gradient, torch.float64)(i, onto=onto), 3).total
    assert torch.equal(total.value["w"], torch.full((4,), 6.0, dtype=torch.float64))


def test_an_empty_batch_is_a_step_of_pure_noise():
    mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=0.5), 1.0)
    params = MLP.init(keys.key(0))
    data = images(4)
    plan = make_plan(MLP, params, data)
    step = make_train_step(MLP, sgd(1.0), mechanism=mechanism, plan=plan)
    batch = trusted_batch(tree.map(lambda leaf: leaf[None], data), torch.zeros(1, 4), SAMPLING, step=0)
    state, _ = step(init_state(MLP, params, sgd(1.0), mechanism), batch, keys.key(3))
    drawn_by = make_stages(MLP, sgd(1.0), mechanism=mechanism, plan=plan).key(keys.key(3), torch.tensor(0))
    for path, leaf in tree.flatten(state.params).items():
        noise = keys.normal(keys.fold_in(drawn_by, path), tuple(leaf.shape), dtype=torch.float64).float() * 0.5 / 6
        torch.testing.assert_close(tree.flatten(params)[path] - leaf, noise)


def test_inputs_are_left_as_they_were_and_the_same_inputs_give_the_same_bits():
    mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=0.5), 1.0)
    params = GPT.init(keys.key(0))
    plan = make_plan(GPT, params, tokens(6))
    optimizer = adamw(1e-2)
    step = make_train_step(GPT, optimizer, mechanism=mechanism, plan=plan)
    state = init_state(GPT, params, optimizer, mechanism)
    batch, key = batch_of(tokens(6), microbatch=6), keys.key(1)
    copies = tree.map(torch.clone, (state, batch, key))
    first, _ = step(state, batch, key)
    second, _ = step(state, batch, key)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(copies), tree.leaves((state, batch, key))))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(second)))
    assert not torch.equal(tree.leaves(first.params)[0], tree.leaves(state.params)[0])


def test_a_donated_state_is_written_in_place_with_the_same_values():
    kept, _ = train(GPT, tokens(6), method=Method.AUTO)
    donated, _ = train(GPT, tokens(6), method=Method.AUTO, donate=("state",))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(kept), tree.leaves(donated)))
    mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=0.5), 1.0)
    params = MLP.init(keys.key(0))
    step = make_train_step(
        MLP, sgd(1.0), mechanism=mechanism, plan=make_plan(MLP, params, images(6)), donate=("state",)
    )
    state = init_state(MLP, params, sgd(1.0), mechanism)
    places = [leaf.data_ptr() for leaf in tree.leaves(state)]
    after, _ = step(state, batch_of(images(6), microbatch=6), keys.key(0))
    assert [leaf.data_ptr() for leaf in tree.leaves(after)] == places


def test_frozen_leaves_stay_and_are_not_in_the_norm():
    frozen = GPT._replace(frozen=frozenset(path for path in GPT.leaves if path.startswith(("embed", "blocks.0"))))
    start = tree.flatten(GPT.init(keys.key(0)))
    for method in [*PRIVATE, Method.NONE]:
        z = 0.0 if method is Method.NONE else 1.0
        state, _ = train(frozen, tokens(6), method=method, z=z, optimizer=adamw(1e-2, weight_decay=0.5))
        for path, leaf in tree.flatten(state.params).items():
            assert torch.equal(leaf, start[path]) == (path in frozen.frozen), path
        if method is not Method.NONE:
            _, everything = train(GPT, tokens(6), method=method, steps=1)
            _, part = train(frozen, tokens(6), method=method, steps=1)
            assert bool((part.norms < everything.norms).all())


TRACED = [
    pytest.param(model, method, marks=[] if (model, method) == ("mlp", Method.GHOST) else [pytest.mark.slow])
    for model in ("mlp", "gpt")
    for method in (*PRIVATE, Method.NONE)
]
"""The step of a GPT is also traced, as full graphs, by :func:`test_compiled_equals_eager`."""


@pytest.mark.long
@pytest.mark.parametrize(("name", "method"), TRACED, ids=lambda value: getattr(value, "value", value))
def test_the_whole_step_is_one_graph(name, method):
    torch._dynamo.reset()
    z = 0.0 if method is Method.NONE else 1.0
    model, data = (MLP, images(6)) if name == "mlp" else (SMALL_GPT, tokens(6))
    eager, _ = train(model, data, method=method, z=z, microbatch=4, steps=2, optimizer=sgd(0.1))
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def wrap(step):
        return torch.compile(step, fullgraph=True, dynamic=False, backend=count)

    options: dict[str, Any] = {"steps": 2, "optimizer": sgd(0.1), "wrap": wrap, "checks": Checks.SKIPPED}
    traced, _ = train(model, data, method=method, z=z, microbatch=4, **options)
    assert_same(eager, traced)
    assert len(graphs) == 1, "a new key and a new state must not need a new graph"


@pytest.mark.long
@pytest.mark.parametrize(
    "method", [Method.AUTO, pytest.param(Method.GHOST, marks=pytest.mark.slow)], ids=lambda m: m.value
)
def test_compiled_equals_eager(method):
    torch._dynamo.reset()
    options = {"method": method, "microbatch": 4, "steps": 2, "optimizer": sgd(0.1)}
    eager, seen = train(SMALL_GPT, tokens(6), **options)
    compiled, metrics = train(
        SMALL_GPT, tokens(6), execution=make_execution(compile=Compile.STEP, backend="aot_eager"), **options
    )
    assert_same(eager, compiled)
    torch.testing.assert_close(metrics.norms, seen.norms, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*PRIVATE, Method.NONE], ids=lambda m: m.value)
def test_the_whole_step_compiles_to_one_graph_and_equals_eager(method):
    torch._dynamo.reset()
    z = 0.0 if method is Method.NONE else 1.0
    options = {"method": method, "z": z, "microbatch": 4, "steps": 2, "optimizer": adamw(1e-2)}

    def wrap(step):
        return torch.compile(step, fullgraph=True, dynamic=False)

    whole = train(GPT, tokens(6), wrap=wrap, checks=Checks.SKIPPED, **options)[0]
    assert_same(train(GPT, tokens(6), **options)[0], whole, rtol=1e-4, atol=1e-5)


def test_mistakes_are_refused():
    mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=0.5), 1.0)
    params = MLP.init(keys.key(0))
    plan = make_plan(MLP, params, images(4))
    with pytest.raises(FdpError, match="donate"):
        make_train_step(MLP, sgd(1.0), mechanism=mechanism, plan=plan, donate=("batch",))
    recorded = Execution(memory=Memory(offload=Offload(grads=True, optimizer=True)), cuda_graph=True)
    with pytest.raises(FdpError, match="on the GPU, got grads, optimizer in CPU memory"):
        make_train_step(MLP, sgd(1.0), mechanism=mechanism, plan=plan, donate=("state",), execution=recorded)
    with pytest.raises(FdpError, match="trainable"):
        make_train_step(MLP._replace(frozen=frozenset({"head.bias"})), sgd(1.0), mechanism=mechanism, plan=plan)
    none = make_plan(MLP, params, images(4), method=Method.NONE)
    with pytest.raises(FdpError, match="without privacy"):
        make_train_step(MLP, sgd(1.0), mechanism=mechanism, plan=none)
    step = make_train_step(MLP, sgd(1.0), mechanism=mechanism, plan=plan)
    with pytest.raises(FdpError, match="expected 4 samples"):
        step(init_state(MLP, params, sgd(1.0), mechanism), batch_of(images(6), microbatch=6), keys.key(0))
    with pytest.raises(FdpError, match="floating-point"):
        init_state(MLP, params | {"head": tree.map(lambda leaf: leaf.long(), params["head"])}, sgd(1.0), mechanism)
