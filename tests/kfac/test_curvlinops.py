"""Factors equal those of curvlinops, an independent implementation with hooks, to the last digits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp import ops, tree
from fdp.kfac.layers import survey
from fdp.kfac.measure.estimator import Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.types import Curvature, Layer
from fdp.model import Block, Likelihood, Outputs
from fdp.types import Tree
from tests.conftest import Case, case_named
from tests.kfac_cases import curvatures, matrices


class Transformer(nn.Module):
    """fdp.models.gpt with its linear layers as modules."""

    def __init__(self, case: Case, *, pooled: bool):
        super().__init__()
        self.flat = tree.flatten(case.params)
        self.pooled = pooled
        names = [path.removesuffix("_bias") for path in self.flat if path.endswith(("qkv", "out", "up", "down"))]
        self.linears = nn.ModuleDict()
        for path in [*names, "head.weight"]:
            weight, bias = self.flat[path], self.flat.get(f"{path}_bias")
            linear = nn.Linear(*weight.shape[::-1], bias=bias is not None, dtype=weight.dtype)
            linear.weight.data.copy_(weight)
            if bias is not None:
                assert linear.bias is not None
                linear.bias.data.copy_(bias)
            self.linears[path.replace(".", "/")] = linear

    def forward(self, tokens: Tensor) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            return self.linears[name.replace(".", "/")](x)

        h = self.flat["embed.tokens"][tokens] + self.flat["embed.positions"]
        p, b = self.flat, "blocks.0"
        n = F.layer_norm(h, (8,), p[f"{b}.norm1"], p[f"{b}.norm1_bias"])
        q, k, v = linear(f"{b}.qkv", n).reshape(*h.shape[:2], 2, 3, 4).transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + linear(f"{b}.out", mixed)
        m = F.layer_norm(h, (8,), p[f"{b}.norm2"], p[f"{b}.norm2_bias"])
        h = h + linear(f"{b}.down", F.gelu(linear(f"{b}.up", m), approximate="tanh"))
        h = F.layer_norm(h, (8,), p["head.norm"], p["head.norm_bias"])
        if self.pooled:
            return linear("head.weight", h.mean(1))
        return linear("head.weight", h).transpose(1, 2)  # torch's cross-entropy has classes in dim 1


def pooled_gpt() -> Case:
    """Return the transformer as a classifier of features averaged over tokens."""
    model, params, data = case_named("gpt-untied")
    last = model.blocks[-1]
    assert last.head is not None
    features = last.head.features

    def scores(p: Tree, h: Tensor, data: Tree) -> Tensor:
        return ops.linear(features(p, h, data).mean(1), p["weight"])

    def loss(p: Tree, h: Tensor, data: Tree) -> Tensor:
        return F.cross_entropy(scores(p, h, data), data["label"], reduction="none")

    outputs = Outputs(scores, Likelihood.SOFTMAX, lambda data: data["label"], weight="weight")
    block = Block("head", last.params, loss, outputs=outputs)
    return Case(model._replace(blocks=(*model.blocks[:-1], block)), params, data | {"label": torch.tensor([6, 0, 2])})


def torch_mlp(case: Case) -> nn.Module:
    sizes = [case.params[part][i]["weight"].shape for part, i in (("layers", 0), ("layers", 1))]
    head = case.params["head"]["weight"].shape
    linears = [nn.Linear(s[1], s[0]) for s in [*sizes, head]]
    return nn.Sequential(nn.Flatten(), linears[0], nn.Tanh(), linears[1], nn.Tanh(), linears[2]).double()


def torch_cnn(case: Case) -> nn.Module:
    first, second = (layer["weight"].shape for layer in case.params["layers"])
    head = case.params["head"]["weight"].shape
    return nn.Sequential(
        nn.Conv2d(first[1], first[0], 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(second[1], second[0], 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(head[1], head[0]),
    ).double()


def theirs(net: nn.Module, x: Tensor, y: Tensor, fisher: Fisher, sharing: Sharing) -> dict[str, tuple[Tensor, Tensor]]:
    curvlinops = pytest.importorskip("curvlinops")
    kind = {Fisher.EXACT: "type-2", Fisher.EMPIRICAL: "empirical"}[fisher]
    operator = curvlinops.KFACLinearOperator(
        net,
        nn.CrossEntropyLoss(),
        list(net.parameters()),
        [(x, y)],
        fisher_type=kind,
        kfac_approx=sharing.value,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    return {
        name: (operator._gradient_covariances[name], operator._input_covariances[name])
        for name in operator._input_covariances
    }


def assert_theirs(found: dict[Layer, Curvature], by_module: dict[Layer, tuple[Tensor, Tensor]]) -> None:
    for layer, (left, right) in by_module.items():
        ours = matrices({layer: found[layer]})
        torch.testing.assert_close(ours[layer.weight, "left"], left, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(ours[layer.weight, "right"], right, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # curvlinops' own
@pytest.mark.parametrize("fisher", [Fisher.EXACT, Fisher.EMPIRICAL])
@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_factors_of_classifiers_are_those_of_curvlinops(name, sharing, fisher):
    case = case_named(name)
    net = torch_mlp(case) if name == "mlp" else torch_cnn(case)
    modules = {key: m for key, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    flat = tree.flatten(case.params)
    layers = survey(*case).layers
    for layer, m in zip(layers, modules.values(), strict=True):
        assert layer.bias is not None
        assert m.bias is not None
        m.weight.data.copy_(flat[layer.weight])
        m.bias.data.copy_(flat[layer.bias])
    their = theirs(net, case.data["image"], case.data["label"], fisher, sharing)
    found = curvatures(case, fisher, sharing)
    assert_theirs(found, {layer: their[key] for layer, key in zip(layers, modules)})


@pytest.mark.filterwarnings("ignore")  # curvlinops' own
@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("pooled", [False, True], ids=["language model", "classifier"])
def test_the_factors_of_a_transformer_are_those_of_curvlinops(sharing, pooled):
    """The language model uses the labels of the data, because the exact Fisher information of curvlinops keeps the
    cross products of different terms of a sample."""
    case = pooled_gpt() if pooled else case_named("gpt-untied")
    net = Transformer(case, pooled=pooled)
    tokens = case.data["tokens"]
    y = case.data["label"] if pooled else tokens[:, 1:]
    linears = {layer for layer in survey(*case).layers if layer.weight.replace(".", "/") in net.linears}
    assert len(linears) == 5
    for fisher in (Fisher.EMPIRICAL, Fisher.EXACT) if pooled else (Fisher.EMPIRICAL,):
        found = curvatures(case, fisher, sharing)
        their = theirs(net, tokens[:, :-1], y, fisher, sharing)
        by_layer = {layer: their["linears." + layer.weight.replace(".", "/")] for layer in linears}
        assert_theirs(found, by_layer)
