"""Adapters: losses and gradients of the merged model, by every method; refused if a leaf cannot be adapted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from fdp import keys, ops, tree
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.adapters.lora import A_SUFFIX, B_SUFFIX, lora, lora_model, merge, train_only
from fdp.gradients.clipped_sum import clipped_sum, plain_sum
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.rules import Pair, Rule, rows
from fdp.model import Model, check_params, from_loss
from fdp.models import GPTConfig, LlamaConfig, gpt, llama
from fdp.privacy.clipping import clip_to
from fdp.types import FdpError, Flat
from tests.conftest import randn, random_like
from tests.ranks import run_on_ranks

ALPHA, RANK = 6.0, 2
TARGETS = {
    "gpt": ("blocks.*.qkv", "blocks.*.out", "blocks.*.down", "head.weight"),
    "llama": ("blocks.*.query", "blocks.*.value", "blocks.0.up"),
}
MODELS: dict[str, Model] = {
    "gpt": gpt(GPTConfig(layers=2, width=8, heads=2, context=5, vocab_size=7, tied=False)),
    "llama": llama(LlamaConfig(layers=2, width=8, heads=4, key_heads=2, hidden=9, context=5, vocab_size=7)),
}
DATA = {"tokens": torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(2))}
WAYS = [pytest.param(name, method, False, id=f"{name}-{method.value}") for name in MODELS for method in Method]
WAYS = [way for way in WAYS if way.values[1] is not Method.NONE]
WAYS += [
    pytest.param("gpt", Method.AUTO, True, id="gpt-auto-compiled", marks=pytest.mark.long),
    pytest.param("llama", Method.AUTO, True, id="llama-auto-compiled", marks=pytest.mark.slow),
    pytest.param("llama", Method.GHOST, True, id="llama-ghost-compiled", marks=pytest.mark.slow),
]


@cache
def adapted_model(name: str) -> tuple[Model, Any]:
    """Return the model, and parameters in which B is not 0."""
    model, _ = lora(
        MODELS[name], random_like(MODELS[name]), rank=RANK, alpha=ALPHA, targets=TARGETS[name], key=keys.key(0)
    )
    return model, random_like(model)


@cache
def reference(name: str) -> Flat:
    """Return every adapter's gradient, one sample at a time, through the merged weights of the original model."""
    model, params = adapted_model(name)
    flat = tree.flatten(params)
    trained = {path: flat[path].clone().requires_grad_() for path in sorted(model.trainable)}
    found: dict[str, list[Tensor]] = {path: [] for path in trained}
    for b in range(3):
        whole = merge(tree.nest(flat | trained), alpha=ALPHA)
        (loss,) = MODELS[name].loss(whole, {"tokens": DATA["tokens"][b : b + 1]})
        for path, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values()))):
            found[path].append(gradient)
    return {path: torch.stack(gradients) for path, gradients in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_losses_equal_those_of_the_merged_model_and_initially_those_of_the_model(name: str) -> None:
    model, params = adapted_model(name)
    merged = merge(params, alpha=ALPHA)
    assert tree.paths(merged) == tree.paths(random_like(MODELS[name]))
    torch.testing.assert_close(model.loss(params, DATA), MODELS[name].loss(merged, DATA), rtol=1e-12, atol=1e-12)
    before = random_like(MODELS[name])
    fresh, start = lora(MODELS[name], before, rank=RANK, alpha=ALPHA, targets=TARGETS[name], key=keys.key(0))
    check_params(fresh, start)
    assert torch.equal(fresh.loss(start, DATA), MODELS[name].loss(before, DATA))
    drawn = {path: leaf for path, leaf in tree.flatten(start).items() if path.endswith(A_SUFFIX)}
    assert all(bool(leaf.std() > 0) and float(leaf.abs().max()) <= leaf.shape[1] ** -0.5 for leaf in drawn.values())
    again = lora(MODELS[name], before, rank=RANK, alpha=ALPHA, targets=TARGETS[name], key=keys.key(1))[1]
    assert not torch.equal(
        tree.flatten(again)["blocks.0." + TARGETS[name][0].split(".")[-1] + A_SUFFIX], drawn[next(iter(drawn))]
    )


@pytest.mark.parametrize(("name", "method", "compiled"), WAYS)
def test_norms_and_sums_equal_single_sample_backwards_of_the_adapters(
    name: str, method: Method, compiled: bool
) -> None:
    model, params = adapted_model(name)
    plan = make_plan(model, params, DATA, method=method, dtype=torch.float64)
    blocks = CompiledRunner(backend="aot_eager") if compiled else None
    _, norms, stash = per_sample_norms(model, params, DATA, plan=plan, execution=Execution(runner=blocks or EAGER))
    truth = reference(name)
    assert set(norms.squared) == set(truth) == {path for path in model.leaves if path.endswith((A_SUFFIX, B_SUFFIX))}
    for path, G in truth.items():
        torch.testing.assert_close(norms.squared[path], G.flatten(1).square().sum(1), rtol=1e-8, atol=1e-12)
    clip = clip_to(norms, max_norm=0.1)
    total = clipped_sum(stash, clip).value
    for path, G in truth.items():
        expected = torch.einsum("b,b...->...", clip.factors[path].double(), G)
        torch.testing.assert_close(total[path], expected, rtol=1e-8, atol=1e-12)
    assert float(clip.smallest().max()) < 1  # it did clip
    assert blocks is None or name != "gpt" or len(blocks.kinds) == 3  # layers of a kind stay one kind


def test_equal_layers_with_equal_adapters_share_one_function() -> None:
    first, second = (block.apply for block in adapted_model("llama")[0].blocks[1:3])
    assert first is not second  # blocks.0.up has an adapter, blocks.1.up none
    first, second = (block.apply for block in adapted_model("gpt")[0].blocks[1:3])
    assert first is second


@pytest.mark.parametrize("name", MODELS)
def test_adapters_come_last_in_the_order_of_the_leaves_they_adapt(name: str) -> None:
    """The same in every process: K-FAC's ranks go through layers in this order, one collective after another."""
    own = list(MODELS[name].leaves)
    made = list(lora_model(MODELS[name], rank=RANK, alpha=ALPHA, targets=TARGETS[name]).leaves)
    adapted = [path for path in own if path + A_SUFFIX in made]
    assert len(adapted) > 4
    assert made == own + [path + end for path in adapted for end in (A_SUFFIX, B_SUFFIX)]


def test_training_changes_only_the_adapters() -> None:
    model, params = adapted_model("gpt")
    plan = make_plan(model, params, DATA, method=Method.NONE, dtype=torch.float64)
    _, total = plain_sum(model, params, DATA, torch.tensor([1.0, 0.0, 1.0]), plan=plan)
    truth = reference("gpt")
    assert set(total) == set(truth)
    for path, G in truth.items():
        torch.testing.assert_close(total[path], G[0] + G[2], rtol=1e-8, atol=1e-12)


MATMUL = Rule("matmul", torch.matmul, lambda x, g, shape: Pair(rows(x), rows(g), shape))


def test_a_weight_stored_as_inputs_by_outputs_is_adapted() -> None:
    def loss(p: Any, data: Any) -> Tensor:
        return ops.add(ops.use(MATMUL, data["x"], p["weight"]), p["bias"]).tanh().square().sum((1, 2))

    base = {"weight": randn(4, 4), "bias": randn(4, seed=3)}
    model, params = lora(from_loss(loss, base), base, rank=1, alpha=2.0, targets=("weight",), key=keys.key(0))
    params["weight_lora_b"] = randn(4, 1, seed=5)
    data = {"x": randn(3, 5, 4, seed=7)}
    merged = merge(params, alpha=2.0)
    torch.testing.assert_close(merged["weight"], base["weight"] + 2 * params["weight_lora_b"] @ params["weight_lora_a"])
    torch.testing.assert_close(model.loss(params, data), loss(merged, data))
    plan = make_plan(model, params, data, method=Method.GHOST_BK, dtype=torch.float64)
    _, norms, _ = per_sample_norms(model, params, data, plan=plan)
    alone = make_plan(model, params, data, method=Method.MATERIALIZE, dtype=torch.float64)
    _, truth, _ = per_sample_norms(model, params, data, plan=alone)
    torch.testing.assert_close(norms.squared, truth.squared, rtol=1e-8, atol=0)


def test_biases_can_be_trained_with_or_without_adapters() -> None:
    model, params = adapted_model("gpt")
    both = train_only(model, "*_lora_?", "*_bias")
    alone = train_only(MODELS["gpt"], "*_bias")
    assert alone.trainable == {path for path in MODELS["gpt"].leaves if path.endswith("_bias")}
    assert both.trainable == model.trainable | alone.trainable
    for chosen, values in ((both, params), (alone, random_like(alone))):
        truth = per_sample_norms(
            chosen, values, DATA, plan=make_plan(chosen, values, DATA, method=Method.MATERIALIZE, dtype=torch.float64)
        )[1]
        plan = make_plan(chosen, values, DATA, method=Method.GHOST_BK, dtype=torch.float64)
        _, norms, _ = per_sample_norms(chosen, values, DATA, plan=plan)
        assert set(norms.squared) == chosen.trainable
        torch.testing.assert_close(norms.squared, truth.squared, rtol=1e-8, atol=1e-14)


@pytest.mark.slow
def test_biases_trained_with_adapters_are_exact_if_compiled() -> None:
    model, params = adapted_model("gpt")
    both = train_only(model, "*_lora_?", "*_bias")
    plan = make_plan(both, params, DATA, method=Method.AUTO, dtype=torch.float64)
    norms, truth = (
        per_sample_norms(both, params, DATA, plan=plan, execution=Execution(runner=blocks or EAGER))[1]
        for blocks in (CompiledRunner(backend="aot_eager"), None)
    )
    torch.testing.assert_close(norms.squared, truth.squared, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "expected a rank from 1 to 8"),
        ({"rank": 9}, "expected a rank from 1 to 8"),
        ({"alpha": 0.0}, "expected a finite alpha"),
        ({"alpha": float("nan")}, "expected a finite alpha"),
        ({"targets": ("blocks.*.nothing",)}, "expected a pattern of leaves of gpt, got none"),
        ({"targets": ()}, "expected a list of patterns"),
        ({"targets": "blocks.0.qkv"}, "expected a list of patterns"),
        ({"targets": ("blocks.*.norm1",)}, "expected targets that are matrices"),
    ],
)
def test_leaves_and_ranks_that_cannot_be_adapted_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FdpError, match=message):
        lora_model(MODELS["gpt"], **({"rank": 2, "alpha": 4.0, "targets": ("blocks.*.qkv",)} | change))


def test_uses_other_than_products_and_trained_bases_are_refused() -> None:
    table = lora_model(MODELS["gpt"], rank=2, alpha=4.0, targets=("embed.tokens",))
    with pytest.raises(FdpError, match=r"embed.tokens .* products only .* got a use by embedding"):
        make_plan(table, random_like(table), DATA)
    positions = lora_model(MODELS["gpt"], rank=2, alpha=4.0, targets=("embed.positions",))
    with pytest.raises(FdpError, match="got a use by an elementwise operation"):
        positions.loss(random_like(positions), DATA)
    thawed = adapted_model("gpt")[0]._replace(frozen=frozenset())
    with pytest.raises(FdpError, match=r"blocks.0.down: expected an adapted leaf to be frozen"):
        make_plan(thawed, random_like(thawed), DATA)
    with pytest.raises(FdpError, match="one that has them"):
        lora_model(adapted_model("gpt")[0], rank=2, alpha=4.0, targets=("blocks.*.qkv",))
    with pytest.raises(FdpError, match="expected adapters"):
        merge(random_like(MODELS["gpt"]), alpha=4.0)


def _merge_parts(placement: int) -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    values = {"w": randn(5, 4), "w_lora_a": randn(2, 4, seed=2), "w_lora_b": randn(5, 2, seed=3)}

    def part(value: Tensor) -> Tensor:
        whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(placement)])

    merged = merge({name: part(value) for name, value in values.items()}, alpha=6.0)["w"]
    assert merged.placements == (Shard(placement),)
    return merged.full_tensor()


@pytest.mark.slow
@pytest.mark.ranks
def test_sharded_leaves_stay_sharded_when_merged() -> None:
    expected = randn(5, 4) + 3 * F.linear(randn(5, 2, seed=3), randn(2, 4, seed=2).T)
    for found in run_on_ranks(_merge_parts, 2, 0):
        torch.testing.assert_close(found, expected)


def single_backwards(model: Model, params: Any, data: Any) -> Flat:
    """Return every trainable leaf's squared norms, by one ordinary backward per sample."""
    flat = tree.flatten(params)
    trained = {path: flat[path].clone().requires_grad_() for path in sorted(model.trainable)}
    found: dict[str, list[Tensor]] = {path: [] for path in trained}
    for b in range(len(tree.leaves(data)[0])):
        (loss,) = model.loss(tree.unflatten(params, flat | trained), tree.map(lambda leaf: leaf[b : b + 1], data))  # noqa: B023
        for path, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values()))):
            found[path].append(gradient.square().sum())
    return {path: torch.stack(squares) for path, squares in found.items()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_stacks_can_be_adapted(kind: str) -> None:
    """GPT-2 keeps its weights as (inputs, outputs), Llama as (outputs, inputs)."""
    import transformers

    causal = pytest.importorskip("fdp.foreign.hub.causal")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=7, n_positions=5)
        module, targets = transformers.GPT2LMHeadModel(config), ("*c_attn.weight", "*mlp.c_proj.weight")
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=9,
            vocab_size=7, max_position_embeddings=5,
        )  # fmt: skip
        module, targets = transformers.LlamaForCausalLM(config), ("*q_proj.weight", "*down_proj.weight")
    base = causal.causal_lm(module.eval().double(), context=5)
    start = tree.nest({path: dict(module.named_parameters())[path].detach() for path in base.leaves})
    model, params = lora(base, start, rank=RANK, alpha=ALPHA, targets=targets, key=keys.key(0))
    assert torch.equal(model.loss(params, DATA), base.loss(start, DATA))
    params = tree.map(lambda leaf: leaf if bool(leaf.any()) else 0.3 * randn(*leaf.shape), params)  # B is not 0
    merged = base.loss(merge(params, alpha=ALPHA), DATA)
    torch.testing.assert_close(model.loss(params, DATA), merged, rtol=1e-10, atol=1e-12)
    truth = single_backwards(model, params, DATA)
    for method in (Method.GHOST_BK, Method.AUTO):
        plan = make_plan(model, params, DATA, method=method, dtype=torch.float64)
        _, norms, _ = per_sample_norms(model, params, DATA, plan=plan)
        assert set(norms.squared) == set(truth) == model.trainable
        for path, squares in truth.items():
            torch.testing.assert_close(norms.squared[path], squares, rtol=1e-8, atol=1e-16)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "whose"),
    [
        ("gpt2", "own"),
        pytest.param("gpt2", "peft", marks=pytest.mark.slow),
        pytest.param("llama", "own", marks=pytest.mark.slow),
        pytest.param("llama", "peft", marks=pytest.mark.slow),
    ],
)
def test_compiled_and_eager_adapters_on_transformers_stacks_agree(kind: str, whose: str) -> None:
    foreign_models = pytest.importorskip("tests.foreign_models")
    causal = pytest.importorskip("fdp.foreign.hub.causal")
    leaves = pytest.importorskip("fdp.foreign.leaves")
    module = foreign_models.make(kind)
    names = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "down_proj"]}[kind]
    if whose == "peft":
        peft = pytest.importorskip("peft")
        options = {"init_lora_weights": False, "task_type": "CAUSAL_LM", "fan_in_fan_out": kind == "gpt2"}
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, **options)
        module = peft.get_peft_model(module, config).double().eval()
        model = causal.causal_lm(module, context=5)
        params = leaves.params_of(module, model)
    else:
        base = causal.causal_lm(module, context=5)
        targets = tuple(f"*.{name}.weight" for name in names)
        start = leaves.params_of(module, base)
        model, params = lora(base, start, rank=RANK, alpha=ALPHA, targets=targets, key=keys.key(0))
        params = tree.map(lambda leaf: leaf if bool(leaf.any()) else 0.3 * randn(*leaf.shape), params)  # B is not 0
    assert len(model.trainable) == 2 * len(names) * foreign_models.LAYERS
    plan = make_plan(model, params, DATA, method=Method.AUTO, dtype=torch.float64)
    blocks = CompiledRunner(backend="aot_eager")
    eager, compiled = (
        per_sample_norms(model, params, DATA, plan=plan, execution=Execution(runner=how or EAGER))[1:]
        for how in (None, blocks)
    )
    assert len(blocks.kinds) < len(model.blocks)
    torch.testing.assert_close(compiled[0].squared, eager[0].squared, rtol=1e-10, atol=1e-16)
    truth = single_backwards(model, params, DATA)
    torch.testing.assert_close(compiled[0].squared, truth, rtol=1e-8, atol=1e-16)
    sums = [clipped_sum(stash, clip_to(norms, max_norm=0.1)).value for norms, stash in (eager, compiled)]
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-10, atol=1e-16)


def test_a_model_wrapped_by_peft_can_be_trained() -> None:
    peft = pytest.importorskip("peft")
    foreign = pytest.importorskip("fdp.foreign.module")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0", "2"], init_lora_weights=False)
    module = peft.get_peft_model(plain, config).eval().double()
    data = {"x": randn(3, 5, 4)}
    model, params = foreign.from_module(
        module,
        call=lambda run, data: run(data["x"]),
        loss=lambda out, data: out.square().sum((1, 2)),
        example=data,
    )
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    assert model.trainable == trained
    assert len(trained) == 4
    truth = single_backwards(model, params, data)
    for method in (Method.GHOST_BK, Method.AUTO):
        plan = make_plan(model, params, data, method=method, dtype=torch.float64)
        _, norms, _ = per_sample_norms(model, params, data, plan=plan)
        assert set(norms.squared) == model.trainable
        for path, squares in truth.items():
            torch.testing.assert_close(norms.squared[path], squares, rtol=1e-8, atol=1e-16)
