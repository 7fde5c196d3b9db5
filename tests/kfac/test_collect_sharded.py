from __future__ import annotations

import pytest
import torch

from fdp import tree
from fdp.gradients.execution import Execution
from fdp.kfac.factor_forms import Form
from fdp.kfac.layers import survey
from fdp.kfac.measure.collect import collect
from fdp.kfac.measure.estimator import Estimator, Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.types import Curvature, Layer
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharding import Sharding, Zero, abstract_params, make_sharding, over_tensor_axis
from fdp.types import Tree
from tests.conftest import Case, case_named
from tests.kfac_cases import KEY, added, assert_same, curvatures, forms_of, surveyed
from tests.ranks import run_on_ranks


def on_a_rank(axes: dict[str, int], zero: Zero, fisher: Fisher, sharing: Sharing) -> dict[Layer, Curvature]:
    """Return the factors of this rank's samples, computed from its shards of the parameters."""
    whole = case_named("gpt")
    mesh = make_mesh(axes, device_type="cpu")
    model = over_tensor_axis(whole.model, mesh)
    sharding = make_sharding(model, mesh, zero=zero)
    flat = tree.flatten(whole.params)
    parts = {path: flat[path][place] for path, place in windows(sharding).items()}
    data = ragged_half(whole.data, sharding.rank) if sharding.ranks == 2 else whole.data
    mask = torch.tensor([1.0, 1.0, 0.0]) if sharding.rank == 0 and sharding.ranks == 2 else torch.ones(3)
    known = survey(model, abstract_params(model, sharding), data, dtype=torch.float64)
    forms = dict(forms_of(known)) | tied(sharing)
    estimator = Estimator(known, forms, fisher, sharing)
    return collect(model, tree.nest(parts), data, mask, estimator=estimator, key=KEY, execution=Execution(sharding))


def tied(sharing: Sharing) -> dict[Layer, tuple[Form, Form]]:
    """Return the forms of the tied leaf; with reduce it cannot be a softmax."""
    left = Form.SOFTMAX if sharing is Sharing.EXPAND else Form.DENSE
    return {Layer("embed.tokens", None): (left, Form.DENSE)}


def windows(sharding: Sharding) -> dict[str, tuple[slice, ...]]:
    return {
        path: tuple(slice(start, start + length) for start, length in leaf.window)
        for path, leaf in sharding.leaves.items()
    }


def ragged_half(data: Tree, rank: int) -> Tree:
    """Return one half of six samples, one of which is padding."""
    return tree.map(lambda leaf: leaf if rank == 0 else leaf.flip(0), data)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("axes", "zero", "fisher", "sharing"),
    [
        ({"shard": 2}, Zero.THREE, Fisher.SAMPLED, Sharing.EXPAND),
        ({"tensor": 2}, Zero.NONE, Fisher.EMPIRICAL, Sharing.EXPAND),
        ({"tensor": 2}, Zero.NONE, Fisher.SAMPLED, Sharing.REDUCE),
    ],
    ids=["shard", "tensor", "tensor-reduce"],
)
def test_ranks_together_have_the_factors_of_one_process(axes, zero, fisher, sharing):
    first, second = run_on_ranks(on_a_rank, 2, axes, zero, fisher, sharing)
    whole = case_named("gpt")
    forms = dict(forms_of(surveyed(*whole))) | tied(sharing)
    if "shard" in axes:
        data = tree.map(lambda *halves: torch.cat(halves), *(ragged_half(whole.data, rank) for rank in range(2)))
        mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
        alone = curvatures(Case(whole.model, whole.params, data), fisher, sharing, mask=mask, forms=forms)
        assert_same({layer: added(first[layer], second[layer]) for layer in first}, alone)
    else:
        alone = curvatures(whole, fisher, sharing, forms=forms)
        assert_same(first, alone)
        assert_same(second, alone)
