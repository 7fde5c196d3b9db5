from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import keys, ops
from fdp.kfac.measure.fisher import (
    PROBABILITY_PARTS,
    Fisher,
    check_outputs,
    draw_labels,
    passes,
    surrogate,
    with_numbers,
)
from fdp.model import Likelihood, Model, Outputs, from_loss
from fdp.types import FdpError, Tree
from tests.conftest import CASES, case_named, randn

KEY = keys.key(3)
BATCH, TERMS, CLASSES = 2, 3, 4


def _scores(p: Tree, _: Tree, data: Tree) -> Tensor:
    return ops.add(data["z"], p["shift"])


def _model(likelihood: Likelihood) -> Model:
    """Return a model whose scores are data plus a parameter, in three terms of unequal weight."""

    def weights(data: Tree) -> Tensor:
        return data["w"]

    def loss(p: Tree, data: Tree) -> Tensor:
        z = _scores(p, (), data)
        if likelihood is Likelihood.SQUARED:
            return (data["w"] * (z - data["y"]).square().sum(2) / 2).sum(1)
        picked = z.log_softmax(2).gather(2, data["y"].unsqueeze(2)).squeeze(2)
        return -(data["w"] * picked).sum(1)

    params = {"shift": randn(TERMS, CLASSES, seed=3)}
    return from_loss(loss, params, outputs=Outputs(_scores, likelihood, lambda data: data["y"], weights))


def _data(likelihood: Likelihood) -> Tree:
    w = torch.tensor([[0.5, 0.0, 2.0], [1.0, 0.25, 0.125]], dtype=torch.float64)
    y = torch.tensor([[0, 3, 1], [2, 2, 0]]) if likelihood is Likelihood.SOFTMAX else randn(BATCH, TERMS, CLASSES)
    return {"z": randn(BATCH, TERMS, CLASSES, seed=9), "w": w, "y": y}


def _gradients(likelihood: Likelihood, fisher: Fisher, key: Tensor = KEY) -> Tensor:
    """Return the gradient of the surrogate losses at the scores (passes, batch, terms, classes)."""
    model, data = _model(likelihood), _data(likelihood)
    params = {"shift": torch.zeros(TERMS, CLASSES, dtype=torch.float64)}
    found = []
    for numbers in _passes(model, fisher, (BATCH, TERMS, CLASSES), key):

        def total(z: Tensor, numbers: Tensor | None = numbers) -> Tensor:
            return surrogate(model, fisher).loss(params, with_numbers(data | {"z": z}, numbers)).sum()

        found.append(torch.func.grad(total)(data["z"]))
    return torch.stack(found)


def _passes(
    model: Model, fisher: Fisher, shape: tuple[int, ...], key: Tensor, rank: int = 0, ranks: int = 1
) -> list[Any]:
    cpu = torch.device("cpu")
    return list(passes(model, fisher, shape, key=key, rank=rank, ranks=ranks, dtype=torch.float64, device=cpu))


def _hessians(likelihood: Likelihood) -> Tensor:
    """Return ``w_bt H_bt`` (batch, terms, classes, classes)."""
    data = _data(likelihood)
    p = data["z"].softmax(2)
    softmax = torch.diag_embed(p) - p.unsqueeze(3) * p.unsqueeze(2)
    hessians = softmax if likelihood is Likelihood.SOFTMAX else torch.eye(CLASSES).double().expand_as(softmax)
    return data["w"][:, :, None, None] * hessians


@pytest.mark.parametrize("likelihood", Likelihood)
def test_the_exact_gradients_multiply_to_the_hessian_of_the_terms_and_terms_do_not_mix(likelihood):
    g = _gradients(likelihood, Fisher.EXACT)
    assert len(g) == TERMS * CLASSES
    products = torch.einsum("ibtc,ibsd->btcsd", g, g)
    for t in range(TERMS):
        torch.testing.assert_close(products[:, t, :, t], _hessians(likelihood)[:, t], rtol=1e-12, atol=1e-14)
        for s in range(TERMS):
            assert s == t or not products[:, t, :, s].any()


@pytest.mark.parametrize("likelihood", Likelihood)
def test_the_empirical_gradients_are_those_of_the_terms_times_the_roots_of_their_weights(likelihood):
    (g,) = _gradients(likelihood, Fisher.EMPIRICAL)
    data = _data(likelihood)
    if likelihood is Likelihood.SQUARED:
        terms = data["z"] - data["y"]
    else:
        terms = data["z"].softmax(2) - torch.nn.functional.one_hot(data["y"], CLASSES)
    torch.testing.assert_close(g, data["w"].sqrt().unsqueeze(2) * terms, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("likelihood", Likelihood)
def test_the_sampled_gradients_are_of_mean_zero_and_multiply_to_the_hessian_on_average(likelihood):
    draws = [keys.fold_in(KEY, i) for i in range(600)]
    g = torch.cat([_gradients(likelihood, Fisher.SAMPLED, key) for key in draws])
    scale = _hessians(likelihood).amax()
    assert (g.mean(0).abs() < 4 * (scale / len(draws)).sqrt()).all()
    products = torch.einsum("ibtc,ibtd->btcd", g, g) / len(draws)
    assert ((products - _hessians(likelihood)).abs() < 0.2 * scale).all()
    torch.testing.assert_close(g[0], _gradients(likelihood, Fisher.SAMPLED, draws[0])[0], rtol=0, atol=0)
    assert (g[0] != g[1]).any()


@pytest.mark.parametrize("likelihood", Likelihood)
def test_ranks_draw_what_one_process_would_draw_of_all_their_samples(likelihood):
    model = _model(likelihood)
    (whole,) = _passes(model, Fisher.SAMPLED, (6, TERMS, CLASSES), KEY)
    parts = [_passes(model, Fisher.SAMPLED, (2, TERMS, CLASSES), KEY, rank, 3)[0] for rank in range(3)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.shape == ((6, TERMS) if likelihood is Likelihood.SOFTMAX else (6, TERMS, CLASSES))


def test_labels_are_drawn_as_often_as_they_are_likely_and_never_where_they_are_impossible():
    scores = torch.tensor([-torch.inf, 0.3, -1.0, -torch.inf, 2.0, -torch.inf], dtype=torch.float64)
    uniform = (torch.arange(10_000) + 0.5).double() / 10_000
    labels = draw_labels(scores.expand(10_000, 6), uniform)
    torch.testing.assert_close(torch.bincount(labels, minlength=6) / 1e4, scores.softmax(0).float(), atol=2e-4, rtol=0)
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert draw_labels(scores.expand(2, 6), ends).tolist() == [1, 4]
    narrow = draw_labels(scores.float().expand(2, 6), torch.tensor([0.0, 1 - 2.0**-24]))
    assert narrow.tolist() == [1, 4]
    assert draw_labels(scores.expand(1, 6), torch.ones(1)).tolist() == [4]
    assert draw_labels(torch.full((2, 6), torch.nan), torch.tensor([0.0, 0.9])).tolist() == [0, 0]
    halves = torch.tensor([0.25, 0.25, 0.0, 0.5]).log()  # a number that falls on the end of a class, and of a run
    assert draw_labels(halves.expand(3, 4), torch.tensor([0.25, 0.5, 0.75])).tolist() == [1, 3, 3]


@pytest.mark.parametrize("classes", [1, 2, 3, 4, 9, 10, 17, 100, 1003])
def test_the_label_is_the_first_at_which_the_cumulated_parts_exceed_the_number(classes):
    """The search in two stages over exact integer sums finds the same label."""
    random = torch.Generator().manual_seed(classes)
    scores = 3 * torch.randn(4, 50, classes, generator=random)
    scores[1, :, 1::3] = -torch.inf
    uniform = torch.rand(4, 50, generator=random)
    uniform[2, 0], uniform[2, 1] = 0.0, 1.0
    cumulated = (scores.softmax(-1) * PROBABILITY_PARTS).round().long().cumsum(-1)
    drawn = (uniform.double() * cumulated[..., -1]).long().clamp_max(cumulated[..., -1] - 1)
    assert torch.equal(draw_labels(scores, uniform), (cumulated > drawn.unsqueeze(-1)).int().argmax(-1))


def test_labels_are_drawn_by_sums_that_a_gpu_can_repeat():
    """Under ``torch.use_deterministic_algorithms(True)`` CUDA refuses cumulative sums of floating-point numbers."""

    class Watched(TorchDispatchMode):
        seen: ClassVar[list[torch.dtype]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.cumsum, torch.ops.aten.cumprod, torch.ops.aten.logcumsumexp):
                self.seen.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Watched():
        draw_labels(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0.1, 0.5, 0.9]))
    assert set(Watched.seen) == {torch.int32}


@pytest.mark.parametrize("name", [name for name in CASES if case_named(name).model.blocks[-1].outputs is not None])
def test_the_outputs_of_every_model_say_what_its_losses_are(name):
    check_outputs(*case_named(name), tolerance=1e-12)


def test_there_are_models_with_outputs_of_every_kind():
    named = {name for name in CASES if case_named(name).model.blocks[-1].outputs is not None}
    assert named == {"gpt", "gpt-untied", "llama", "llama-tied", "mlp", "cnn"}


@pytest.mark.parametrize("likelihood", Likelihood)
def test_outputs_that_are_not_the_loss_are_refused(likelihood):
    model, data = _model(likelihood), _data(likelihood)
    params = {"shift": randn(TERMS, CLASSES)}
    check_outputs(model, params, data)
    twice = from_loss(lambda p, d: 2 * model.loss(p, d), params, outputs=model.blocks[-1].outputs)
    count = len(model.loss(params, data))
    with pytest.raises(
        FdpError, match=rf"got different losses for {count} of {count} samples.*set Outputs\.weights"
    ) as caught:
        check_outputs(twice, params, data)
    for loss in twice.loss(params, data).tolist():
        assert f"{loss:.3g}" not in str(caught.value), "the loss of a private sample"


def test_a_model_without_outputs_has_an_empirical_fisher_only():
    model, params, data = case_named("loop")
    own = surrogate(model, Fisher.EMPIRICAL).loss(params, data)
    torch.testing.assert_close(own, model.loss(params, data), rtol=0, atol=0)
    for fisher in (Fisher.SAMPLED, Fisher.EXACT):
        with pytest.raises(FdpError, match=r"from_loss takes outputs="):
            surrogate(model, fisher)
        with pytest.raises(FdpError, match=r"Fisher.EMPIRICAL"):
            _passes(model, fisher, (3, 4), KEY)
    with pytest.raises(FdpError, match="outputs=None"):
        check_outputs(model, params, data)


def test_a_surrogate_has_the_same_leaves_and_all_blocks_but_the_last():
    model, _, _ = case_named("gpt")
    stand_in = surrogate(model, Fisher.SAMPLED)
    assert stand_in.leaves is model.leaves
    assert stand_in.blocks[:-1] == model.blocks[:-1]
    assert stand_in.blocks[-1].params == model.blocks[-1].params
    assert stand_in.blocks[-1].head is None
    again = surrogate(model, Fisher.SAMPLED).blocks[-1].apply
    assert again == stand_in.blocks[-1].apply
    assert hash(again) == hash(stand_in.blocks[-1].apply)
    assert again != surrogate(model, Fisher.EXACT).blocks[-1].apply


def test_data_that_cannot_carry_random_numbers_is_refused():
    with pytest.raises(FdpError, match="expected a dict"):
        with_numbers((torch.zeros(2),), torch.zeros(2))
    with pytest.raises(FdpError, match="one with the entry 'fisher'"):
        with_numbers({"fisher": torch.zeros(2)}, torch.zeros(2))
