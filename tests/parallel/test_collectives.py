"""Every collective of a step is waited for; until then nothing reads its output or writes its input."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fdp.checks.first_call import Checks
from fdp.gradients.plan import Method
from fdp.parallel import collectives
from fdp.parallel.collectives import all_gather, all_reduce, axis_of, broadcast, reduce_scatter, wait
from fdp.parallel.dtensors import full_tensor
from fdp.parallel.mesh import AXES, make_mesh
from fdp.parallel.sharding import Data, Reduce, Zero
from tests.fake_ranks import fake_ranks
from tests.parallel.test_sharding import ALL, train
from tests.ranks import run_on_ranks


class Watched(TorchDispatchMode):
    """Raises when a tensor on its way is touched; ``begun`` counts collectives, ``flying`` holds the unfinished ones.

    Storages are held on to until their wait, so that no address is used twice meanwhile.
    """

    def __init__(self):
        super().__init__()
        self.begun: list[str] = []
        self.flying: dict[int, tuple[str, Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name == "wait_tensor":
            del self.flying[address(args[0])]  # a second wait, or one for nothing, is a KeyError
            return func(*args, **kwargs)
        self.check(func, args, kwargs)
        out = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            self.begun.append(name)
            self.flying[address(out)] = (name, args[0], out)
        return out

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        made = {key: name for key, (name, _, _) in self.flying.items()}
        given = {address(x): name for name, x, _ in self.flying.values()}
        for argument, value in [
            *zip(func._schema.arguments, args),
            *((by_name(func, k), v) for k, v in kwargs.items()),
        ]:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.numel():
                    assert address(leaf) not in made, f"{func} touches what {made[address(leaf)]} is still making"
                    assert not written or address(leaf) not in given, f"{func} writes what {given[address(leaf)]} reads"


def address(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # of the storage itself: a fake tensor has no memory


def by_name(func: Any, name: str) -> Any:
    return next(argument for argument in func._schema.arguments if argument.name == name)


STEPS = {
    "zero 0": {"zero": Zero.NONE},
    "zero 2": {"zero": Zero.TWO},
    "zero 2, in every microbatch": {"zero": Zero.TWO, "reduce": Reduce.PER_MICROBATCH},
    "zero 3": {},
    "zero 3, ghost": {"method": Method.GHOST},
    "zero 3, none": {"method": Method.NONE},
    "offload": {"offload": ALL},
    "activation checkpoints": {"checkpoint_activations": True},
    "replicated data": {"data": Data.REPLICATED},
    "lamb": {"optimizer": "lamb"},
    "tensor": {"axes": {"tensor": 2}},
    "replicate": {"axes": {"replicate": 2}},
}


@pytest.mark.parametrize("name", STEPS)
def test_no_tensor_of_a_collective_is_touched_before_it_is_waited_for(name, monkeypatch):
    # what ranks that are not there would send is garbage: norms are not those of the parameters
    monkeypatch.setattr("fdp.checks.model_checks.check_norms", lambda *args, **kwargs: None)
    settings = {"axes": {"shard": 2}, "steps": 1} | STEPS[name]
    with fake_ranks(2), Watched() as watched:
        train(**settings, checks=Checks.FIRST_CALL)
    assert watched.begun
    assert not watched.flying, f"never waited for: {[kind for kind, _, _ in watched.flying.values()]}"
    # On a CPU, the names that gloo would keep on the heap: see all_gather.
    assert not [kind for kind in watched.begun if kind == "all_gather_into_tensor" or kind.endswith("_coalesced")]


def test_the_checker_detects_early_use_and_missing_waits():
    with fake_ranks(2):
        axis = axis_of(make_mesh({"shard": 2}, device_type="cpu"), "shard")
        with Watched() as watched:
            wait(all_gather(torch.ones(3), axis))
            x = torch.ones(4)
            pending = reduce_scatter(x, axis)
            with pytest.raises(AssertionError, match="writes what reduce_scatter_tensor reads"):
                x.add_(1)
            with pytest.raises(AssertionError, match="touches what reduce_scatter_tensor is still making"):
                pending.sum()
            assert len(watched.flying) == 1
            wait(pending)
            with pytest.raises(KeyError):
                wait(pending)
        assert not watched.flying


def each_once() -> dict[str, Tensor]:
    axis = axis_of(make_mesh({"shard": 2}, device_type="cpu"), "shard")
    x = torch.arange(6.0).view(2, 3) + 10 * axis.rank
    acts = {"gather": all_gather, "scatter": reduce_scatter, "reduce": all_reduce, "broadcast": broadcast}
    made = {name: wait(act(x, axis)) for name, act in acts.items()}
    made["turned"] = wait(all_gather(x.t(), axis))
    made["empty"] = wait(all_gather(x[:0], axis))
    made["half"] = wait(all_gather(x.bfloat16(), axis))
    made["into"] = wait(collectives.broadcast_into(x.clone(), 1, axis))
    return made


@pytest.mark.ranks
def test_each_collective_does_what_its_name_says():
    own = torch.arange(6.0).view(2, 3)
    both = torch.cat([own, own + 10])
    for rank, made in enumerate(run_on_ranks(each_once, 2)):
        expected = {
            "gather": both,
            "scatter": (2 * own + 10)[rank : rank + 1],
            "reduce": 2 * own + 10,
            "broadcast": own,
            "turned": torch.cat([own.t(), own.t() + 10]),
            "empty": own[:0],
            "half": both.bfloat16(),
            "into": own + 10,
        }
        for name, value in expected.items():
            assert torch.equal(made[name], value), f"{name}: {made[name]}"


CUTS = {  # the shape of a leaf, and along which dim each axis of the mesh cuts it
    "even": ((8, 3), {"shard": 0}),
    "uneven": ((7, 3), {"shard": 0}),
    "fewer rows than ranks": ((1, 3), {"shard": 0}),
    "columns": ((3, 5), {"shard": 1}),
    "two dims": ((5, 6), {"tensor": 1, "shard": 0}),
    "one dim twice": ((10, 2), {"tensor": 0, "shard": 0}),
    "replicated": ((4,), {}),
}


def gathered() -> dict[str, Tensor]:
    mesh = make_mesh({"tensor": 2, "shard": 2}, device_type="cpu")
    made = {}
    for name, (shape, cuts) in CUTS.items():
        value = torch.arange(float(torch.Size(shape).numel())).view(shape)
        placements = [Shard(cuts[axis]) if axis in cuts else Replicate() for axis in AXES]
        made[name] = full_tensor(distribute_tensor(value, mesh, placements))
    return made


@pytest.mark.ranks
def test_a_leaf_is_gathered_from_any_sharding():
    for made in run_on_ranks(gathered, 4):
        for name, (shape, _) in CUTS.items():
            assert torch.equal(made[name], torch.arange(float(torch.Size(shape).numel())).view(shape)), name


def test_a_gather_that_is_compiled_keeps_the_short_name():
    with fake_ranks(2):
        axis = axis_of(make_mesh({"shard": 2}, device_type="cpu"), "shard")
        graphs: list[str] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph.code)
            return graph.forward

        torch.compile(lambda x: wait(all_gather(x, axis)) + 1, backend=backend, fullgraph=True)(torch.ones(3))
    assert "fdp_collectives.gather" in graphs[0]
    assert "all_gather_into_tensor" not in graphs[0]


def many_in_flight(seconds: float) -> dict[str, int]:
    mesh = make_mesh({"shard": 2}, device_type="cpu")
    axis = axis_of(mesh, "shard")
    leaf = distribute_tensor(torch.arange(1001.0), mesh, [Replicate(), Replicate(), Shard(0)])
    compiled = torch.compile(lambda x: wait(all_gather(x, axis)), fullgraph=True)
    done, deadline = 0, time.monotonic() + seconds
    more = torch.ones(())
    while bool(wait(all_reduce(more, axis))):  # until all of them have had enough, together
        pending = [all_gather(torch.full((97 + i,), float(done + i)), axis) for i in range(5)]
        for i, each in enumerate(pending):
            assert bool((wait(each) == done + i).all())
        assert bool((compiled(torch.full((97,), float(done))) == done).all())
        assert torch.equal(full_tensor(leaf), torch.arange(1001.0))
        done += 7
        more.fill_(float(time.monotonic() < deadline))
    return {"gathers": done}


@pytest.mark.ranks
@pytest.mark.slow
def test_tens_of_thousands_of_overlapping_gathers_do_not_corrupt_memory():
    """torch's own gather crashes a rank within seconds here: two threads free the name of the last operation twice."""
    for made in run_on_ranks(many_in_flight, 2, 45.0):
        assert made["gathers"] > 5_000
