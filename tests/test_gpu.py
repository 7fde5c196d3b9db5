"""On a GPU: offload keeps what it says on the CPU and changes no number; a mesh of one rank over NCCL does neither."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fdp import clipping, keys, optimizers, tree
from fdp.mechanism import Mechanism
from fdp.mesh import make_mesh
from fdp.methods import Method, make_plan
from fdp.models import GPTConfig, gpt
from fdp.offload import NOTHING, Offload
from fdp.sampling import poisson, sample_batch
from fdp.sharding import Zero, abstract_params, init_params, localize, make_sharding
from fdp.step import Compile, init_state, make_train_step
from fdp.types import TrainState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MODEL = gpt(GPTConfig(layers=3, width=64, heads=4, context=32, vocab_size=211))
DATA = {"tokens": torch.randint(0, 211, (64, 33), generator=torch.Generator().manual_seed(0))}
SAMPLING = poisson(64, expected_batch_size=12)
ALL = Offload(params=True, grads=True, optimizer=True)


def train(
    device: str,
    *,
    offload: Offload = NOTHING,
    zero: Zero | None = None,
    method: Method = Method.AUTO,
    dtype: torch.dtype = torch.float32,
    compile: Compile = Compile.NONE,
    steps: int = 3,
) -> tuple[TrainState, dict[str, Any]]:
    mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=0.3), 0.0 if method is Method.NONE else 1.0)
    optimizer, root, there = optimizers.sgd(0.1, momentum=0.9), keys.key(0), torch.device(device)
    sharding = None if zero is None else make_sharding(MODEL, make_mesh({"shard": 1}, device_type=device), zero=zero)
    key = root.to("cpu" if offload.params else there)
    params = MODEL.init(key) if sharding is None else init_params(MODEL, key, sharding)
    state = init_state(MODEL, params, optimizer, mechanism, sharding=sharding, offload=offload, device=there)
    example = {"tokens": DATA["tokens"][:6].to(there)}
    plan = make_plan(MODEL, abstract_params(MODEL, sharding, device=there), example, method=method, dtype=dtype)
    step = make_train_step(
        MODEL, optimizer, mechanism=mechanism, plan=plan, sharding=sharding, offload=offload, compile=compile
    )
    losses, norms = [], []
    for t in range(steps):
        batch = sample_batch(DATA, SAMPLING, keys.fold_in(root, t), microbatch_size=6)
        state, metrics = step(
            state, tree.map(lambda leaf: leaf.to(there), batch), keys.fold_in(root, 100 + t).to(there)
        )
        real = metrics.mask > 0
        losses.append(metrics.losses[real].cpu())
        norms.append(metrics.norms[real].cpu())
    flat = {path: leaf.cpu() for path, leaf in tree.flatten(localize(state.params)).items()}
    return localize(state), {"losses": torch.cat(losses), "norms": torch.cat(norms), **flat}


def assert_same(got: dict[str, Any], expected: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    for what, value in expected.items():
        torch.testing.assert_close(
            got[what],
            value,
            rtol=tolerance,
            equal_nan=True,
            atol=tolerance,
            msg=lambda m, w=what: f"{w}: {m}",
        )


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return train("cuda")[1]


def test_the_gpu_computes_what_the_cpu_computes(plain):
    assert_same(plain, train("cpu")[1], tolerance=1e-4)


@pytest.mark.parametrize("offload", [ALL, Offload(params=True), Offload(grads=True), Offload(optimizer=True)], ids=repr)
def test_offload_changes_no_number_and_keeps_what_it_says_on_the_cpu(offload, plain):
    state, got = train("cuda", offload=offload)
    assert {leaf.device.type for leaf in tree.leaves(state.params)} == {"cpu" if offload.params else "cuda"}
    assert {leaf.device.type for leaf in tree.leaves(state.opt)} == {"cpu" if offload.optimizer else "cuda"}
    assert_same(got, plain)


@pytest.mark.parametrize("method", [Method.NONE, Method.GHOST, Method.MATERIALIZE])
def test_every_method_offloads(method):
    assert_same(train("cuda", offload=ALL, method=method)[1], train("cuda", method=method)[1])


@pytest.mark.parametrize("zero", list(Zero))
@pytest.mark.parametrize("offload", [NOTHING, ALL], ids=["device", "offload"])
def test_a_mesh_of_one_rank_over_nccl_is_the_same_as_none(zero, offload, plain):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        state, got = train("cuda", zero=zero, offload=offload)
    finally:
        dist.destroy_process_group()
    assert {leaf.device.type for leaf in tree.leaves(state.params)} == {"cpu" if offload.params else "cuda"}
    assert_same(got, plain)


def test_compiled_equals_eager_also_with_offload(plain):
    assert_same(train("cuda", compile=Compile.STEP)[1], plain)
    assert_same(train("cuda", compile=Compile.STEP, offload=ALL)[1], plain)


def test_offload_takes_less_of_the_gpu():
    big = gpt(GPTConfig(layers=8, width=512, heads=8, context=32, vocab_size=211))
    peaks = []
    for offload in (NOTHING, ALL):
        mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=0.3), 0.0)
        optimizer, there = optimizers.adamw(1e-2), torch.device("cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        params = big.init(keys.key(0) if offload.params else keys.key(0).to(there))
        state = init_state(big, params, optimizer, mechanism, offload=offload, device=there)
        del params
        batch = sample_batch(DATA, SAMPLING, keys.key(1), microbatch_size=4)
        batch = tree.map(lambda leaf: leaf.to("cuda"), batch)
        example = {"tokens": batch.data["tokens"][0]}
        plan = make_plan(big, abstract_params(big, None, device=there), example, method=Method.NONE)
        step = make_train_step(big, optimizer, mechanism=mechanism, plan=plan, offload=offload)
        torch.cuda.reset_peak_memory_stats()
        step(state, batch, keys.key(2).to(there))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del state, step
    whole, little = peaks
    assert little < whole / 4
