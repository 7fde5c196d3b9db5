from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdp import keys, ops, tree
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.execution import Memory
from fdp.gradients.rules import Pair
from fdp.kfac import factors
from fdp.kfac.factor_forms import Form
from fdp.kfac.form_policy import CostModel, auto, everything, plan_forms
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.layers import survey
from fdp.kfac.measure import collect as module
from fdp.kfac.measure.estimator import Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.types import Curvature, Layer, SoftmaxFactor
from fdp.model import Block, LeafSpec, Likelihood, Model, Outputs, from_loss
from fdp.types import FdpError, Flat, Tree
from tests.conftest import CASES, Case, case_named, randn, reference_of
from tests.kfac_cases import PRECISE, added, assert_same, curvatures, matrices, surveyed


def product(curvature: Curvature) -> Tensor:
    assert curvature.left is not None
    assert curvature.right is not None
    return torch.kron(factors.matrix(curvature.left), factors.matrix(curvature.right))


def scores_of(model: Model, params: Flat, data: Tree) -> Tensor:
    """Return the scores (batch, terms, classes)."""
    carry: Tree = ()
    for block in model.blocks[:-1]:
        carry = block.apply(tree.select(params, block.params), carry, data)
    last = model.blocks[-1]
    assert last.outputs is not None
    scores = last.outputs.scores(tree.select(params, last.params), carry, data)
    return scores.reshape(len(scores), -1, scores.shape[-1])


def dense_fisher(case: Case, layer: Layer) -> Tensor:
    """Return ``1/N sum_b sum_t w_bt J^T H J`` of a layer by its definition, for terms of equal weight."""
    model, params, data = case
    flat = tree.flatten(params)
    paths = [path for path in layer if path is not None]

    def scores(own: Flat) -> Tensor:
        return scores_of(model, flat | own, data)

    own = {path: flat[path] for path in paths}
    z = scores(own)
    with sdpa_kernel(SDPBackend.MATH):  # the fused one has no batching rule
        jacobians = torch.func.jacrev(scores)(own)
    parts = [jacobians[path].reshape(*z.shape, flat[layer.weight].shape[0], -1) for path in paths]
    J = torch.cat(parts, -1).flatten(3)  # (batch, terms, classes, rows * columns)
    outputs = model.blocks[-1].outputs
    assert outputs is not None
    p = z.softmax(-1)
    H = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    if outputs.likelihood is Likelihood.SQUARED:
        H = torch.eye(z.shape[-1], dtype=z.dtype).expand_as(H)
    return torch.einsum("btci,btcd,btdj->ij", J, H, J) / z.shape[1] / len(z)


def linear_net(*, tokens: int | None, pooled: bool = False, widths: tuple[int, ...] = (4, 5, 3, 2)) -> Case:
    """Return a deep linear net with biases and a squared loss, on vectors or sequences."""
    leaves, blocks = {}, []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        leaves |= {
            f"{i}.weight": LeafSpec((outputs, inputs), keys.normal),
            f"{i}.bias": LeafSpec((outputs,), keys.normal),
        }
        blocks.append(Block(str(i), {"weight": f"{i}.weight", "bias": f"{i}.bias"}, _linear))

    def loss(p: Tree, carry: Tree, data: Tree) -> Tensor:
        terms = (_linear_scores(p, carry, data, pooled) - data["y"]).square().sum(-1) / 2
        return terms if terms.ndim == 1 else terms.mean(1)

    outputs = Outputs(
        lambda p, carry, data: _linear_scores(p, carry, data, pooled), Likelihood.SQUARED, lambda data: data["y"]
    )
    blocks[-1] = blocks[-1]._replace(apply=loss, outputs=outputs)
    model = Model("linear", leaves, tuple(blocks))
    params = tree.nest({path: randn(*spec.shape, seed=i) for i, (path, spec) in enumerate(leaves.items())})
    shape = (6,) if tokens is None else (6, tokens)
    y = randn(*(shape[:1] if pooled else shape), widths[-1], seed=11)
    return Case(model, params, {"x": randn(*shape, widths[0], seed=12), "y": y})


def _linear(p: Tree, carry: Tree, data: Tree) -> Tensor:
    return ops.linear(carry if isinstance(carry, Tensor) else data["x"], p["weight"], p["bias"])


def _linear_scores(p: Tree, carry: Tree, data: Tree, pooled: bool) -> Tensor:
    z = _linear(p, carry, data)
    return z.mean(1) if pooled else z


# Exact cases


def test_the_product_is_the_fisher_of_a_deep_linear_net_with_squared_loss():
    case = linear_net(tokens=None)
    found = curvatures(case, Fisher.EXACT)
    assert [layer.bias for layer in found] == ["0.bias", "1.bias", "2.bias"]
    for layer, curvature in found.items():
        torch.testing.assert_close(product(curvature), dense_fisher(case, layer), **PRECISE)
    assert_same(found, curvatures(case, Fisher.EXACT, Sharing.REDUCE))  # one place a sample: nothing is shared


def test_expand_is_exact_where_tokens_have_losses_of_their_own():
    case = linear_net(tokens=4)
    for layer, curvature in curvatures(case, Fisher.EXACT).items():
        torch.testing.assert_close(product(curvature), dense_fisher(case, layer), **PRECISE)


def test_reduce_is_exact_where_tokens_are_averaged_before_the_loss():
    case = linear_net(tokens=4, pooled=True)
    found = curvatures(case, Fisher.EXACT, Sharing.REDUCE)
    for layer, curvature in found.items():
        torch.testing.assert_close(product(curvature), dense_fisher(case, layer), **PRECISE)
    expanded = curvatures(case, Fisher.EXACT, Sharing.EXPAND)
    assert all((product(found[layer]) - product(expanded[layer])).abs().max() > 1e-3 for layer in found)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_product_is_the_fisher_of_one_sample_with_cross_entropy(name):
    model, params, data = case_named(name)
    case = Case(model, params, tree.map(lambda leaf: leaf[:1], data))
    found = curvatures(case, Fisher.EXACT)
    exact = [layer for layer in found if name == "mlp" or layer.weight == "head.weight"]
    for layer in exact:
        torch.testing.assert_close(product(found[layer]), dense_fisher(case, layer), **PRECISE)
    assert len(exact) == (3 if name == "mlp" else 1)


@pytest.mark.parametrize("sharing", Sharing)
def test_two_uses_of_a_weight_are_positions_like_tokens(sharing):
    """W x_1 and W x_2: scores of two terms (expand), or their sum as the scores of one (reduce)."""

    def scores(p: Tree, _: Tree, data: Tree) -> Tensor:
        both = [ops.linear(data["x"][:, i], p["weight"], p["bias"]) for i in range(2)]
        return torch.stack(both, 1) if sharing is Sharing.EXPAND else both[0] + both[1]

    def loss(p: Tree, data: Tree) -> Tensor:
        terms = (scores(p, (), data) - data["y"]).square().sum(-1) / 2
        return terms.reshape(len(terms), -1).mean(1)

    params = {"weight": randn(3, 4), "bias": randn(3, seed=2)}
    outputs = Outputs(scores, Likelihood.SQUARED, lambda data: data["y"])
    y = randn(5, 2, 3) if sharing is Sharing.EXPAND else randn(5, 3)
    case = Case(from_loss(loss, params, outputs=outputs), params, {"x": randn(5, 2, 4, seed=4), "y": y})
    found = curvatures(case, Fisher.EXACT, sharing)
    (layer,) = found
    assert layer == Layer("weight", "bias")
    torch.testing.assert_close(product(found[layer]), dense_fisher(case, layer), **PRECISE)


@pytest.mark.parametrize("sharing", Sharing)
def test_uses_in_several_blocks_are_uses_of_one_layer(sharing):
    """A weight, its bias and a scale, each used twice, in one block or in two."""

    def half(p: Tree, h: Tensor) -> Tensor:
        return ops.scale(ops.linear(h, p["weight"], p["bias"]).tanh(), p["scale"])

    def losses(h: Tensor, data: Tree) -> Tensor:
        return (h - data["y"]).square().sum((1, 2))

    params = {"weight": randn(4, 4), "bias": randn(4, seed=2), "scale": randn(4, seed=3)}
    own = {path: path for path in params}
    once = Block("once", own, lambda p, _, data: losses(half(p, half(p, data["x"])), data))
    first = Block("first", own, lambda p, _, data: half(p, data["x"]))
    second = Block("second", own, lambda p, h, data: losses(half(p, h), data))
    data = {"x": randn(5, 2, 4, seed=4), "y": randn(5, 2, 4, seed=5)}
    leaves = {path: LeafSpec(tuple(leaf.shape), keys.normal) for path, leaf in params.items()}
    one, two = (
        curvatures(Case(Model("twice", leaves, blocks), params, data), Fisher.EMPIRICAL, sharing)
        for blocks in ((once,), (first, second))
    )
    assert set(one) == {Layer("weight", "bias"), Layer("scale", None)}
    assert_same(one, two)


def test_small_parameters_have_the_diagonal_of_the_fisher():
    case = case_named("gpt-untied")
    known = surveyed(*case)
    forms = {layer: (Form.DIAGONAL, Form.SKIP) for layer in known.layers if known.is_elementwise(layer)}
    for layer, (left, right) in curvatures(case, Fisher.EXACT, forms=forms).items():
        assert left is not None
        assert right is None
        torch.testing.assert_close(factors.matrix(left).diagonal(), dense_fisher(case, layer).diagonal(), **PRECISE)


def test_a_leaf_used_in_every_way_has_the_squares_of_its_whole_gradient():
    found = curvatures(case_named("all-ways"), Fisher.EMPIRICAL)
    left = found[Layer("w", None)].left
    assert left is not None
    truth = reference_of("all-ways")["w"].flatten(1).square().mean(0)
    torch.testing.assert_close(factors.matrix(left).diagonal(), truth, **PRECISE)


@pytest.mark.parametrize("name", CASES)
def test_small_leaves_have_the_squares_of_their_empirical_gradients_times_the_terms_of_a_sample(name):
    """A mean over T terms has T times the squares of its own gradient; without outputs there is one term."""
    case = case_named(name)
    known = surveyed(*case)
    terms = 1 if known.scores_shape is None else math.prod(known.scores_shape[1:-1])
    small = [layer for layer in known.layers if known.is_elementwise(layer)]
    found = curvatures(case, Fisher.EMPIRICAL, forms={layer: (Form.DIAGONAL, Form.SKIP) for layer in small})
    for layer in small:
        truth = terms * reference_of(name)[layer.weight].flatten(1).square().mean(0)
        torch.testing.assert_close(matrices(found)[layer.weight, "left"].diagonal(), truth, **PRECISE)


# Splits, masks, keys


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("name", CASES)
def test_factors_of_unequal_parts_add_up_to_those_of_the_whole(name, sharing):
    model, params, data = case_named(name)
    whole = curvatures(case_named(name), Fisher.EMPIRICAL, sharing)
    parts = [
        curvatures(Case(model, params, tree.map(lambda leaf, cut=cut: leaf[cut], data)), Fisher.EMPIRICAL, sharing)
        for cut in (slice(0, 1), slice(1, None))
    ]
    together = {layer: added(parts[0][layer], parts[1][layer]) for layer in whole}
    assert_same(together, whole)


@pytest.mark.parametrize("fisher", [Fisher.EMPIRICAL, Fisher.SAMPLED])
@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("name", ["gpt", "mlp", "cnn"])
def test_a_masked_sample_is_in_no_factor_whatever_it_holds(name, sharing, fisher):
    model, params, data = case_named(name)
    shorter = Case(model, params, tree.map(lambda leaf: leaf[:2], data))
    if fisher is Fisher.SAMPLED:  # the same draws for the same samples
        longer = data
    else:
        longer = tree.map(lambda leaf: torch.cat([leaf[:2], _garbage(leaf[2:])]), data)
    found = curvatures(Case(model, params, longer), fisher, sharing, mask=torch.tensor([1.0, 1.0, 0.0]))
    assert_same(found, curvatures(shorter, fisher, sharing))
    empty = curvatures(Case(model, params, longer), fisher, sharing, mask=torch.zeros(3))
    for curvature in empty.values():
        for side in curvature:
            assert side is None or float(side.weight) == 0.0
            assert side is None or not factors.to_dense(side).total.any()


def _garbage(leaf: Tensor) -> Tensor:
    return torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else leaf


@pytest.mark.parametrize("sharing", Sharing)
def test_padding_is_in_no_factor(sharing):
    """A sample with its last tokens padding has the factors of the shorter sample."""

    def embed(p: Tree, _: Tree, data: Tree) -> Tensor:
        return ops.embedding(data["tokens"], p["table"])

    def scores(p: Tree, h: Tensor, data: Tree) -> Tensor:
        return ops.linear(h, p["weight"], p["bias"])

    def weights(data: Tree) -> Tensor:
        return data["present"] / data["present"].sum(1, keepdim=True)

    def loss(p: Tree, h: Tensor, data: Tree) -> Tensor:
        logs = scores(p, h, data).log_softmax(2).gather(2, data["y"].unsqueeze(2)).squeeze(2)
        return -(weights(data) * logs).sum(1)

    outputs = Outputs(
        scores,
        Likelihood.SOFTMAX,
        lambda data: data["y"],
        weights,
        weight="weight",
        present=lambda data: data["present"],
    )
    leaves = {path: LeafSpec((), keys.normal) for path in ("table", "weight", "bias")}
    blocks = (
        Block("embed", {"table": "table"}, embed),
        Block("head", {"weight": "weight", "bias": "bias"}, loss, outputs=outputs),
    )
    params = {"table": randn(5, 3), "weight": randn(4, 3, seed=2), "bias": randn(4, seed=3)}
    leaves = {path: LeafSpec(tuple(leaf.shape), keys.normal) for path, leaf in params.items()}
    model = Model("padded", leaves, blocks)
    tokens = torch.tensor([[0, 1, 4, 4, 2], [3, 3, 1, 0, 0]])
    y = torch.tensor([[0, 1, 2, 3, 3], [1, 1, 0, 2, 2]])
    present = torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.float64)
    for fisher in (Fisher.EMPIRICAL, Fisher.EXACT):
        found = curvatures(Case(model, params, {"tokens": tokens, "y": y, "present": present}), fisher, sharing)
        parts = []
        for b, length in ((0, 5), (1, 3)):
            data = {"tokens": tokens[b : b + 1, :length], "y": y[b : b + 1, :length]}
            parts.append(
                curvatures(Case(model, params, data | {"present": present[b : b + 1, :length]}), fisher, sharing)
            )
        assert_same(found, {layer: added(parts[0][layer], parts[1][layer]) for layer in found})
    wrong = model._replace(blocks=(blocks[0], blocks[1]._replace(outputs=outputs._replace(present=_seven))))
    data = {"tokens": tokens, "y": y, "present": present}
    with pytest.raises(FdpError, match=r"expected a weight used at 1 or 7 positions.*got 5"):
        curvatures(Case(wrong, params, data), Fisher.EMPIRICAL, sharing)


def _seven(data: Tree) -> Tensor:
    return torch.ones(2, 7)


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_the_sampled_fisher_tends_to_the_exact_one_and_is_a_function_of_its_key(name, sharing):
    model, params, data = case_named(name)
    one = Case(model, params, tree.map(lambda leaf: leaf[:1], data))
    exact = matrices(curvatures(one, Fisher.EXACT, sharing))
    many = Case(model, params, tree.map(lambda leaf: leaf[:1].expand(4000, *leaf.shape[1:]), data))
    sampled = matrices(curvatures(many, Fisher.SAMPLED, sharing))
    for where, matrix in exact.items():
        error = (sampled[where] - matrix).norm() / matrix.norm()
        assert error < 0.12, f"{where}: {error}"
    assert_same(curvatures(one, Fisher.SAMPLED, sharing), curvatures(one, Fisher.SAMPLED, sharing), rtol=0, atol=0)
    other = matrices(curvatures(one, Fisher.SAMPLED, sharing, key=keys.key(6)))
    mine = matrices(curvatures(one, Fisher.SAMPLED, sharing))
    assert any((other[where] != mine[where]).any() for where in mine)


# Forms


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("name", ["gpt-untied", "llama", "cnn"])
def test_every_form_stands_for_the_same_matrix(name, sharing):
    case = case_named(name)
    known = surveyed(*case)
    full = curvatures(case, Fisher.EMPIRICAL, sharing)
    pairs = [layer for layer in known.layers if not known.is_elementwise(layer)]
    columns = curvatures(
        case, Fisher.EMPIRICAL, sharing, forms={layer: (Form.COLUMNS, Form.COLUMNS) for layer in pairs}
    )
    assert_same(columns, {layer: full[layer] for layer in pairs})
    diagonal = curvatures(
        case, Fisher.EMPIRICAL, sharing, forms={layer: (Form.DIAGONAL, Form.DIAGONAL) for layer in pairs}
    )
    for where, matrix in matrices(diagonal).items():
        torch.testing.assert_close(matrix, matrices(full)[where].diagonal().diag(), **PRECISE)
    skipped = curvatures(case, Fisher.EMPIRICAL, sharing, forms={layer: (Form.SKIP, Form.DENSE) for layer in pairs})
    assert all(curvature.left is None for curvature in skipped.values())
    assert_same(skipped, {layer: full[layer]._replace(left=None) for layer in pairs})
    nothing = curvatures(case, Fisher.EMPIRICAL, sharing, forms={layer: (Form.SKIP, Form.SKIP) for layer in pairs})
    assert set(nothing.values()) == {Curvature(None, None)}


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("name", ["gpt-untied", "llama", "mlp"])
def test_the_softmax_form_of_a_head_is_its_exact_fisher(name, sharing):
    case = case_named(name)
    layer = next(layer for layer in survey(*case).layers if layer.weight == "head.weight")
    exact = curvatures(case, Fisher.EXACT, sharing, forms={layer: (Form.DENSE, Form.DENSE)})
    for fisher in (Fisher.EMPIRICAL, Fisher.SAMPLED):
        found = curvatures(case, fisher, sharing, forms={layer: (Form.SOFTMAX, Form.DENSE)})
        assert isinstance(found[layer].left, SoftmaxFactor)
        assert_same(found, exact)
    mask = torch.tensor([1.0, 0.0, 1.0])
    assert_same(
        curvatures(case, Fisher.SAMPLED, sharing, forms={layer: (Form.SOFTMAX, Form.SKIP)}, mask=mask),
        curvatures(case, Fisher.EXACT, sharing, forms={layer: (Form.DENSE, Form.SKIP)}, mask=mask),
    )


def test_an_embedding_counts_its_tokens_and_is_exact():
    case = case_named("gpt-untied")
    layer = Layer("embed.tokens", None)
    found = curvatures(case, Fisher.EMPIRICAL, forms={layer: (Form.DENSE, Form.DENSE)})
    left = found[layer].left
    assert left is not None
    counts = torch.bincount(case.data["tokens"][:, :-1].flatten(), minlength=7).double()
    torch.testing.assert_close(factors.matrix(left), (counts / 15).diag(), **PRECISE)


@pytest.mark.parametrize("policy", [everything(), auto(rho=1e9)])
@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("name", ["gpt", "gpt-untied"])
def test_the_chosen_form_of_an_embeddings_left_side_is_exact(name, sharing, policy):
    """With reduce, the shares of a sample's tokens have products that a diagonal would drop."""
    case = case_named(name)
    layer = Layer("embed.tokens", None)
    known = surveyed(*case)
    costs = CostModel(Via.CHOLESKY, factor_period=10, inverse_period=10)
    rows = plan_forms(case.model, known, policy=policy, sharing=sharing, samples=3, costs=costs)
    rows = {row.layer: row for row in rows}
    chosen = rows[layer].left, rows[layer].right
    fisher = Fisher.EXACT if chosen[0] is Form.SOFTMAX else Fisher.EMPIRICAL
    dense = curvatures(case, fisher, sharing, forms={layer: (Form.DENSE, Form.DENSE)})
    found = matrices(curvatures(case, Fisher.EMPIRICAL, sharing, forms={layer: chosen}))
    torch.testing.assert_close(found["embed.tokens", "left"], matrices(dense)["embed.tokens", "left"], **PRECISE)
    off_diagonal = found["embed.tokens", "left"] - found["embed.tokens", "left"].diagonal().diag()
    assert (chosen[0] is Form.DIAGONAL) == (not off_diagonal.any())


@pytest.mark.parametrize("sharing", Sharing)
def test_an_embedding_tied_to_a_head_has_the_mean_of_left_sides_and_the_sum_of_right_ones(sharing):
    tied = case_named("gpt")
    flat = tree.flatten(tied.params)
    leaves = tied.model.leaves | {"own": tied.model.leaves["embed.tokens"]}
    last = tied.model.blocks[-1]
    model = tied.model._replace(
        leaves=leaves, blocks=(*tied.model.blocks[:-1], last._replace(params=last.params | {"weight": "own"}))
    )
    apart = Case(model, tied.params | {"own": flat["embed.tokens"]}, tied.data)
    both = Layer("embed.tokens", None)
    for fisher in (Fisher.EMPIRICAL, Fisher.EXACT):
        full = (Form.DENSE, Form.DENSE)
        one = curvatures(tied, fisher, sharing, forms={both: full})[both]
        two = curvatures(apart, fisher, sharing, forms={both: full, Layer("own", None): full})
        sides = [
            (matrices({layer: two[layer]})[layer.weight, side])
            for layer in (both, Layer("own", None))
            for side in ("left", "right")
        ]
        found = matrices({both: one})
        torch.testing.assert_close(found["embed.tokens", "left"], (sides[0] + sides[2]) / 2, **PRECISE)
        torch.testing.assert_close(found["embed.tokens", "right"], sides[1] + sides[3], **PRECISE)
        for matrix in found.values():
            assert torch.equal(matrix, matrix.mT)
            assert float(torch.linalg.eigvalsh(matrix).min()) > -1e-12
    dense = curvatures(tied, Fisher.EXACT, sharing, forms={both: (Form.DENSE, Form.SKIP)})
    if sharing is Sharing.REDUCE:  # a sample's tokens together are a column, and no diagonal
        columns = curvatures(tied, Fisher.EXACT, sharing, forms={both: (Form.COLUMNS, Form.SKIP)})
        assert_same(columns, dense)
        return
    softmax = curvatures(tied, Fisher.SAMPLED, sharing, forms={both: (Form.SOFTMAX, Form.SKIP)})
    assert isinstance(softmax[both].left, SoftmaxFactor)
    assert_same(softmax, dense)


def test_forms_that_a_layer_cannot_have_are_refused_by_name():
    def attempt(name: str, layer: Layer, *forms: Form, sharing: Sharing = Sharing.EXPAND) -> Callable[[], Any]:
        return lambda: curvatures(case_named(name), Fisher.EMPIRICAL, sharing, forms={layer: (forms[0], forms[1])})

    kernel, tokens = Layer("kernel", "bias"), Layer("embed.tokens", None)
    refused = {
        r"kernel: expected diagonal or skip on both sides": attempt("convolutions", kernel, Form.DENSE, Form.SKIP),
        r"head\.norm: expected the forms \(diagonal, skip\)": attempt(
            "gpt", Layer("head.norm", None), Form.DENSE, Form.SKIP
        ),
        r"embed\.tokens: expected softmax, diagonal, skip or dense on the left of an embedding tied": attempt(
            "gpt", tokens, Form.COLUMNS, Form.DENSE
        ),
        r"embed\.tokens: expected columns, dense, diagonal or skip.*--kfac-sharing": attempt(
            "gpt", tokens, Form.SOFTMAX, Form.DENSE, sharing=Sharing.REDUCE
        ),
        r"forms: expected layers of": attempt("gpt", Layer("blocks.0.qkv", None), Form.DENSE, Form.DENSE),
        r"blocks\.0\.qkv: expected the form softmax": attempt(
            "gpt", Layer("blocks.0.qkv", "blocks.0.qkv_bias"), Form.SOFTMAX, Form.DENSE
        ),
        r"head\.weight: expected the form softmax": attempt(
            "llama", Layer("head.weight", None), Form.DENSE, Form.SOFTMAX
        ),
        r"line: expected the form softmax.*Outputs\.weight": attempt(
            "convolutions", Layer("line", None), Form.SOFTMAX, Form.DENSE
        ),
    }
    for message, call in refused.items():
        with pytest.raises(FdpError, match=message):
            call()
    attempt("gpt", tokens, Form.COLUMNS, Form.DENSE, sharing=Sharing.REDUCE)()
    with pytest.raises(FdpError, match=r"mask: expected shape \(3,\)"):
        curvatures(case_named("mlp"), Fisher.EMPIRICAL, mask=torch.ones(4))


# The pass itself


@pytest.mark.parametrize("fisher", [Fisher.EMPIRICAL, Fisher.SAMPLED])
@pytest.mark.parametrize("memory", [Memory(recompute=True), Memory(refetch=True)], ids=["recompute", "refetch"])
def test_recomputing_or_refetching_blocks_does_not_change_factors(memory, fisher):
    case = case_named("gpt")
    assert_same(curvatures(case, fisher, memory=memory), curvatures(case, fisher))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fisher"),
    [
        ("mlp", Fisher.SAMPLED),
        *[pytest.param(name, fisher, marks=pytest.mark.slow) for name in ("cnn", "gpt") for fisher in Fisher],
    ],
)
def test_compiled_blocks_give_the_same_factors_and_each_kind_is_compiled_once(name, fisher):
    case, blocks = case_named(name), CompiledRunner("aot_eager")
    found = curvatures(case, fisher, runner=blocks)
    kinds = len(blocks.kinds)
    assert_same(found, curvatures(case, fisher))
    assert_same(curvatures(case, fisher, runner=blocks), found)
    assert len(blocks.kinds) == kinds


def test_only_the_records_of_one_block_are_alive(monkeypatch):
    alive: list[int] = []
    refs: list[weakref.ref] = []
    real = module.backward

    def watched(*args: Any, **kwargs: Any) -> Iterator:
        for i, found in real(*args, **kwargs):
            alive.append(sum(ref() is not None for ref in refs))
            pairs = [record for records in found.values() for record in records if isinstance(record, Pair)]
            refs.extend(weakref.ref(pair.right) for pair in pairs)
            del pairs
            yield i, found

    monkeypatch.setattr(module, "backward", watched)
    curvatures(case_named("gpt-untied"), Fisher.EMPIRICAL)
    assert len(refs) == 6
    assert alive == [0] * 3


def test_half_precision_rows_are_added_up_in_float32():
    case = case_named("gpt-untied")
    full, half = curvatures(case, Fisher.EMPIRICAL), curvatures(case, Fisher.EMPIRICAL, dtype=torch.bfloat16)
    for curvature in half.values():
        for side in (side for side in curvature if side is not None):
            assert factors.to_dense(side).total.dtype == torch.float32
            assert side.weight.dtype == torch.float32
    exact = matrices(full)
    for where, matrix in matrices(half).items():
        assert (matrix.double() - exact[where]).norm() < 0.1 * exact[where].norm(), where


def test_frozen_leaves_are_in_no_layer_and_their_bias_is_a_layer():
    model, params, data = case_named("mlp")
    frozen = model._replace(frozen=frozenset({"layers.0.weight", "head.bias"}))
    assert survey(frozen, params, data).layers == (
        Layer("layers.0.bias", None),
        Layer("layers.1.weight", "layers.1.bias"),
        Layer("head.weight", None),
    )
    found = curvatures(Case(frozen, params, data), Fisher.EXACT)
    full = curvatures(case_named("mlp"), Fisher.EXACT)
    torch.testing.assert_close(
        matrices(found)["head.weight", "right"], matrices(full)["head.weight", "right"][:-1, :-1], **PRECISE
    )
