from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fdp import keys, ops, tree
from fdp.model import Model, check_params
from fdp.models import PRESETS, build, cnn, logits, mlp
from fdp.models.language import token_losses
from fdp.models.llama import rotary, rotate
from fdp.types import FdpError, Flat, Tree
from tests.conftest import Case, case_named, randn


def count(model: Model) -> int:
    return sum(math.prod(leaf.shape) for leaf in model.leaves.values())


PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,  # Llama 3.2 1B
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert count(build(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_block_names_leaves_that_exist_and_every_leaf_is_named(name):
    model = build(name)
    assert {path for block in model.blocks for path in tree.leaves(block.params)} == set(model.leaves)
    assert model.name == name


@pytest.mark.parametrize("name", ["gpt-nano", "llama-nano", "logistic", "mlp", "cnn"])
def test_small_presets_start_with_the_loss_of_a_guess(name):
    language = name.endswith("nano")
    model = build(name, context=16) if language else build(name)
    params = model.init(keys.key(0))
    check_params(model, params)
    if language:
        data = {"tokens": torch.randint(0, 256, (4, 17))}
    else:
        image = torch.rand(4, 1, 8, 8) if name == "cnn" else torch.rand(4, 64)
        data = {"image": image, "label": torch.tensor([0, 3, 5, 9])}
    losses = model.loss(params, data)
    assert losses.shape == (4,)
    guess = math.log(256 if language else 10)
    assert float(losses.mean()) == pytest.approx(guess, rel=0.05 if language else 0.5)


@pytest.mark.parametrize("context", [0, -5])
def test_a_context_without_tokens_is_refused(context):
    with pytest.raises(FdpError, match=f"context: expected at least 1 token, got {context}"):
        build("gpt-nano", context=context)


def test_vocabulary_context_and_tying_can_be_changed():
    model = build("gpt2", vocab_size=100, context=32, tied=False)
    assert (model.vocab_size, model.context) == (100, 32)
    shapes = {path: leaf.shape for path, leaf in model.leaves.items()}
    assert shapes["embed.tokens"] == shapes["head.weight"] == (100, 768)
    assert shapes["embed.positions"] == (32, 768)
    assert "head.weight" not in build("gpt2").leaves
    assert "head.weight" not in build("llama-7b", tied=True).leaves
    assert build("llama-7b", context=64).context == 64


def test_unsupported_changes_to_a_preset_are_refused():
    with pytest.raises(FdpError, match=r"expected one of gpt-nano.*got 'gpt3'"):
        build("gpt3")
    for call in (
        lambda: build("mlp", vocab_size=5),
        lambda: build("mlp", context=5),
        lambda: build("mlp", tied=False),
    ):
        with pytest.raises(FdpError, match="mlp: a classifier has no"):
            call()


@pytest.mark.parametrize("name", ["gpt", "gpt-untied", "llama", "llama-tied"])
@pytest.mark.parametrize("position", [1, 3])
def test_a_later_token_changes_nothing_before_it(name, position):
    model, params, data = case_named(name)
    assert torch.equal(token_losses_of(model, params, data).mean(1), model.loss(params, data))
    tokens = data["tokens"].clone()
    tokens[:, position] = (tokens[:, position] + 1) % 7
    before, after = (token_losses_of(model, params, {"tokens": t}) for t in (data["tokens"], tokens))
    # The loss at place i predicts token i + 1 from tokens 0..i.
    torch.testing.assert_close(after[:, : position - 1], before[:, : position - 1], rtol=1e-12, atol=1e-12)
    assert ((after - before)[:, position - 1 :].abs() > 1e-6).all()


def token_losses_of(model, params, data) -> torch.Tensor:
    flat: Flat = tree.flatten(params)
    carry: Tree = ()
    for block in model.blocks[:-1]:
        carry = block.apply(tree.select(flat, block.params), carry, data)
    p = tree.select(flat, model.blocks[-1].params)
    if "norm_bias" in p:
        scores = ops.linear(ops.layer_norm(carry, p["norm"], p["norm_bias"]), p["weight"])
    else:
        scores = ops.linear(ops.rms_norm(carry, p["norm"]), p["weight"])
    return -scores.log_softmax(-1).gather(2, data["tokens"][:, 1:, None]).squeeze(2)


def test_a_language_model_sees_the_order_of_its_tokens():
    for name in ("gpt", "llama"):
        model, params, data = case_named(name)
        swapped = data["tokens"].clone()
        swapped[:, [0, 2]] = swapped[:, [2, 0]]
        if (swapped != data["tokens"]).any(1).all():
            last = [token_losses_of(model, params, {"tokens": t})[:, -1] for t in (data["tokens"], swapped)]
            assert ((last[0] - last[1]).abs() > 1e-6).all()


def test_the_gpt_block_is_torchs_pre_norm_transformer_layer():
    model, params, _ = case_named("gpt")
    p = params["blocks"][0]
    layer = nn.TransformerEncoderLayer(
        8, 2, 32, 0.0, lambda x: F.gelu(x, approximate="tanh"), batch_first=True, norm_first=True
    ).double()
    names = {
        "norm1.weight": "norm1",
        "norm1.bias": "norm1_bias",
        "self_attn.in_proj_weight": "qkv",
        "self_attn.in_proj_bias": "qkv_bias",
        "self_attn.out_proj.weight": "out",
        "self_attn.out_proj.bias": "out_bias",
        "norm2.weight": "norm2",
        "norm2.bias": "norm2_bias",
        "linear1.weight": "up",
        "linear1.bias": "up_bias",
        "linear2.weight": "down",
        "linear2.bias": "down_bias",
    }

    def in_order_of_torch(name: str) -> torch.Tensor:
        """Ours goes head by head, q k v of each; torch's is all q, all k, all v."""
        leaf = p[name]
        return leaf.unflatten(0, (2, 3, 4)).transpose(0, 1).flatten(0, 2) if name.startswith("qkv") else leaf

    layer.load_state_dict({theirs: in_order_of_torch(ours) for theirs, ours in names.items()})
    h = randn(3, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected = layer(h, src_mask=mask, is_causal=True)
    torch.testing.assert_close(model.blocks[1].apply(p, h, {}), expected, rtol=1e-10, atol=1e-10)


def test_rotation_turns_pairs_by_position_times_frequency():
    cos, sin = rotary(6, 8, base=100.0, like=torch.zeros((), dtype=torch.float64))
    x = randn(6, 8)
    turned = rotate(x, cos, sin)
    angle = torch.arange(6)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    expected = torch.complex(x[:, :4], x[:, 4:]) * torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    torch.testing.assert_close(turned[:, :4], expected.real, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(turned[:, 4:], expected.imag, rtol=1e-6, atol=1e-6)


def test_rotary_scores_depend_on_the_distance_only():
    cos, sin = rotary(12, 8, base=10_000.0, like=torch.zeros((), dtype=torch.float64))
    q, k = randn(8), randn(8, seed=2)
    queries, keys_ = (rotate(z.expand(12, 8), cos, sin) for z in (q, k))
    scores = queries @ keys_.T
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert scores.diagonal(0)[0] != scores.diagonal(3)[0]


def test_token_losses_are_the_mean_over_next_tokens():
    scores, tokens = randn(2, 4, 7), torch.tensor([[1, 2, 3, 4, 5], [6, 0, 1, 1, 2]])
    log = scores.log_softmax(-1)
    expected = torch.stack([-torch.stack([log[b, t, tokens[b, t + 1]] for t in range(4)]).mean() for b in range(2)])
    torch.testing.assert_close(token_losses(scores, {"tokens": tokens}), expected)
    assert token_losses(scores.bfloat16(), {"tokens": tokens}).dtype == torch.float32


def test_the_loss_of_a_classifier_is_the_cross_entropy_of_its_logits():
    for name in ("mlp", "cnn"):
        case: Case = case_named(name)
        scores = logits(case.model, case.params, case.data)
        expected = F.cross_entropy(scores, case.data["label"], reduction="none")
        torch.testing.assert_close(case.model.loss(case.params, case.data), expected)


def test_the_perceptron_is_tanh_layers_and_a_linear_head():
    case = case_named("mlp")
    layers, head = case.params["layers"], case.params["head"]
    h = case.data["image"].flatten(1)
    for layer in layers:
        h = (h @ layer["weight"].T + layer["bias"]).tanh()
    torch.testing.assert_close(logits(*case), h @ head["weight"].T + head["bias"])


def test_shapes_of_classifiers_follow_their_arguments():
    assert mlp(widths=(6, 5), classes=4).leaves["layers.0.weight"].shape == (5, 6)
    assert cnn(channels=(3, 4, 5), side=9, classes=4, inputs=2).leaves["head.weight"].shape == (4, 5 * 3 * 3)
    model = cnn(channels=(3, 4, 5), side=9, classes=4, inputs=2)
    data = {"image": torch.rand(2, 2, 9, 9), "label": torch.tensor([0, 1])}
    assert model.loss(model.init(keys.key(0)), data).shape == (2,)
