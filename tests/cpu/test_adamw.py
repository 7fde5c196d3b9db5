from __future__ import annotations

import pytest
import torch
from fdp_kernels import cpu_library
from torch import Tensor

from fdp import tree
from fdp.cpu import adamw as adamw_file
from fdp.cpu.adamw import next_params
from fdp.optimizers import (
    Optimizer,
    adam,
    adamw,
    apply_updates,
    chain,
    clip_by_global_norm,
    scale_by_learning_rate,
    sgd,
)
from fdp.optimizers.schedules import linear, warmup_cosine
from fdp.types import FdpError, Flat, Tree
from tests.conftest import randn
from tests.cpu.functions import count_calls

compiled = pytest.mark.skipif(cpu_library.library() is None, reason="no C compiler")
SHAPES = {"block.0": (3, 700), "block.bias": (5,), "empty": (0, 4), "head": (130, 129), "scale": ()}


def leaves(seed: int = 0, scale: float = 1.0) -> Flat:
    return {path: scale * randn(*shape, seed=seed + i).float() for i, (path, shape) in enumerate(SHAPES.items())}


def in_stages(optimizer: Optimizer, grads: Flat, state: Tree, params: Flat) -> tuple[Flat, Tree]:
    updates, state = optimizer.update(grads, state, params)
    return apply_updates(params, updates), state


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The calls of the compiled loop."""
    return count_calls(adamw_file, "_in_one_pass", monkeypatch)


OPTIMIZERS = {
    "adamw": adamw(1e-2, weight_decay=0.1),
    "adam": adam(1e-2),
    "schedule": adamw(warmup_cosine(1e-2, warmup_steps=2, steps=5)),
    "other decays": adamw(1e-2, b1=0.3, b2=0.2),
    "no running mean": adam(1e-2, b1=0.0),
    "without the noise": adamw(1e-2, noise_std=0.3, eps_root=1e-2),
    "nothing at all": adamw(0.0, weight_decay=0.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_state_are_those_of_update_and_apply_updates(name, passes, cpu_loops):
    optimizer, ours, theirs = OPTIMIZERS[name], leaves(), leaves()
    state, other = optimizer.init(ours), optimizer.init(theirs)
    for step in range(5):
        grads = leaves(step + 10, scale=10.0**-step)
        ours, state = next_params(optimizer, grads, state, ours)
        theirs, other = in_stages(optimizer, grads, other, theirs)
    assert len(passes) == 5 * cpu_loops
    assert tree.paths(state) == tree.paths(other)
    for one, two in zip(tree.leaves((ours, state)), tree.leaves((theirs, other)), strict=True):
        assert one.dtype == two.dtype
        assert one.shape == two.shape
        torch.testing.assert_close(one, two, rtol=3e-6, atol=2e-6 if name == "without the noise" else 1e-7)


def test_arguments_stay_as_they_are_and_results_share_no_memory_with_them():
    optimizer, params, grads = OPTIMIZERS["adamw"], leaves(), leaves(1)
    _, state = next_params(optimizer, grads, optimizer.init(params), params)
    given = tree.leaves((params, grads, state))
    before = [leaf.clone() for leaf in given]
    made = next_params(optimizer, grads, state, params)
    assert all(map(torch.equal, before, given))
    held = {leaf.data_ptr() for leaf in given if leaf.numel()}
    assert not any(leaf.data_ptr() in held for leaf in tree.leaves(made) if leaf.numel())


def test_memory_in_any_order_is_read_and_other_trees_than_dictionaries_return(passes, cpu_loops):
    params = {"a": [randn(30, 20).float().T, torch.view_as_complex(randn(6, 2)).conj().imag.float()]}
    grads = {"a": [randn(40, 30, seed=1).float()[::2], randn(6, seed=2).float().neg()]}
    optimizer = OPTIMIZERS["adamw"]
    found, _ = next_params(optimizer, grads, optimizer.init(params), params)  # pyright: ignore
    expected, _ = in_stages(optimizer, grads, optimizer.init(params), params)  # pyright: ignore
    assert len(passes) == cpu_loops
    for one, two in zip(found["a"], expected["a"], strict=True):
        torch.testing.assert_close(one, two)


@compiled
def test_what_is_not_finite_stays_in_its_element(passes):
    optimizer, params, grads = OPTIMIZERS["without the noise"], leaves(), leaves(1)
    clean, _ = next_params(optimizer, grads, optimizer.init(params), params)
    grads["head"][3, 4], grads["head"][5, 6] = torch.nan, torch.inf
    spoilt, state = next_params(optimizer, grads, optimizer.init(params), params)
    bad = ~spoilt["head"].isfinite()
    assert bad.nonzero().tolist() == [[3, 4], [5, 6]]
    assert torch.equal(spoilt["head"][~bad], clean["head"][~bad])
    assert state[0].square["head"][3, 4].isnan()
    assert len(passes) == 2


@compiled
@pytest.mark.parametrize("cut", [1, 17, 1024, 5000])
def test_a_shard_gets_the_bits_of_the_full_update(cut, passes):
    optimizer = OPTIMIZERS["without the noise"]
    params, grads = randn(10_000).float(), randn(10_000, seed=1).float()
    whole, _ = next_params(optimizer, {"w": grads}, optimizer.init({"w": params}), {"w": params})
    for part in (slice(0, cut), slice(cut, None)):
        own = {"w": params[part]}
        shard, _ = next_params(optimizer, {"w": grads[part]}, optimizer.init(own), own)
        assert torch.equal(shard["w"], whole["w"][part])
    assert len(passes) == 3


def _wrapped() -> Optimizer:
    known = adamw(1e-2)
    return known._replace(update=lambda *args: ({"w": torch.ones(4)}, known.update(*args)[1]))


OTHERS = {
    "another optimizer": sgd(1e-2),
    "a wrapped update": _wrapped(),
    "a mask": adamw(1e-2, mask=lambda params: tree.map(lambda leaf: leaf.ndim > 1, params)),
    "decay that changes": adamw(1e-2, weight_decay=linear(1.0, 0.0, steps=3)),
    "a chain": chain(clip_by_global_norm(0.1), OPTIMIZERS["adam"]),
    "a chain that ends otherwise": chain(OPTIMIZERS["adam"], scale_by_learning_rate(0.5)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_update_as_they_say(name, passes):
    params, grads, optimizer = {"w": randn(4).float()}, {"w": randn(4, seed=1).float()}, OTHERS[name]
    found, _ = next_params(optimizer, grads, optimizer.init(params), params)
    expected, _ = in_stages(optimizer, grads, optimizer.init(params), params)
    assert torch.equal(found["w"], expected["w"])
    assert not torch.equal(found["w"], params["w"])
    assert not passes


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_leaves_of_other_dtypes_keep_them(dtypes, passes):
    params, grads = ({"w": randn(4, seed=i).to(dtype)} for i, dtype in enumerate(dtypes))
    optimizer = OPTIMIZERS["adamw"]
    found, _ = next_params(optimizer, grads, optimizer.init(params), params)
    assert found["w"].dtype == dtypes[0]
    assert not passes


def test_an_update_can_be_differentiated_mapped_and_compiled(passes):
    params, optimizer = {"w": randn(3, 4).float()}, OPTIMIZERS["adamw"]
    state, grads = optimizer.init(params), {"w": randn(3, 4, seed=1).float()}

    def after(w: Tensor) -> Tensor:
        return next_params(optimizer, grads, state, {"w": w})[0]["w"]

    def after_one(w: Tensor, g: Tensor) -> Tensor:
        row = optimizer.init({"w": params["w"][0]})
        return next_params(optimizer, {"w": g}, row, {"w": w})[0]["w"]

    slope = torch.full((3, 4), 1 - 1e-2 * 0.1)
    torch.testing.assert_close(torch.func.grad(lambda w: after(w).sum())(params["w"]), slope)
    assert not torch.func.grad(lambda w: after(w.detach()).sum())(params["w"]).any()
    w = params["w"].clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(after(w).sum(), w)[0], slope)
    expected = in_stages(optimizer, grads, state, params)[0]["w"]
    torch.testing.assert_close(torch.vmap(after_one)(params["w"], grads["w"]), expected)
    torch.testing.assert_close(torch.compile(after, backend="eager", fullgraph=True)(params["w"]), expected)
    assert not passes


@pytest.mark.parametrize(
    ("optimizer", "other", "error"),
    [
        (OPTIMIZERS["schedule"], OPTIMIZERS["adamw"], AttributeError),
        (adamw(1e-2, weight_decay=1e39), adamw(1e-2, weight_decay=1e39), RuntimeError),
    ],
    ids=["the state of another optimizer", "a number beyond float32"],
)
def test_what_the_optimizer_refuses_is_refused(optimizer, other, error, cpu_loops):
    with pytest.raises(error):
        next_params(optimizer, leaves(1), other.init(leaves()), leaves())


def test_gradients_that_do_not_fit_are_refused_with_their_path():
    params, optimizer = leaves(), OPTIMIZERS["adamw"]
    state = optimizer.init(params)
    with pytest.raises(FdpError, match="head"):
        next_params(optimizer, leaves() | {"head": torch.ones(2)}, state, params)
    others = {path: leaf for path, leaf in leaves().items() if path != "scale"}
    for wrong in (others, others | {"scales": leaves()["scale"]}):
        with pytest.raises(FdpError, match="scale"):
            next_params(optimizer, wrong, state, params)
