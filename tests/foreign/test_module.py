"""Modules from elsewhere: exact with every method, compiled or not; refused if they cannot be exact."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp import keys, ops, tree
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.module import from_module
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.costs import NormBy
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, explain, make_plan
from fdp.model import Block
from fdp.optimizers import sgd
from fdp.privacy import clipping
from fdp.privacy.clipping import clip_to
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import FdpError
from tests.foreign_cases import (
    CASES,
    LABEL,
    METHODS,
    Experts,
    Foreign,
    assert_exact,
    case_named,
    gradients_named,
    labels,
    model_named,
    randn,
    randomize_parameters,
)

QUICK = ("experts", "resnet")
EAGER = partial(CompiledRunner, backend="aot_eager")
GPT2_AS_ONE = pytest.param(
    "gpt2",
    marks=pytest.mark.skipif(
        torch.__version__ < "2.12", reason="torch.compile did not show torch.arange: refused, as an unknown layout"
    ),
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums_equal_single_sample_backwards(name, method):
    assert_exact(case_named(name), method, made=model_named(name), truth=gradients_named(name))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
)
def test_compiled_blocks_are_exact(name):
    assert_exact(case_named(name), blocks=EAGER(), made=model_named(name), truth=gradients_named(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [GPT2_AS_ONE, "gemma", "bert", "resnet", "experts", "attention"])
def test_a_microbatch_compiled_as_one_graph_is_exact(name):
    foreign, (model, params) = case_named(name), model_named(name)
    plan = make_plan(model, params, foreign.data, method=Method.AUTO, dtype=torch.float64)
    run = torch.compile(
        lambda params, data: per_sample_norms(model, params, data, plan=plan)[1], fullgraph=True, backend="aot_eager"
    )
    got = run(params, foreign.data)
    for path, G in gradients_named(name).items():
        expected = G.reshape(len(G), -1).square().sum(1)
        torch.testing.assert_close(
            got.squared[path], expected, rtol=1e-8, atol=1e-10, msg=lambda m, p=path: f"{p}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "resnet"])
def test_steps_compiled_by_block_or_as_one_graph_equal_the_eager_step(name):
    foreign, (model, params) = case_named(name), model_named(name)
    plan = make_plan(model, params, foreign.data, method=Method.AUTO, dtype=torch.float64)
    sampling = poisson(expected_batch_size=3, dataset_size=30)
    mechanism = Mechanism(sampling, clipping.flat(max_norm=0.5), 1.0)
    data = tree.map(lambda leaf: leaf.unsqueeze(0), foreign.data)
    batch = trusted_batch(data, torch.ones(1, 3), sampling, step=0)
    after = []
    for compile in (Compile.NONE, Compile.BLOCK, Compile.STEP):
        own = tree.map(torch.clone, params)
        state = init_state(model, own, sgd(0.1), mechanism)
        step = make_train_step(
            model, sgd(0.1), mechanism=mechanism, plan=plan, execution=make_execution(compile=compile)
        )
        after.append(step(state, batch, keys.key(0))[0].params)
    for other in after[1:]:
        for path, leaf in tree.flatten(other).items():
            torch.testing.assert_close(leaf, tree.flatten(after[0])[path], rtol=1e-8, atol=1e-9)


# ---------------------------------------------------------------- what becomes of a module


def test_a_tied_parameter_is_one_leaf_with_all_its_uses():
    model, params = model_named("gpt2")
    assert "lm_head.weight" not in model.leaves
    head = case_named("gpt2").module.get_parameter("lm_head.weight")
    assert tree.flatten(params)["transformer.wte.weight"].data_ptr() == head.data_ptr()
    plan = make_plan(model, params, case_named("gpt2").data, dtype=torch.float64)
    rules = sorted(use.rule for block in plan.uses for use in block if use.path == "transformer.wte.weight")
    assert rules == ["embedding", "linear"]
    assert "lm_head.weight" in model_named("gpt2-untied")[0].leaves


def test_uses_in_layers_of_transformers_are_recorded_by_specific_rules():
    model, params = model_named("gpt2")
    plan = make_plan(model, params, case_named("gpt2").data, dtype=torch.float64)
    rules = {use.path: use.rule for block in plan.uses for use in block}
    assert rules["transformer.h.0.attn.c_attn.weight"] == "matmul"
    assert rules["transformer.h.0.attn.c_attn.bias"] == rules["transformer.h.0.ln_1.weight"] == "expanded"
    assert rules["transformer.wpe.weight"] == "embedding"
    model, params = model_named("experts")
    plan = make_plan(model, params, case_named("experts").data, dtype=torch.float64)
    assert {use.path: use.rule for block in plan.uses for use in block}["up"] == "einsum"


def test_frozen_parameters_are_in_no_norm_and_no_sum():
    foreign = Foreign(
        randomize_parameters(Experts(dense=True)), case_named("experts").data, {"loss": labels, "frozen": ("head.*",)}
    )
    foreign.module.get_parameter("router.bias").requires_grad_(False)
    model, params = foreign.model()
    assert model.frozen == {"head.weight", "head.bias", "router.bias"}
    assert set(tree.flatten(params)) == set(model.leaves) > model.trainable
    assert_exact(foreign)


class Buffered(nn.Module):
    """Constants that no parameter is in, one of them as long as a batch of flattened tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(6))
        self.register_buffer("scale", torch.full((6, 1), 0.5, dtype=torch.float64))
        self.place = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.place(self.places) * self.scale).tanh().mean(1))


def test_buffers_are_constants():
    foreign = Foreign(randomize_parameters(Buffered()), {"x": randn(3, 6, 4), "label": LABEL}, {"loss": labels})
    assert set(foreign.model()[0].leaves) == {"place.weight", "head.weight", "head.bias"}
    assert_exact(foreign)


def test_parametrised_weights_are_functions_of_their_leaves():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    foreign = Foreign(randomize_parameters(layer), {"input": randn(3, 4), "label": LABEL}, {"loss": labels})
    assert_exact(foreign, Method.GHOST)


def test_recurrent_layers_materialise_their_whole_block():
    model, params = model_named("lstm")
    plan = make_plan(model, params, case_named("lstm").data, method=Method.GHOST, dtype=torch.float64)
    assert {choice.norm for choice in plan.choices.values()} == {NormBy.VMAP}
    assert "any" in explain(plan)


def test_only_blocks_that_hold_a_materialised_leaf_are_materialised():
    model, params = model_named("experts")
    flat, data = tree.flatten(params), case_named("experts").data
    first = Block("first", {"up": "up"}, lambda p, carry, data: ops.use(ops.EXPERTS, _both(data), p["up"]))
    last = Block("last", {"w": "down", "head": "head.weight"}, lambda p, h, data: _after(p, h))
    stack = model._replace(
        blocks=(first, last),
        leaves={path: model.leaves[path] for path in ("up", "down", "head.weight")},
        materialized=frozenset({"down"}),
    )
    own = {path: flat[path] for path in stack.leaves}
    plan = make_plan(stack, own, data, method=Method.GHOST, dtype=torch.float64)
    by = {path: choice.norm for path, choice in plan.choices.items()}
    assert by == {"up": NormBy.GRAM, "down": NormBy.VMAP, "head.weight": NormBy.VMAP}
    exact = make_plan(
        stack._replace(materialized=frozenset()), own, data, method=Method.MATERIALIZE, dtype=torch.float64
    )
    _, got, stash = per_sample_norms(stack, own, data, plan=plan)
    _, expected, other = per_sample_norms(stack, own, data, plan=exact)
    for path in own:
        torch.testing.assert_close(got.squared[path], expected.squared[path], rtol=1e-9, atol=1e-12)
    clip = clip_to(got, max_norm=0.5)
    total, truth = clipped_sum(stash, clip).value, clipped_sum(other, clip).value
    for path, value in total.items():
        torch.testing.assert_close(value, truth[path], rtol=1e-8, atol=1e-10)


def _both(data: dict) -> Tensor:
    return data["x"].unsqueeze(1).expand(-1, 2, -1, -1)


def _after(p: dict, h: Tensor) -> Tensor:
    return ops.linear(ops.use(ops.EXPERTS, h.tanh(), p["w"]).mean((1, 2)), p["head"]).square().sum(1)


def test_a_memory_budget_does_not_change_materialised_leaves():
    model, params = model_named("lstm")
    plan = make_plan(model, params, case_named("lstm").data, dtype=torch.float64, memory_budget=0.0)
    assert {choice.norm for choice in plan.choices.values()} == {NormBy.VMAP}


def test_data_are_passed_by_name_by_position_or_by_a_custom_call():
    layer, x = randomize_parameters(nn.Linear(4, 1)), randn(3, 4)
    loss = lambda out, data: out.square().sum(1)  # noqa: E731
    expected = layer(x).square().sum(1)
    for data, call in (
        ({"input": x, "other": x}, None),
        (x, None),
        ([x], None),
        ({"image": x}, lambda module, data: module(data["image"])),
    ):
        model, params = from_module(layer, loss=loss, call=call, example=data)
        torch.testing.assert_close(model.loss(params, data), expected)
    with pytest.raises(
        FdpError, match=r"forward takes, \['input'\], got \['image'\]; rename .*module\(data\['image'\]\)"
    ):
        from_module(layer, loss=loss, example={"image": x})
    with pytest.raises(FdpError, match=r"loss: expected the module to return the loss of every sample, got CausalLM"):
        from_module(case_named("llama").module, example=case_named("llama").data)


def test_half_precision_computes_in_the_dtype_of_the_plan():
    foreign, (model, params) = case_named("vit"), model_named("vit")
    plan = make_plan(model, params, foreign.data, method=Method.AUTO, dtype=torch.bfloat16)
    _, norms, _ = per_sample_norms(model, params, foreign.data, plan=plan)
    expected = sum(G.reshape(3, -1).square().sum(1) for G in gradients_named("vit").values()) ** 0.5
    torch.testing.assert_close(norms.total().double(), expected, rtol=0.05, atol=0)


# ---------------------------------------------------------------- refusals and checks


def test_batch_norm_is_refused_by_name_with_its_replacement():
    module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3)).double()
    data = {"input": randn(4, 4), "label": torch.tensor([0, 1, 2, 0])}
    with pytest.raises(
        FdpError, match=r"1.0: BatchNorm1d normalises by statistics of the batch.*GroupNorm\(groups, 8\)"
    ):
        from_module(module, loss=labels, example=data)
    with pytest.raises(FdpError, match=r"1.0: BatchNorm1d"):
        from_module(module, loss=labels, check=False)
    assert_exact(Foreign(randomize_parameters(module), data, {"loss": labels}))  # in eval(): fixed statistics


def test_a_loss_over_pairs_in_the_batch_is_refused():
    def contrastive(out: Tensor, data: object) -> Tensor:
        return F.cross_entropy(out @ out.transpose(0, 1), torch.arange(len(out)), reduction="none")

    with pytest.raises(FdpError, match=r"Linear: the loss of a sample changed by .* a loss over pairs in the batch"):
        from_module(randomize_parameters(nn.Linear(4, 5)), loss=contrastive, example={"input": randn(4, 4)})


def test_routing_by_shapes_that_depend_on_data_is_refused_with_the_remedy():
    routed = case_named("routed")
    with pytest.raises(FdpError, match=r"materialise(d|)|materialize=") as refused:
        assert_exact(routed._replace(options={"loss": labels}))
    assert "nonzero" in str(refused.value)
    assert_exact(routed)


def test_a_use_without_a_rule_is_refused_by_from_module():
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, self.inner.weight)

    data = {"x": randn(3, 4), "label": LABEL}
    with pytest.raises(FdpError, match=r"inner.weight: used by .*cdist on .*materialize=\('inner.weight',\)"):
        from_module(randomize_parameters(Unknown()), loss=labels, example=data)


class Flattening(nn.Module):
    """Tokens flattened before samples: by its shapes it looks like the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], x.shape[0], 3).mean(0)


def test_tokens_flattened_before_samples_are_found_by_the_check():
    data = {"x": randn(3, 6, 4) * torch.tensor([1.0, 5.0, 0.2]).view(3, 1, 1), "label": LABEL}
    module: Any = randomize_parameters(Flattening())
    with pytest.raises(
        FdpError,
        match=r"layer.weight: expected the gradient of sample \d to have the same norm in a batch as alone",
    ) as caught:
        from_module(module, loss=labels, example=data)
    for b in range(3):  # and shows no norm
        loss = labels(module(data["x"][b : b + 1]), {"label": LABEL[b : b + 1]}).sum()
        norm = float(torch.autograd.grad(loss, module.layer.weight)[0].norm())
        assert f"{norm:.1e}" not in str(caught.value)
        assert f"{norm:.4g}" not in str(caught.value)
    model, _ = from_module(randomize_parameters(Flattening()), loss=labels, example=data, materialize=("layer",))
    assert model.materialized == {"layer.weight", "layer.bias"}


def test_a_parameter_that_the_module_stores_elsewhere_is_found_by_the_check():
    first = nn.Linear(4, 4)
    module = randomize_parameters(nn.Sequential(first, nn.Linear(4, 3)))
    held = first.weight
    first.forward = lambda x: F.linear(x, held)  # type: ignore[method-assign]
    data = {"input": randn(3, 4), "label": LABEL}
    with pytest.raises(FdpError, match=r"never uses \['0.bias', '0.weight'\]|0.weight: expected the gradient"):
        from_module(module, loss=labels, example=data)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1.0
        return self.head(x)


def test_a_buffer_that_changes_is_refused_and_restored():
    module = randomize_parameters(Counting())
    with pytest.raises(
        FdpError, match=r"seen: the module changes this tensor when it is called \(by torch.Tensor.add_\)"
    ):
        from_module(module, loss=labels, example={"x": randn(3, 4), "label": LABEL})
    assert module.seen == 0


def test_checks_need_an_example():
    with pytest.raises(FdpError, match=r"Linear: expected an example, a batch of at least two samples"):
        from_module(nn.Linear(4, 3), loss=labels)
    from_module(nn.Linear(4, 3), loss=labels, check=False)


def test_patterns_that_match_nothing_are_refused():
    with pytest.raises(FdpError, match=r"materialize: expected a pattern of leaves of Linear, such as 'bias', got 'w'"):
        from_module(nn.Linear(4, 3), check=False, materialize=("w",))
    with pytest.raises(FdpError, match=r"frozen: expected a pattern of leaves"):
        from_module(nn.Linear(4, 3), check=False, frozen=("w",))


@pytest.mark.parametrize("name", ["gpt2", "gemma", "resnet", "gru", "routed", "attention-tokens-first"])
def test_modules_that_are_exact_pass_the_check(name):
    model, _ = case_named(name).model(check=True, name="mine")
    assert model.name == "mine"


def test_two_losses_of_one_module_are_two_models_and_share_no_noise():
    """A fixed seed must not add the same noise to the sums of two losses."""
    module, data = nn.Sequential(nn.Linear(4, 3)), {"input": torch.randn(4, 4), "label": torch.arange(4) % 3}

    def made(**options: Any) -> tuple[Any, ...]:
        return from_module(module, example=data, **options)[0].identity

    def smooth(share: float):
        return lambda out, data: F.cross_entropy(out, data["label"], reduction="none", label_smoothing=share)

    losses = [made(loss=smooth(share)) for share in (0.0, 0.1)]
    assert len({repr(identity) for identity in losses}) == 2
    assert repr(made(loss=smooth(0.1))) in {repr(identity) for identity in losses}
