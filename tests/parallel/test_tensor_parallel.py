"""The borders of tensor-parallel layers: values and derivatives, under vmap and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fdp.parallel.collectives import axis_of
from fdp.parallel.mesh import make_mesh
from fdp.parallel.tensor_parallel import enter, leave
from tests.ranks import run_on_ranks


def test_without_an_axis_enter_and_leave_are_the_identity():
    x = torch.ones(3)
    assert enter(x, None) is x
    assert leave(x, None) is x


def gradients() -> dict[str, tuple[Tensor, ...]]:
    """A two-layer network cut over two ranks: its output and gradients, by four ways of differentiation.

    The ranks' own gradients of the input differ, so that a backward of ``enter`` that forgot to add them up, as the
    derivative of its forward would, gives another result.
    """
    axis = axis_of(make_mesh({"tensor": 2}, device_type="cpu"), "tensor")
    generator = torch.Generator().manual_seed(0)
    up, down, x = (torch.randn(*shape, generator=generator) for shape in ((8, 4), (4, 8), (5, 4)))
    mine = slice(4 * axis.rank, 4 * axis.rank + 4)

    def run(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return leave(F.linear(F.gelu(F.linear(enter(x, axis), up)), down), axis) + x

    def pulled(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        y, pull, *_ = torch.func.vjp(run, x, up, down)
        with torch.no_grad():
            return y, *pull(torch.cos(y))

    def per_sample(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        y, *found = torch.func.vmap(pulled, in_dims=(0, None, None))(x.unsqueeze(1), up, down)
        return y.squeeze(1), found[0].squeeze(1), found[1].sum(0), found[2].sum(0)

    args = (x, up[mine].clone(), down[:, mine].clone())
    found = {"vjp": pulled(*args), "vmap": per_sample(*args)}
    for name, fn in (("vjp", pulled), ("vmap", per_sample)):
        found[f"{name} compiled"] = torch.compile(fn, fullgraph=True, backend="aot_eager")(*args)
    y, pull, *_ = torch.func.vjp(lambda x, up, down: F.linear(F.gelu(F.linear(x, up)), down) + x, x, up, down)
    of_x, of_up, of_down = pull(torch.cos(y))
    return found | {"truth": (y, of_x, of_up[mine], of_down[:, mine])}


@pytest.mark.long
@pytest.mark.ranks
def test_derivatives_equal_those_of_the_full_network_eager_and_compiled():
    for results in run_on_ranks(gradients, 2):
        truth = results.pop("truth")
        for way, got in results.items():
            for what, value, expected in zip(("output", "input", "up", "down"), got, truth):
                torch.testing.assert_close(value, expected, msg=lambda m, w=way, n=what: f"{w}: {n}: {m}")
