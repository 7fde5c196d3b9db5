"""Factors of other kinds of layers: transposed weights, padding, and leaves of more than two dims."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fdp import keys, models, ops, tree
from fdp.foreign.hub.causal import causal_lm
from fdp.foreign.hub.classification import classifier
from fdp.foreign.leaves import params_of
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.linear_maps import GroupedMap, LowRankMap, Sides
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.precondition import check_sides, map_record
from fdp.kfac import Fisher, Form, KfacConfig, Sharing, everything, kfac, plan_forms, survey
from fdp.kfac.form_policy import CostModel, auto, forms_of
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.private.public_data import Public
from fdp.kfac.private.refresh import private_kfac, refresh_public, sides_of
from fdp.model import Likelihood, Model, Outputs, from_loss
from fdp.models.language import present_of
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import Tree
from tests import foreign_cases
from tests.conftest import Case, randn
from tests.kfac_cases import added, assert_same, curvatures, matrices

KEY = keys.key(8)


# Which side


def net(*, turned: bool) -> Case:
    """Return two square layers with biases, as ``x W^T + b`` or as ``x W + b``."""
    op = ops.matmul if turned else ops.linear

    def scores(p: Tree, _: Tree, data: Tree) -> Tensor:
        return op(op(data["x"], p["a"], p["a_bias"]).tanh(), p["b"], p["b_bias"])

    def loss(p: Tree, data: Tree) -> Tensor:
        return (scores(p, (), data) - data["y"]).square().sum(-1).mean(1) / 2

    outputs = Outputs(scores, Likelihood.SQUARED, lambda data: data["y"])
    weights = {name: randn(4, 4, seed=seed) for seed, name in enumerate("ab")}
    params = {name: w.t().contiguous() if turned else w for name, w in weights.items()}
    params |= {f"{name}_bias": randn(4, seed=9) for name in "ab"}
    data = {"x": randn(3, 5, 4, seed=3), "y": randn(3, 5, 4, seed=4)}
    return Case(from_loss(loss, params, outputs=outputs), params, data)


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("fisher", Fisher)
def test_a_transposed_layer_has_its_sides_swapped(fisher: Fisher, sharing: Sharing) -> None:
    straight, turned = (net(turned=way) for way in (False, True))
    assert [layer.bias for layer in survey(*straight).layers] == ["a_bias", "b_bias"]
    assert [layer.bias for layer in survey(*turned).layers] == [None] * 4  # a bias is no column of W, but a row
    one, other = (matrices(curvatures(case, fisher, sharing)) for case in (straight, turned))
    for name in "ab":
        torch.testing.assert_close(other[name, "right"], one[name, "left"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(other[name, "left"], one[name, "right"][:-1, :-1], rtol=1e-10, atol=1e-12)


def test_columns_of_a_transposed_layer_fit_their_slots() -> None:
    """With the exact Fisher information, the gradients' side has a column per pass and the inputs' side one for all."""
    model, params, data = net(turned=True)
    config = KfacConfig(fisher=Fisher.EXACT, policy=auto(rho=1e9), damping=0.1, column_dtype=None)
    k = kfac(model, data, learning_rate=0.1, config=config, dtype=torch.float64)
    mechanism = Mechanism(poisson(3, expected_batch_size=3), clipping.flat(max_norm=1.0), 0.0)
    state = k.refresh(init_state(model, params, k.optimizer, mechanism), data, torch.ones(3), KEY, 0)
    assert int(next(part for part in state.opt if hasattr(part, "failures")).failures) == 0


# Which tokens


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 0, 0], [2, 7, 1, 8, 2, 0, 0]])
COUNTED = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]) > 0
PADDED = {"tokens": TOKENS, "loss_mask": COUNTED}


def test_tokens_count_up_to_the_last_counted_target() -> None:
    assert present_of({"tokens": TOKENS}) is None
    expected = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]  # the prompt of the second is read
    found = present_of(PADDED)
    assert found is not None
    assert found.int().tolist() == expected
    segments = torch.tensor([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0], [1, 1, 2, 2, 2, 0]])
    counted = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]]) > 0
    packed = {"tokens": TOKENS, "loss_mask": counted, "segments": segments}
    found = present_of(packed)
    assert found is not None
    assert found.int().tolist() == [[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]]
    windows = present_of({name: leaf.unsqueeze(0) for name, leaf in packed.items()})
    assert windows is not None
    assert torch.equal(windows, found.flatten().unsqueeze(0))


def language_models() -> dict[str, Any]:
    def gpt2() -> tuple[Model, Tree]:
        foreign = foreign_cases.case_named("gpt2")
        model = causal_lm(foreign.module, context=6, example=PADDED)
        return model, params_of(foreign.module, model)

    def own() -> tuple[Model, Tree]:
        model = models.llama(
            models.LlamaConfig(layers=1, width=8, heads=2, key_heads=2, hidden=12, context=6, vocab_size=13)
        )
        return model, model.init(keys.key(2), dtype=torch.float64)

    return {"gpt2": gpt2, "own": own}


@pytest.mark.parametrize("name", language_models())
@pytest.mark.parametrize("sharing", Sharing)
def test_padding_of_a_language_model_is_in_no_factor(name: str, sharing: Sharing) -> None:
    """A row that ends in padding, or in a prompt that is not predicted, has the factors of the row without its end."""
    model, params = language_models()[name]()
    found = curvatures(Case(model, params, PADDED), Fisher.EMPIRICAL, sharing)
    parts = []
    for b, length in ((0, 6), (1, 4), (2, 4)):
        row = {"tokens": TOKENS[b : b + 1, : length + 1], "loss_mask": COUNTED[b : b + 1, :length]}
        parts.append(curvatures(Case(model, params, row), Fisher.EMPIRICAL, sharing))
    shared = [layer for layer in found if layer in parts[1]]
    positions = {layer for layer in found if "position" in layer.weight or "wpe" in layer.weight}
    total = {layer: added(added(parts[0][layer], parts[1][layer]), parts[2][layer]) for layer in shared}
    assert len(shared) == len(found)
    keep = {layer for layer in shared if layer not in positions}
    assert_same({layer: found[layer] for layer in keep}, {layer: total[layer] for layer in keep}, rtol=1e-9, atol=1e-12)
    # What a padded token holds is in nothing.
    other = PADDED | {"tokens": torch.where(torch.arange(7) < torch.tensor([[7], [5], [5]]), TOKENS, 11)}
    assert_same(curvatures(Case(model, params, other), Fisher.EMPIRICAL, sharing), found, rtol=1e-9, atol=1e-12)


def test_padding_of_a_classifier_is_in_no_factor() -> None:
    foreign = foreign_cases.case_named("bert")
    tokens, mask = torch.tensor([[3, 1, 4, 0, 0], [6, 5, 3, 5, 8]]), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    data = {"tokens": tokens, "mask": mask, "label": torch.tensor([0, 1])}
    model = classifier(foreign.module, example=data)
    params = params_of(foreign.module, model)
    found = curvatures(Case(model, params, data), Fisher.EMPIRICAL)
    other = data | {"tokens": torch.where(mask > 0, tokens, 9)}
    assert_same(curvatures(Case(model, params, other), Fisher.EMPIRICAL), found, rtol=1e-9, atol=1e-12)


# Leaves of three dims


def trained(name: str, *, private: bool) -> tuple[Any, Any, Any]:
    """Measure and step K-FAC once on a foreign case."""
    foreign = foreign_cases.case_named(name)
    model, params = foreign_cases.model_named(name)
    data, size = foreign.data, len(foreign.data["label"])
    config = KfacConfig(damping=0.1, fisher=Fisher.EMPIRICAL, policy=everything())
    make = (lambda *a, **o: private_kfac(*a, largest=64, **o)) if private else kfac
    k = make(model, data, learning_rate=0.1, config=config, dtype=torch.float64)
    sampling = poisson(size, expected_batch_size=size)
    mechanism = without_noise(sampling, clipping.flat(max_norm=0.01))
    state = k.place(init_state(model, params, k.optimizer, mechanism))
    if private:
        state = refresh_public(k, state, Public(Same(data), "-"), KEY, 0)
    else:
        state = k.refresh(state, data, torch.ones(size), KEY, 0)
    plan = make_plan(model, params, data, method=Method.GHOST_BK if private else Method.NONE, dtype=torch.float64)
    step = make_train_step(
        model, k.optimizer, mechanism=mechanism, plan=plan, precondition=sides_of if private else None
    )
    whole = tree.map(lambda leaf: leaf.unsqueeze(0), data)
    batch = trusted_batch(whole, torch.ones(1, size), sampling, step=0)
    return k, state, step(state, batch, KEY)[0]


class Same:
    """A dataset of one batch."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["label"])

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return {name: leaf[torch.as_tensor(indices)] for name, leaf in self.data.items()}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("name", ["experts", "routed"])
def test_a_mixture_of_experts_is_preconditioned(name: str, private: bool) -> None:
    k, state, after = trained(name, private=private)
    before, now = tree.flatten(state.params), tree.flatten(after.params)
    for path, leaf in before.items():
        assert bool(now[path].isfinite().all())
        assert not torch.equal(now[path], leaf), path
    forms = {row.layer.weight: (row.left, row.right) for row in k.plan.rows}
    both = (Form.DIAGONAL, Form.DIAGONAL) if name == "experts" else (Form.DIAGONAL, Form.SKIP)
    assert forms["down"] == both
    assert forms["up"] == (Form.DIAGONAL, Form.SKIP)  # its dims are no rows above columns, or it is made whole


def test_every_expert_has_inputs_of_its_own() -> None:
    """Left: each expert's squared inputs; right: each expert's squared output gradients."""
    foreign = foreign_cases.case_named("experts")
    model, params = foreign_cases.model_named("experts")
    known = survey(model, params, foreign.data, dtype=torch.float64)
    shapes = {layer.weight: known.shapes[layer] for layer in known.layers}
    assert (shapes["up"], shapes["down"]) == ((2 * 6 * 7, 1), (2 * 7, 6))  # the dims of one are inputs between outputs
    rows = plan_forms(
        model,
        known,
        policy=everything(),
        sharing=Sharing.EXPAND,
        samples=3,
        costs=CostModel(Via.CHOLESKY, factor_period=1, inverse_period=1),
    )
    case = Case(model, params, foreign.data)
    found = matrices(curvatures(case, Fisher.EMPIRICAL, forms=forms_of(rows)))
    x, p = foreign.data["x"], tree.flatten(params)
    hidden = torch.einsum("btd,edf->btef", x, p["up"]).tanh()
    left = hidden.square().sum((0, 1)).flatten() / 5 / 3
    torch.testing.assert_close(found["down", "left"].diagonal(), left, rtol=1e-10, atol=1e-12)
    share = torch.func.functional_call(foreign.module, p, (x,))  # its scores
    gradient = share.softmax(-1) - torch.nn.functional.one_hot(foreign.data["label"], 3)
    routed = torch.nn.functional.linear(x, p["router.weight"], p["router.bias"]).softmax(-1)
    of_mean = gradient @ p["head.weight"] / 5  # of every token's output
    g = routed.unsqueeze(-1) * of_mean[:, None, None, :]
    right = g.square().sum((0, 1)).flatten() / 3
    torch.testing.assert_close(found["down", "right"].diagonal(), right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("method", [Method.GHOST, Method.GHOST_BK, Method.MATERIALIZE])
def test_preconditioned_experts_are_clipped_after_the_map(method: Method, by_group: bool) -> None:
    foreign = foreign_cases.case_named("experts")
    model, params = foreign_cases.model_named("experts")
    truth = foreign_cases.gradients_named("experts")

    def diagonal(n: int, seed: int) -> LowRankMap:
        return LowRankMap(1 + randn(n, seed=seed).abs(), torch.zeros(n, 0).double(), torch.zeros(0, 0).double())

    sides = {"up": Sides(diagonal(84, 1), None), "down": Sides(diagonal(14, 2), diagonal(6, 3))}
    if by_group:
        groups = (GroupedMap(1 + randn(2, n, seed=n).abs()) for n in (7, 6))
        sides["down"] = Sides(*groups)
    check_sides(sides, model)
    plan = make_plan(model, params, foreign.data, method=method, dtype=torch.float64)
    _, norms, stash = per_sample_norms(
        model, params, foreign.data, plan=plan, transform=lambda path, record: map_record(sides, path, record)
    )
    mapped = dict(truth)
    for path, (left, right) in sides.items():
        assert isinstance(left, LowRankMap | GroupedMap)
        flat = truth[path].reshape(len(truth[path]), left.diagonal.numel(), -1) * left.diagonal.flatten()[:, None]
        flat = flat * right.diagonal if isinstance(right, LowRankMap) else flat
        flat = flat * right.diagonal.repeat_interleave(7, 0) if isinstance(right, GroupedMap) else flat
        mapped[path] = flat.reshape(truth[path].shape)
    for path, square in norms.squared.items():
        torch.testing.assert_close(square, mapped[path].flatten(1).square().sum(1), rtol=1e-9, atol=1e-12, msg=path)
    whole = torch.cat([g.flatten(1) for g in mapped.values()], 1).norm(dim=1)
    factor = (0.1 / whole).clamp(max=1)
    assert bool((factor < 1).all())
    total = clipped_sum(stash, clipping.clip_to(norms, max_norm=0.1))
    for path, value in total.value.items():
        torch.testing.assert_close(value, torch.einsum("b,b...->...", factor, mapped[path]), rtol=1e-6, atol=1e-9)
