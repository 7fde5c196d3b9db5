"""Prefix tuning: losses equal transformers with the same cache, norms are exact, and peft reads what is saved."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp import keys, tree
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.adapters.prefix import _PrefixedLayer, prefix_model, prefix_paths, prefix_tuning
from fdp.foreign.adapters.prefix_save import save_prefix
from fdp.foreign.call_template import HIDDEN_SLOT, CallTemplate
from fdp.foreign.hub.causal import causal_lm
from fdp.foreign.hub.prefix_cache import PrefixCache
from fdp.foreign.module import from_module
from fdp.foreign.stack.block_functions import Constants, LayerBlock
from fdp.gradients.clipped_sum import clipped_sum, plain_sum
from fdp.gradients.execution import Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.model import Model, check_params
from fdp.privacy.clipping import clip_to
from fdp.types import FdpError, Flat, Tree
from tests.conftest import randn

transformers = pytest.importorskip("transformers")
models = pytest.importorskip("tests.foreign_models")

VIRTUAL, CONTEXT = 4, 8
WINDOWED = ("gemma2", "mistral", "gemma3")
DATA = {"tokens": torch.randint(0, models.WORDS, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(2))}


def far(params: Tree) -> Tree:
    """Parameters with a prefix that matters."""
    flat = tree.flatten(params)
    return tree.nest(flat | {path: randn(*flat[path].shape, seed=i) for i, path in enumerate(prefix_paths(flat))})


@cache
def prefixed(name: str) -> tuple[Any, Model, Tree]:
    module = models.make(name)
    model, params = prefix_tuning(module, tokens=VIRTUAL, key=keys.key(0), context=CONTEXT)
    check_params(model, params)
    return module, model, far(params)


def losses_of(logits: Tensor, data: Tree) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), data["tokens"][:, 1:], reduction="none").mean(1)


def own_losses(module: Any, flat: Flat, data: Tree) -> Tensor:
    """The module's own, with the prefix in a cache of transformers."""
    tokens = data["tokens"]
    pairs = [tuple(flat[path].expand(len(tokens), *flat[path].shape).unbind(1)) for path in prefix_paths(flat)]
    seen = torch.ones(len(tokens), VIRTUAL + CONTEXT, dtype=torch.int64)
    out = module(input_ids=tokens[:, :-1], attention_mask=seen, past_key_values=transformers.DynamicCache(pairs))
    return losses_of(out.logits, data)


@cache
def reference(name: str) -> Flat:
    """Every prefix leaf's gradient, one sample at a time, by the module itself."""
    module, _, params = prefixed(name)
    flat = tree.flatten(params)
    trained = {path: flat[path].clone().requires_grad_() for path in prefix_paths(flat)}
    found: dict[str, list[Tensor]] = {path: [] for path in trained}
    for b in range(len(DATA["tokens"])):
        (loss,) = own_losses(module, trained, {"tokens": DATA["tokens"][b : b + 1]})
        for path, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values()))):
            found[path].append(gradient)
    return {path: torch.stack(gradients) for path, gradients in found.items()}


@pytest.mark.parametrize("name", [name for name in models.CAUSAL if name not in WINDOWED])
def test_losses_equal_those_of_transformers_with_the_prefix_as_a_cache(name: str) -> None:
    module, model, params = prefixed(name)
    with torch.no_grad():
        expected = own_losses(module, tree.flatten(params), DATA)
        torch.testing.assert_close(model.loss(params, DATA), expected, rtol=1e-10, atol=1e-12)
        without = losses_of(module(input_ids=DATA["tokens"][:, :-1]).logits, DATA)
    assert float((expected - without).abs().min()) > 1e-3, "the prefix does something"


@pytest.mark.parametrize("method", [method for method in Method if method is not Method.NONE])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_norms_and_sums_equal_single_sample_backwards_of_the_prefix(name: str, method: Method) -> None:
    _, model, params = prefixed(name)
    plan = make_plan(model, params, DATA, method=method, dtype=torch.float64)
    check_against_reference(name, *per_sample_norms(model, params, DATA, plan=plan)[1:])


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_compiled_blocks_agree_and_equal_layers_are_compiled_once(name: str) -> None:
    _, model, params = prefixed(name)
    plan = make_plan(model, params, DATA, method=Method.AUTO, dtype=torch.float64)
    check_against_reference(
        name,
        *per_sample_norms(
            model, params, DATA, plan=plan, execution=Execution(runner=CompiledRunner(backend="aot_eager"))
        )[1:],
    )
    assert len({block.apply for block in model.blocks[1:-1]}) == 1


def check_against_reference(name: str, norms: Any, stash: Any) -> None:
    truth = reference(name)
    assert set(norms.squared) == set(truth)
    for path, G in truth.items():
        torch.testing.assert_close(norms.squared[path], G.flatten(1).square().sum(1), rtol=1e-8, atol=1e-14)
    total = torch.stack(list(norms.squared.values())).sum(0).sqrt()
    clip = clip_to(norms, max_norm=float(total.median()))
    value = clipped_sum(stash, clip).value
    for path, G in truth.items():
        expected = torch.einsum("b,b...->...", clip.factors[path].double(), G)
        torch.testing.assert_close(value[path], expected, rtol=1e-8, atol=1e-14)
    assert float(clip.smallest().min()) < 1 <= float(clip.smallest().max())


def test_only_the_prefix_is_trained() -> None:
    module, model, params = prefixed("gpt2")
    assert model.trainable == {f"prefix.{i}" for i in range(models.LAYERS)}
    assert model.frozen == {name for name, _ in module.named_parameters()}
    plan = make_plan(model, params, DATA, method=Method.NONE, dtype=torch.float64)
    _, total = plain_sum(model, params, DATA, torch.ones(len(DATA["tokens"])), plan=plan)
    assert set(total) == model.trainable
    for path, G in reference("gpt2").items():
        torch.testing.assert_close(total[path], G.sum(0), rtol=1e-8, atol=1e-14)


def test_packed_documents_see_the_prefix_and_not_each_other() -> None:
    """A document's loss is the same before and after another, whose tokens it must not see."""
    module = models.make("llama")
    one, two = DATA["tokens"][0, :4], DATA["tokens"][1, :4]
    end = DATA["tokens"][2, :1]
    data = {
        "tokens": torch.stack([torch.cat([one, two, end]), torch.cat([two, one, end])]),
        "segments": torch.tensor([[0] * 4 + [1] * 4] * 2),
        "loss_mask": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0]]),
    }
    model, params = prefix_tuning(module, tokens=VIRTUAL, key=keys.key(0), context=CONTEXT, example=data)
    after, before = model.loss(far(params), data)
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-12)
    logits = own_logits(module, tree.flatten(far(params)), two[None, :3])
    alone = F.cross_entropy(logits[0], two[1:])
    torch.testing.assert_close(after, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [*WINDOWED, "phi3", "qwen2", "llama"])
def test_every_window_of_a_user_sees_the_prefix(name: str) -> None:
    """Also where layers have a window of attention that all of a user's tokens together exceed."""
    module = models.make(name)
    if name not in ("llama", "qwen2"):
        module.config.sliding_window = VIRTUAL + CONTEXT
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, models.WORDS, (2, 4, CONTEXT + 1), generator=draw)
    one, two = torch.tensor([1] * CONTEXT), torch.tensor([1] * 3 + [2] * 5)
    segments = torch.stack([one, two, two, one]).expand(2, -1, -1)
    mask = torch.ones_like(segments)
    mask[:, 1:3, 2] = 0  # the next token is another document's
    data = {"tokens": tokens, "segments": segments, "loss_mask": mask}
    model, params = prefix_tuning(module, tokens=VIRTUAL, key=keys.key(0), context=CONTEXT, example=data)
    flat = tree.flatten(far(params))
    for b in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for w in range(4):
            for part in (tokens[b, w, :4], tokens[b, w, 3:]) if w in (1, 2) else (tokens[b, w],):
                part = part[:3] if len(part) == 4 else part
                logits = own_logits(module, flat, part[None, :-1])
                total += F.cross_entropy(logits[0], part[1:], reduction="sum")
        torch.testing.assert_close(model.loss(far(params), data)[b], total / mask[b].sum(), rtol=1e-9, atol=1e-10)


def own_logits(module: Any, flat: Flat, ids: Tensor) -> Tensor:
    cached = transformers.DynamicCache([tuple(flat[path][:, None]) for path in prefix_paths(flat)])
    with torch.no_grad():
        return module(input_ids=ids, past_key_values=cached).logits


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_peft_reads_what_is_saved(name: str, tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    _, model, params = prefixed(name)
    save_prefix(tmp_path / "adapter", params, base="models/tiny")
    with pytest.raises(FdpError, match="expected no folder of this name"):
        save_prefix(tmp_path / "adapter", params)
    wrapped = peft.PeftModel.from_pretrained(models.make(name), tmp_path / "adapter").double().eval()
    with torch.no_grad():
        theirs = losses_of(wrapped(input_ids=DATA["tokens"][:, :-1]).logits, DATA)
    torch.testing.assert_close(model.loss(params, DATA), theirs, rtol=1e-6, atol=1e-6)  # peft has the prefix in float32
    assert wrapped.peft_config["default"].base_model_name_or_path == "models/tiny"


WRAPPED = {
    "prefix": ("PrefixTuningConfig", {}, ()),
    "projected": ("PrefixTuningConfig", {"prefix_projection": True, "encoder_hidden_size": 6}, ()),
    "prompt": ("PromptTuningConfig", {}, ("prompt_encoder.*",)),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_prefix_or_prompt_of_peft_can_be_trained_by_from_module(kind: str) -> None:
    peft = pytest.importorskip("peft")
    made, more, materialize = WRAPPED[kind]
    torch.manual_seed(0)
    config = getattr(peft, made)(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, **more)
    module = peft.get_peft_model(models.make("gpt2"), config).double().eval()
    with pytest.raises(FdpError, match="which puts something before the tokens; use from_module"):
        causal_lm(module, context=CONTEXT)
    model, params = from_module(
        module,
        call=lambda run, data: run(input_ids=data["tokens"][:, :-1], use_cache=False),
        loss=lambda out, data: losses_of(out.logits[:, -CONTEXT:], data),
        materialize=materialize,
        example=DATA,
    )
    assert model.trainable == {name for name, leaf in module.named_parameters() if leaf.requires_grad}
    assert all(path.startswith("prompt_encoder.") for path in model.trainable)
    plan = make_plan(model, params, DATA, method=Method.AUTO, dtype=torch.float64)
    _, norms, _ = per_sample_norms(model, params, DATA, plan=plan)
    trained = {name: leaf for name, leaf in module.named_parameters() if leaf.requires_grad}
    for b in range(len(DATA["tokens"])):
        one = {"tokens": DATA["tokens"][b : b + 1]}
        loss = losses_of(module(input_ids=one["tokens"][:, :-1]).logits[:, -CONTEXT:], one).sum()
        for path, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values()))):
            torch.testing.assert_close(norms.squared[path][b], gradient.square().sum(), rtol=1e-8, atol=1e-16)


class Deaf(nn.Module):
    """A layer that asks no cache."""

    def forward(self, hidden: Tensor, past_key_values: Any = None) -> Tensor:
        return 2 * hidden


def test_a_layer_that_does_not_ask_for_its_prefix_is_refused() -> None:
    layer = LayerBlock(
        Deaf(), CallTemplate((HIDDEN_SLOT,), {"past_key_values": PrefixCache(2)}), (), Constants(Deaf(), {})
    )
    with pytest.raises(FdpError, match="asks its cache for keys and values once, got 0 times from Deaf"):
        _PrefixedLayer(layer)({"base": {}, "prefix": randn(2, 1, 2, 3)}, (randn(3, 5, 4),), DATA)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {"tokens": 0}, "expected at least 1 virtual token, got 0"),
        ("gpt2", {"tokens": 4, "context": 29}, "fit into the model's 32 positions, .* got 4 and 29"),
        ("gpt2", {"tokens": 32}, "fit into the model's 32 positions"),
        ("mistral", {"tokens": 2, "context": 3}, "fit into the model's 4 positions"),
    ],
)
def test_a_prefix_that_does_not_fit_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FdpError, match=message):
        prefix_model(models.make(name), **options)


def test_the_context_is_shortened_by_the_prefix() -> None:
    assert prefix_model(models.make("gpt2"), tokens=5).context == 27


def test_heads_that_differ_from_the_config_are_refused() -> None:
    with pytest.raises(FdpError, match="for a layer with 2 key heads of 8 features"):
        PrefixCache(4, randn(3, 4, 4, 8), randn(3, 4, 4, 8)).update(randn(3, 2, 5, 8), randn(3, 2, 5, 8), 0)
