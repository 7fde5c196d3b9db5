"""Compiled blocks against eager ones: pull-backs of taps and of plain autograd, and full steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import fdp.fast.compiled
import fdp.gradients.tape
import fdp.step
from fdp import keys, ops, tree
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.execution import EAGER as PLAIN
from fdp.gradients.execution import Execution
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.rules import Dense, Pair, per_sample_gradient
from fdp.gradients.taps import tapped_vjp, trace
from fdp.model import Block, Model
from fdp.models import GPTConfig, LlamaConfig, cnn, gpt, llama, mlp
from fdp.optimizers import adamw, sgd
from fdp.parallel.mesh import make_mesh
from fdp.parallel.offload import Offload
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharding import Zero, abstract_params, make_sharding
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, sample_batch, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import FdpError, Tree
from tests.conftest import CASES, Case, case_named, randn, share
from tests.ranks import run_on_ranks

EAGER = partial(CompiledRunner, backend="aot_eager")
"""AOTAutograd's split into forward and backward, without the time that Inductor takes."""
GPT = gpt(GPTConfig(layers=2, width=16, heads=2, context=8, vocab_size=13))
MODELS: dict[str, Model] = {
    "gpt": GPT,
    "gpt-untied": gpt(GPTConfig(layers=1, width=16, heads=2, context=8, vocab_size=13, tied=False)),
    "llama": llama(LlamaConfig(layers=1, width=16, heads=4, key_heads=2, hidden=12, context=8, vocab_size=13)),
    "mlp": mlp(widths=(6, 7, 7, 7), classes=4),
    "cnn": cnn(channels=(3, 4), side=6, classes=4),
}


SHARED = EAGER()
"""All tests' blocks but for those that count kinds: each is compiled once."""


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# ---------------------------------------------------------------- pull-backs

QUICK = ("gpt", "mlp", "loop", "scales", "all-ways", "convolutions")
every_case = pytest.mark.parametrize("name", [*QUICK, *(slow(name) for name in CASES if name not in QUICK)])


def through(case: Case, vjp_of: Any) -> list[Any]:
    """Outputs of all blocks, then what every pull-back found, from the last block to the first."""
    model, params, data = case
    flat, pulls, seen = tree.flatten(params), [], []
    carry: Tree = ()
    for i, block in enumerate(model.blocks):
        weights = {path: flat[path] for path in dict.fromkeys(tree.leaves(block.params))}
        carry, pull = vjp_of(i, block, weights, carry, data)
        pulls.append(pull)
        seen.append(carry)
    gradient = torch.ones_like(carry)
    for pull in reversed(pulls):
        gradient, found = pull(gradient)
        seen.append((gradient, found))
    return seen


def assert_equal_trees(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    got, expected = tree.flatten(got), tree.flatten(expected)
    assert list(got) == list(expected)
    for path, value in expected.items():
        torch.testing.assert_close(got[path], value, rtol=tolerance, atol=tolerance, msg=lambda m, p=path: f"{p}: {m}")


def as_tensors(seen: list[Any]) -> list[Any]:
    """Return records as per-sample gradients, in path order, so that only values are compared."""
    made: list[Any] = []
    for entry in seen:
        if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], dict):
            carry, found = entry
            leaves = {}
            for path, records in sorted(found.items()):
                each = records if isinstance(records, list) else [records]
                leaves[path] = [per_sample_gradient(r) if isinstance(r, Pair | Dense) else r for r in each]
            made.append([carry, leaves])
        else:
            made.append(entry)
    return made


@every_case
def test_tapped_pull_backs_are_those_of_the_taps(name):
    case = case_named(name)
    plan, blocks = make_plan(*case, method=Method.GHOST_BK, dtype=torch.float64), SHARED
    trainable = case.model.trainable
    compiled = through(case, lambda i, b, w, c, d: blocks.tapped_vjp(b, w, c, d, plan.uses[i], trainable))
    plain = through(case, lambda i, b, w, c, d: tapped_vjp(b, w, c, d, plan.uses[i], trainable))
    assert [type(e) for e in compiled] == [type(e) for e in plain]
    assert_equal_trees(as_tensors(compiled), as_tensors(plain))
    for (_, found), (_, expected) in zip(compiled[len(plan.uses) :], plain[len(plan.uses) :]):
        assert {p: [type(r) for r in records] for p, records in found.items()} == {
            p: [type(r) for r in records] for p, records in expected.items()
        }


@every_case
def test_plain_pull_backs_are_those_of_autograd(name):
    case = case_named(name)
    blocks, trainable = SHARED, case.model.trainable
    compiled = through(case, lambda i, b, w, c, d: blocks.plain_vjp(b, w, c, d, trainable))
    plain = through(case, lambda i, b, w, c, d: PLAIN.plain_vjp(b, w, c, d, trainable))
    assert_equal_trees(as_tensors(compiled), as_tensors(plain))


@pytest.mark.slow
@pytest.mark.parametrize("private", [True, False])
def test_frozen_leaves_have_no_part(private):
    case = case_named("gpt")
    frozen = frozenset({"embed.tokens", "blocks.0.up", "blocks.1.norm1", "blocks.1.out_bias"})
    case = case._replace(model=case.model._replace(frozen=frozen))
    plan, blocks = make_plan(*case, method=Method.GHOST_BK, dtype=torch.float64), SHARED
    kept = plan.trainable
    if private:
        compiled = through(case, lambda i, b, w, c, d: blocks.tapped_vjp(b, w, c, d, plan.uses[i], kept))
        plain = through(case, lambda i, b, w, c, d: tapped_vjp(b, w, c, d, plan.uses[i], kept))
    else:
        compiled = through(case, lambda i, b, w, c, d: blocks.plain_vjp(b, w, c, d, kept))
        plain = through(case, lambda i, b, w, c, d: PLAIN.plain_vjp(b, w, c, d, kept))
    assert_equal_trees(as_tensors(compiled), as_tensors(plain))
    assert {path for _, found in compiled[4:] for path in found} == kept


@pytest.mark.parametrize("private", [True, False])
def test_layers_of_a_kind_are_compiled_once(private):
    deep = gpt(GPTConfig(layers=5, width=8, heads=2, context=5, vocab_size=7))
    data = {"tokens": torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(0))}
    case = Case(deep, deep.init(keys.key(0)), data)
    plan = make_plan(*case, method=Method.GHOST_BK)
    graphs: list[Any] = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    blocks = CompiledRunner(backend=count)  # type: ignore[arg-type]  # a backend may be a function
    for _ in range(2):
        if private:
            through(case, lambda i, b, w, c, d: blocks.tapped_vjp(b, w, c, d, plan.uses[i], plan.trainable))
        else:
            through(case, lambda i, b, w, c, d: blocks.plain_vjp(b, w, c, d, plan.trainable))
    assert len(blocks.kinds) == len(graphs) == 3  # embedding, layer, head


def test_a_block_that_was_first_run_in_inference_mode_can_still_be_pulled():
    case, blocks = case_named("mlp"), CompiledRunner(backend="eager")
    plan = make_plan(*case, method=Method.GHOST_BK, dtype=torch.float64)

    def vjp(i: int, b: Block, w: Tree, c: Tree, d: Tree) -> Any:
        return blocks.tapped_vjp(b, w, c, d, plan.uses[i], plan.trainable)

    with torch.inference_mode(), pytest.raises(FdpError, match="depends on every tap"):
        through(case, vjp)
    through(case, vjp)


@pytest.mark.slow
def test_kinds_differ_by_function_by_shape_and_by_what_is_trained():
    model, data = mlp(widths=(6, 6, 6), classes=6), {"image": randn(3, 6).float(), "label": torch.tensor([0, 3, 1])}

    def kinds(model: Model) -> int:
        params, blocks = model.init(keys.key(0)), CompiledRunner(backend="eager")
        plan = make_plan(model, params, data, method=Method.GHOST_BK)
        case = Case(model, params, data)
        through(case, lambda i, b, w, c, d: blocks.tapped_vjp(b, w, c, d, plan.uses[i], plan.trainable))
        return len(blocks.kinds)

    assert len(model.blocks) == 3
    assert kinds(model) == 2  # two layers that are alike, and the head
    assert kinds(model._replace(frozen=frozenset({"layers.1.bias"}))) == 3
    assert kinds(mlp(widths=(6, 5, 6), classes=6)) == 3


@pytest.mark.parametrize("name", ["gpt", "loop", "scales", "mlp"])
def test_biases_of_long_sequences_are_summed_separately_with_equal_results(name, monkeypatch):
    """Only those that are added once: in ``loop`` one is added three times."""
    monkeypatch.setattr(fdp.fast.compiled, "LONG_TOKENS", 1)
    case, blocks = case_named(name), EAGER()
    plan = make_plan(*case, method=Method.GHOST_BK, dtype=torch.float64)
    compiled = through(case, lambda i, b, w, c, d: blocks.tapped_vjp(b, w, c, d, plan.uses[i], plan.trainable))
    plain = through(case, lambda i, b, w, c, d: tapped_vjp(b, w, c, d, plan.uses[i], plan.trainable))
    assert_equal_trees(as_tensors(compiled), as_tensors(plain))
    apart = [bias for kind in blocks.kinds.values() for bias in kind.biases]
    assert len(apart) == (4 if name == "gpt" else 0)


def lost(y, *_):
    return y


@pytest.mark.parametrize("which", ["attach", "attach_bias"])
def test_a_backward_that_gets_lost_is_an_error_and_never_a_norm_of_zero(which, monkeypatch):
    monkeypatch.setattr(fdp.gradients.tape, which, lost)
    case, blocks = case_named("mlp"), EAGER()
    plan = make_plan(*case, method=Method.GHOST_BK, dtype=torch.float64)
    with pytest.raises(FdpError, match="depends on every tap"):
        through(case, lambda i, b, w, c, d: blocks.tapped_vjp(b, w, c, d, plan.uses[i], plan.trainable))


def test_no_weight_gradient_is_made_and_nothing_is_left_attached():
    case, blocks = case_named("mlp"), EAGER()
    plan = make_plan(*case, method=Method.GHOST_BK, dtype=torch.float64)
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), case.params)
    seen = through(
        case._replace(params=params),
        lambda i, b, w, c, d: blocks.tapped_vjp(b, w, c, d, plan.uses[i], plan.trainable),
    )
    assert not any(leaf.requires_grad for leaf in tree.leaves(as_tensors(seen)))
    assert all(leaf.grad is None for leaf in tree.leaves(params))


def test_a_leaf_that_a_block_names_twice_is_one_leaf():
    params = {"a": "w", "b": "w"}

    def apply(p: Tree, carry: Tree, data: Tree) -> torch.Tensor:
        return ops.linear(ops.linear(data["x"], p["a"]).tanh(), p["b"]).square().sum((1, 2))

    block, data, weights = Block("twice", params, apply), {"x": randn(3, 2, 4)}, {"w": randn(4, 4)}
    uses, _ = trace(block, weights, frozenset({"w"}), (), data)
    out, pull = EAGER().tapped_vjp(block, weights, (), data, uses, frozenset({"w"}))
    expected, reference = tapped_vjp(block, weights, (), data, uses, frozenset({"w"}))
    torch.testing.assert_close(out, expected)
    ones = torch.ones(3, dtype=torch.float64)
    found, wanted = pull(ones)[1], reference(ones)[1]
    assert [isinstance(record, Pair) for record in found["w"]] == [True, True]
    for record, other in zip(found["w"], wanted["w"]):
        torch.testing.assert_close(per_sample_gradient(record), per_sample_gradient(other))


# ---------------------------------------------------------------- steps


def data_of(model: Model, samples: int) -> Tree:
    draw = torch.Generator().manual_seed(3)
    if model.context is not None:
        return {"tokens": torch.randint(0, 13, (samples, 9), generator=draw)}
    shape = (1, 6, 6) if model is MODELS["cnn"] else (6,)
    return {
        "image": torch.randn(samples, *shape, generator=draw),
        "label": torch.randint(0, 4, (samples,), generator=draw),
    }


def train(
    model: Model,
    *,
    method: Method,
    compile: Compile,
    dtype=torch.float32,
    optimizer=None,
    memory_budget: float | None = None,
    **options: Any,
):
    """Three steps of two microbatches of three, the last sample padding."""
    z = 0.0 if method is Method.NONE else 1.0
    sampling = poisson(100, expected_batch_size=5)
    mechanism = Mechanism(sampling, clipping.flat(max_norm=0.5), z)
    optimizer, params = optimizer or adamw(1e-2, weight_decay=0.1), model.init(keys.key(0))
    donate = options.pop("donate", ())
    execution = share(make_execution(compile=compile, **options), SHARED)
    data = tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), data_of(model, 6))
    batch = trusted_batch(data, torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]), sampling, step=None)
    example = tree.map(lambda leaf: leaf[0], data)
    plan = make_plan(model, params, example, method=method, dtype=dtype, memory_budget=memory_budget)
    step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan, execution=execution, donate=donate)
    state = init_state(model, params, optimizer, mechanism, execution=execution)
    seen = []
    for _ in range(3):
        state, metrics = step(state, batch, keys.key(1))
        seen.append(metrics)
    return state, seen


def assert_same_steps(got: Any, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    (state, metrics), (truth, wanted) = got, expected
    for a, b in zip(metrics, wanted):
        torch.testing.assert_close(tuple(a), tuple(b), rtol=rtol, atol=atol, equal_nan=True)
    for path, leaf in tree.flatten(truth.params).items():
        torch.testing.assert_close(
            tree.flatten(state.params)[path], leaf, rtol=rtol, atol=atol, msg=lambda m, p=path: f"{p}: {m}"
        )
    assert int(state.step) == int(truth.step) == 3
    torch.testing.assert_close(state.clip, truth.clip)


@pytest.mark.parametrize("donate", [slow(()), ("state",)], ids=["kept", "donated"])
@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.long) if m is Method.GHOST else m for m in Method],
    ids=lambda m: m.value,
)
def test_a_step_of_compiled_blocks_is_the_step(method, donate):
    options = {"method": method, "optimizer": adamw(1e-2, eps=1e-3)}
    found = train(GPT, compile=Compile.BLOCK, donate=donate, **options)
    assert_same_steps(found, train(GPT, compile=Compile.NONE, **options))


TWICE = {"method": Method.FLASH, "memory_budget": 0.0}  # norms first, then a second backward


@pytest.mark.parametrize(
    "way", [{"method": Method.NONE}, TWICE, {"method": Method.AUTO}], ids=["none", "flash-twice", "auto"]
)
@pytest.mark.parametrize("name", ["mlp", slow("gpt-untied"), slow("llama"), slow("cnn")])
def test_every_model_takes_the_same_steps(name, way):
    options = way | {"optimizer": adamw(1e-2, eps=1e-3)}
    found = train(MODELS[name], compile=Compile.BLOCK, donate=("state",), **options)
    assert_same_steps(found, train(MODELS[name], compile=Compile.NONE, **options))


@pytest.mark.long
@pytest.mark.parametrize("method", [slow(Method.NONE), slow(Method.FLASH_BK), Method.AUTO], ids=lambda m: m.value)
@pytest.mark.parametrize("donate", [slow(()), ("state",)], ids=["kept", "donated"])
def test_compiled_blocks_take_the_same_steps_in_half_precision(method, donate):
    options = {"method": method, "dtype": torch.bfloat16, "optimizer": sgd(0.1)}
    fused = {"method": method, "dtype": torch.bfloat16, "optimizer": adamw(1e-2, eps=1e-2)}
    for settings in (options, fused):
        found = train(GPT, compile=Compile.BLOCK, donate=donate, **settings)
        assert_same_steps(found, train(GPT, compile=Compile.NONE, **settings), rtol=2e-2, atol=2e-3)
    assert {leaf.dtype for leaf in tree.leaves(found[0].params)} == {torch.float32}


@pytest.mark.parametrize("method", [slow(Method.NONE), slow(Method.GHOST), Method.AUTO], ids=lambda m: m.value)
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_activations": True},
        {"offload": Offload(params=True, grads=True, optimizer=True)},
        {"checkpoint_activations": True, "donate": ("state",)},
    ],
    ids=["checkpoints", "offload", "checkpoints-donated"],
)
def test_compiled_blocks_take_the_same_steps_with_less_memory(method, options):
    settings = {"method": method, "optimizer": adamw(1e-2, eps=1e-3)}
    found = train(GPT, compile=Compile.BLOCK, **settings, **options)
    assert_same_steps(found, train(GPT, compile=Compile.NONE, **settings))


def sharded_steps(axes: dict[str, int] | None) -> dict[str, Any]:
    """Return the full parameters and norms of two steps with compiled blocks."""
    model, root, sampling = MODELS["mlp"], keys.key(0), poisson(40, expected_batch_size=10)
    everyone = data_of(model, 40)
    mechanism, optimizer = Mechanism(sampling, clipping.flat(max_norm=0.3), 1.0), adamw(1e-2, eps=1e-3)
    found = {}
    for method, budget in ((Method.FLASH, 0.0), (Method.AUTO, None)):  # with a second backward, and without
        sharding, rank, ranks = None, 0, 1
        if axes is not None:
            sharding = make_sharding(model, make_mesh(axes, device_type="cpu"), zero=Zero.THREE)
            rank, ranks = sharding.rank, sharding.ranks
        params = model.init(root) if sharding is None else init_params(model, root, sharding)
        example = tree.map(lambda leaf: leaf[: 4 // ranks], everyone)  # noqa: B023
        plan = make_plan(model, abstract_params(model, sharding), example, method=method, memory_budget=budget)
        step = make_train_step(
            model,
            optimizer,
            mechanism=mechanism,
            plan=plan,
            execution=Execution(sharding, runner=SHARED),
            donate=("state",),
        )
        state = init_state(model, params, optimizer, mechanism, execution=make_execution(sharding=sharding))
        for t in range(2):
            batch = sample_batch(everyone, sampling, root, step=t, microbatch_size=4, rank=rank, ranks=ranks)
            state, metrics = step(state, batch, root)
            found[f"{method.value} norms {t}"] = metrics.norms[metrics.mask > 0]
        for path, leaf in tree.flatten(state.params).items():
            found[f"{method.value} {path}"] = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
    return found


@pytest.mark.long
@pytest.mark.ranks
def test_two_ranks_of_zero_three_are_one():
    alone = sharded_steps(None)
    for found in run_on_ranks(sharded_steps, 2, {"shard": 2}):
        for what, value in alone.items():
            torch.testing.assert_close(found[what], value, rtol=1e-4, atol=1e-5, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize("method", [Method.NONE, Method.GHOST_BK])
def test_a_frozen_first_block_has_nothing_to_pull_back_to(method):
    case, blocks = case_named("mlp"), EAGER()
    first = case.model.blocks[0]
    rest = case.model.trainable - set(tree.leaves(first.params))
    weights = {path: leaf for path, leaf in tree.flatten(case.params).items() if path in tree.leaves(first.params)}
    if method is Method.NONE:
        out, pull = blocks.plain_vjp(first, weights, (), case.data, rest)
    else:
        out, pull = blocks.tapped_vjp(first, weights, (), case.data, (), rest)
    assert pull(torch.ones_like(out)) == ((), {})


def test_a_carry_that_a_block_does_not_use_has_a_gradient_of_zero():
    def ignores(p: Tree, carry: Tree, data: Tree) -> torch.Tensor:
        return data["x"] * carry["used"]

    carry = {"used": torch.full((3, 2), 2.0), "ignored": torch.ones(3, 2)}
    data = {"x": torch.ones(3, 2)}
    out, pull = EAGER().tapped_vjp(Block("ignores", {}, ignores), {}, carry, data, (), frozenset())
    gradient, records = pull(torch.ones_like(out))
    assert records == {}
    assert torch.equal(gradient["used"], torch.ones(3, 2))
    assert torch.equal(gradient["ignored"], torch.zeros(3, 2))
