"""AdamW with moments in bfloat16: the same training, in half the optimizer state."""

from __future__ import annotations

import pytest
import torch

from fdp import tree
from fdp.fast.noisy_update import NoisyUpdate
from fdp.gradients.lazy_sum import single_row
from fdp.keys import key
from fdp.optimizers import adamw, apply_updates, chain, clip_by_value, narrow_moments, sgd
from fdp.types import FdpError


def problem() -> dict[str, torch.Tensor]:
    return {"w": torch.linspace(-1, 1, 60).view(6, 10), "b": torch.ones(10)}


def test_moments_are_bfloat16_and_nothing_else_is():
    state = narrow_moments(adamw(1e-2)).init(problem())
    held = {leaf.dtype for part in (state[0].mean, state[0].square) for leaf in tree.leaves(part)}
    assert held == {torch.bfloat16}
    assert state[0].step.dtype == torch.int64
    assert tree.paths(state[0].mean) == tree.paths(problem())


def test_it_minimises_as_adamw_in_float32_does():
    def train(optimizer) -> torch.Tensor:
        params, state = problem(), optimizer.init(problem())
        for _ in range(300):
            updates, state = optimizer.update({p: 2 * leaf for p, leaf in params.items()}, state, params)
            params = apply_updates(params, updates)
        return torch.stack([leaf.square().sum() for leaf in params.values()]).sum().sqrt()

    narrow, wide = train(narrow_moments(adamw(5e-3))), train(adamw(5e-3))
    assert float(narrow) < 0.1 * float(torch.cat([leaf.flatten() for leaf in problem().values()]).norm())
    assert abs(float(narrow) - float(wide)) < 0.1 * float(wide)


def test_the_fused_update_stores_the_same_moments():
    optimizer = narrow_moments(adamw(1e-2))
    params, state = problem(), optimizer.init(problem())
    mine, held = problem(), optimizer.init(problem())
    assert optimizer.rule is not None
    fused, one = NoisyUpdate(optimizer.rule), torch.ones(1, dtype=torch.float64)
    for t in range(3):
        grads = {path: torch.sin(leaf * 7 + t) for path, leaf in problem().items()}
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
        sums = {path: single_row(leaf, one) for path, leaf in grads.items()}
        fused(mine, held, sums, key=key(0), noise_scale=None, expected_batch_size=1.0)
    for a, b in zip(tree.leaves((params, state)), tree.leaves((mine, held))):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=2.0**-6, atol=1e-5)


@pytest.mark.parametrize("optimizer", [sgd(0.1), chain(clip_by_value(1.0), adamw(0.1))])
def test_other_optimizers_are_refused(optimizer):
    with pytest.raises(FdpError, match="expected adam or adamw as it is"):
        narrow_moments(optimizer)
