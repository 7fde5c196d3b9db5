"""The same numbers on one rank and on several: initial values, losses, norms, noise and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fdp import clipping, keys, tree
from fdp.mechanism import Mechanism
from fdp.mesh import make_mesh
from fdp.methods import Method, make_plan
from fdp.models import GPTConfig, gpt
from fdp.optimizers import adamw, lamb, sgd
from fdp.sampling import poisson, sample_batch
from fdp.sharding import Zero, init_params, make_sharding
from fdp.step import init_state, make_train_step
from fdp.types import FdpError
from tests.ranks import run_on_ranks

# 13 tokens of vocabulary: a dimension that no number of ranks below divides.
MODEL = gpt(GPTConfig(layers=2, width=8, heads=2, context=6, vocab_size=13))
DATA = {"tokens": torch.randint(0, 13, (40, 7), generator=torch.Generator().manual_seed(0))}
SAMPLING = poisson(40, expected_batch_size=10)
STEPS = 3


def train(method: Method, style_name: str, axes: dict[str, int] | None, zero: Zero) -> dict[str, Any]:
    """A few steps; on one rank if ``axes`` is None. Parameters come back whole."""
    styles = {
        "flat": clipping.flat(max_norm=0.3),
        "quantile": clipping.quantile(max_norm=0.3, target_quantile=0.5, learning_rate=0.3, count_noise=1.0),
    }
    z = 0.0 if method is Method.NONE else 1.0
    mechanism, optimizer, root = Mechanism(SAMPLING, styles[style_name], z), sgd(0.5, momentum=0.9), keys.key(0)
    sharding, rank, ranks = None, 0, 1
    if axes is not None:
        sharding = make_sharding(MODEL, make_mesh(axes, device_type="cpu"), zero=zero)
        rank, ranks = sharding.rank, sharding.ranks
    params = MODEL.init(root) if sharding is None else init_params(MODEL, root, sharding)
    batches = [
        sample_batch(DATA, SAMPLING, keys.fold_in(root, t), microbatch_size=6, rank=rank, ranks=ranks)
        for t in range(STEPS)
    ]
    shapes = MODEL.init(root)
    plan = make_plan(MODEL, shapes, {"tokens": batches[0].data["tokens"][0]}, method=method)
    step = make_train_step(MODEL, optimizer, mechanism=mechanism, plan=plan, sharding=sharding)
    state = init_state(MODEL, params, optimizer, mechanism, sharding=sharding)
    first = whole(state.params)
    losses, norms = [], []
    for t, batch in enumerate(batches):
        state, metrics = step(state, batch, keys.fold_in(root, 100 + t))
        real = metrics.mask > 0
        losses.append(metrics.losses[real])
        norms.append(metrics.norms[real])
    return {
        "init": first,
        "losses": torch.cat(losses),
        "norms": torch.cat(norms),
        "params": whole(state.params),
        "clip": state.clip,
        "held": sum(
            leaf.to_local().numel() for leaf in tree.leaves((state.params, state.opt)) if isinstance(leaf, DTensor)
        ),
    }


def whole(params: Any) -> dict[str, torch.Tensor]:
    flat = tree.flatten(params)
    return {path: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for path, leaf in flat.items()}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for path, leaf in expected["init"].items():
        assert torch.equal(got["init"][path], leaf), f"{path}: not the same bits at the start"
    for what in ("losses", "norms"):
        torch.testing.assert_close(got[what], expected[what], rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(got["clip"], expected["clip"])
    for path, leaf in expected["params"].items():
        torch.testing.assert_close(got["params"][path], leaf, rtol=1e-5, atol=1e-6, msg=lambda m, p=path: f"{p}: {m}")


def everything(ranks: int) -> dict[str, Any]:
    """All cases of one world size in one start of the processes."""
    cases = {}
    for zero in Zero:
        for method in (Method.MATERIALIZE, Method.GHOST, Method.AUTO, Method.NONE):
            cases[f"{zero.name} {method.value}"] = train(method, "flat", {"shard": ranks}, zero)
    cases["TWO quantile"] = train(Method.AUTO, "quantile", {"shard": ranks}, Zero.TWO)
    if ranks == 4:
        cases["THREE replicate x shard"] = train(Method.AUTO, "flat", {"replicate": 2, "shard": 2}, Zero.THREE)
    return cases


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_numbers_on_any_number_of_ranks(ranks):
    alone = {
        method: train(method, "flat", None, Zero.NONE)
        for method in (Method.MATERIALIZE, Method.GHOST, Method.AUTO, Method.NONE)
    }
    quantile = train(Method.AUTO, "quantile", None, Zero.NONE)
    for results in run_on_ranks(everything, ranks, ranks):
        for case, got in results.items():
            method = next((m for m in alone if m.value == case.split()[-1]), Method.AUTO)
            assert_same(got, quantile if "quantile" in case else alone[method])
        assert results["THREE auto"]["held"] < 1.3 * results["NONE auto"]["held"] / ranks


def mistakes() -> list[str]:
    found = []
    for axes in ({"shard": 3}, {"shards": 2}, {"shard": 0}):
        try:
            make_mesh(axes, device_type="cpu")
        except FdpError as error:
            found.append(str(error))
    sharding = make_sharding(MODEL, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.TWO)
    plan = make_plan(MODEL, MODEL.init(keys.key(0)), {"tokens": DATA["tokens"][:3]})
    mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=1.0), 1.0)
    make_train_step(MODEL, adamw(1e-3), mechanism=mechanism, plan=plan, sharding=sharding)
    try:
        make_train_step(MODEL, lamb(1e-3), mechanism=mechanism, plan=plan, sharding=sharding)
    except FdpError as error:
        found.append(str(error))
    return found


@pytest.mark.ranks
def test_mistakes_are_refused():
    for product, axis, size, optimizer in run_on_ranks(mistakes, 2):
        assert "multiply to the 2 ranks" in product
        assert "expected axes among" in axis
        assert "at least 1" in size
        assert "exact on parts" in optimizer


def test_a_mesh_needs_a_process_group():
    with pytest.raises(FdpError, match="torchrun"):
        make_mesh({"shard": 2}, device_type="cpu")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_ranks_hold_the_global_batch_between_them(ranks):
    everyone = sample_batch(DATA, SAMPLING, keys.key(5), microbatch_size=6)
    parts = [sample_batch(DATA, SAMPLING, keys.key(5), microbatch_size=6, rank=r, ranks=ranks) for r in range(ranks)]
    assert len({part.mask.shape for part in parts}) == 1
    mask = torch.cat([part.mask for part in parts], dim=1)
    tokens = torch.cat([part.data["tokens"] for part in parts], dim=1)
    assert torch.equal(tokens[mask > 0], everyone.data["tokens"][everyone.mask > 0])
    with pytest.raises(FdpError, match="rank"):
        sample_batch(DATA, SAMPLING, keys.key(5), microbatch_size=6, rank=ranks, ranks=ranks)
