"""Every collective of a step is waited for; meanwhile nobody reads what it makes or writes what it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fdp import collectives
from fdp.collectives import all_gather, all_reduce, axis_of, broadcast, reduce_scatter, wait
from fdp.mesh import make_mesh
from fdp.methods import Method
from fdp.sharding import Data, Reduce, Zero
from tests.fake_ranks import fake_ranks
from tests.ranks import run_on_ranks
from tests.test_sharding import ALL, train


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
def test_every_collective_is_waited_for_and_left_alone_until_then(name, monkeypatch):
    # full_tensor belongs to DTensor, and comes after the step
    monkeypatch.setattr("tests.test_sharding.whole", lambda values: {})
    settings = {"axes": {"shard": 2}, "steps": 1} | STEPS[name]
    with fake_ranks(2), Watched() as watched:
        train(**settings)
    assert watched.begun
    assert not watched.flying, f"never waited for: {[kind for kind, _, _ in watched.flying.values()]}"
    # On a CPU, the names that gloo would keep on the heap: see all_gather.
    assert not [kind for kind in watched.begun if kind == "all_gather_into_tensor" or kind.endswith("_coalesced")]


def test_the_watch_sees_what_is_touched_too_early_and_what_is_left_behind():
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
def test_each_collective_is_what_its_name_says():
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
