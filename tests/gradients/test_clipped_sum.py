"""Clipped sums of several microbatches: whose bound they have, who vouches for it, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from fdp import keys, ops
from fdp.gradients.accumulate import clipped_gradient
from fdp.gradients.clipped_sum import clipped_sum, lazy_clipped_sum
from fdp.gradients.lazy_sum import add_sums
from fdp.gradients.per_sample import Stash, per_sample_norms
from fdp.gradients.plan import make_plan
from fdp.model import Model, from_loss
from fdp.privacy import clipping
from fdp.privacy.clipping import clip_to, declare_clip
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.noise import add_gaussian
from fdp.privacy.sampling import poisson
from fdp.types import NO_SAMPLES, Clip, ClippedSum, FdpError, Flat, Norms, Tree
from tests.conftest import randn


def small_model() -> tuple[Model, Tree]:
    params = {"w": torch.ones(2, 3)}
    return from_loss(lambda p, d: ops.linear(d["x"], p["w"]).square().sum((1, 2)), params), params


def two_stashes() -> list[tuple[Norms, Stash]]:
    model, params = small_model()
    found = []
    for seed in (1, 2):
        data = {"x": randn(4, 5, 3, seed=seed).float()}
        found.append(per_sample_norms(model, params, data, plan=make_plan(model, params, data))[1:])
    return found


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("bounds", [(2.0, 0.5), (0.5, 2.0), (0.5, 0.5)])
def test_a_sum_of_microbatches_has_the_larger_of_their_bounds(bounds: tuple[float, float], lazy: bool) -> None:
    """A sample of the first microbatch moves the sum by up to the first bound, whatever the last one is."""
    (first, before), (second, after) = two_stashes()
    onto = clipped_sum(before, clip_to(first, max_norm=bounds[0]))
    alone = {path: leaf.clone() for path, leaf in onto.value.items()}
    again = clipped_sum(after.copy(), clip_to(second, max_norm=bounds[1]))
    add = lazy_clipped_sum if lazy else clipped_sum
    total = add(after, clip_to(second, max_norm=bounds[1]), onto)
    assert float(total.sensitivity) == max(bounds)
    torch.testing.assert_close(total.value["w"], alone["w"] + again.value["w"])
    assert total.bound is not None
    assert all(str(bound) in total.bound.by for bound in bounds)


def add_afterwards(stash: Stash, clip: Clip, onto: ClippedSum) -> ClippedSum:
    return add_sums(onto, clipped_sum(stash, clip))


@pytest.mark.parametrize("add", [clipped_sum, lazy_clipped_sum, add_afterwards])
@pytest.mark.parametrize("unknown", ["first", "second"])
def test_nobody_vouches_for_a_sum_if_nobody_does_for_a_part(add: Callable[..., ClippedSum], unknown: str) -> None:
    (first, before), (second, after) = two_stashes()
    clips = {"first": clip_to(first, max_norm=0.5), "second": clip_to(second, max_norm=0.5)}
    clips[unknown] = Clip(clips[unknown].factors, clips[unknown].sensitivity)
    total = add(after, clips["second"], clipped_sum(before, clips["first"]))
    with pytest.raises(FdpError, match="nothing vouches for its sensitivity"):
        add_gaussian(total, key=keys.key(0), step=0, noise_multiplier=1.0)


def test_sums_that_are_added_share_no_noise_with_either() -> None:
    (first, before), (second, after) = two_stashes()

    def noise_of(*bounds: float) -> Tensor:
        onto = clipped_sum(before.copy(), clip_to(first, max_norm=bounds[0]))
        total = clipped_sum(after.copy(), clip_to(second, max_norm=bounds[1]), onto)
        zeros = {"w": torch.zeros(200, dtype=torch.float64)}
        noisy = add_gaussian(total._replace(value=zeros), key=keys.key(0), step=0, noise_multiplier=1.0)["w"]
        return noisy / float(total.sensitivity)

    drawn = [noise_of(1.0, 1.0), noise_of(2.0, 1.0), noise_of(2.0, 2.0)]
    assert all(abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 0.3 for pair in combinations(drawn, 2))
    assert torch.equal(noise_of(1.0, 2.0), noise_of(2.0, 1.0))


def test_a_sum_of_earlier_samples_is_a_clipped_sum_of_the_same_leaves() -> None:
    (first, before), (second, after) = two_stashes()
    onto, clip = clipped_sum(before, clip_to(first, max_norm=2.0)), clip_to(second, max_norm=0.5)
    with pytest.raises(
        FdpError, match=r"expected onto, .* as a ClippedSum, got dict: .* Give what the last clipped_sum"
    ):
        clipped_sum(after, clip, onto.value)  # pyright: ignore
    other = onto._replace(value={"v": onto.value["w"]})
    for add in (lambda: clipped_sum(after, clip, other), lambda: add_sums(other, onto)):
        with pytest.raises(FdpError, match=r"expected two sums of the same leaves, got \['v', 'w'\] in one of the two"):
            add()
    assert add_sums(NO_SAMPLES, onto) is onto


def test_a_step_with_several_bounds_compiles_as_one_graph() -> None:
    model, params = small_model()
    data = {"x": randn(4, 5, 3).float()}
    plan = make_plan(model, params, data)

    def noisy(x: Tensor, key: Tensor, step: Tensor) -> Flat:
        total = NO_SAMPLES
        for bound in (2.0, 0.5):
            _, norms, stash = per_sample_norms(model, params, {"x": x}, plan=plan)
            total = clipped_sum(stash, clip_to(norms, max_norm=bound), total)
        return add_gaussian(total, key=key, step=step, noise_multiplier=1.0)

    compiled = torch.compile(noisy, fullgraph=True, backend="aot_eager")
    inputs = data["x"], keys.key(0), torch.tensor(0)
    torch.testing.assert_close(compiled(*inputs), noisy(*inputs))


# ---------------------------------------------------------------- factors made by hand


def test_nobody_vouches_for_factors_that_were_changed() -> None:
    """Twice the factors are twice the sensitivity: the bound of others must not come along."""
    (norms, stash), _ = two_stashes()
    clip = clip_to(norms, max_norm=0.5)
    changed = Clip({path: 2 * factors for path, factors in clip.factors.items()}, clip.sensitivity)
    for way in (lambda: clip._replace(factors=changed.factors), lambda: replace(clip, factors=changed.factors)):  # pyright: ignore
        with pytest.raises((AttributeError, TypeError)):
            way()
    for name, value in (("factors", changed.factors), ("sensitivity", clip.sensitivity / 2)):
        with pytest.raises(FdpError, match=f"Clip: expected its {name} to stay as they were made; make another"):
            setattr(clip, name, value)
    assert clip.masked(torch.ones(4)).bound == clip.double().bound == clip.bound is not None
    total = clipped_sum(stash, changed)
    with pytest.raises(FdpError, match="nothing vouches for its sensitivity"):
        add_gaussian(total, key=keys.key(0), step=0, noise_multiplier=1.0)


@pytest.mark.parametrize("declared", [False, True])
def test_a_clip_style_of_your_own_declares_its_sensitivity(declared: bool) -> None:
    model, params = small_model()
    data = {"x": randn(4, 5, 3).float()}
    plan = make_plan(model, params, data)

    def clip(norms: Norms, state: Tree) -> Clip:
        factors, bound = dict.fromkeys(norms.squared, 0.1 / norms.total()), torch.tensor(0.1)
        return declare_clip(factors, bound) if declared else Clip(factors, bound)

    style = clipping.flat(max_norm=1.0)._replace(name="mine", clip=clip)
    gradient = clipped_gradient(model, Mechanism(poisson(100, expected_batch_size=4), style, 1.0), plan)
    if declared:
        total = gradient(params, (), data, torch.ones(4)).total
        assert add_gaussian(total, key=keys.key(0), step=0, noise_multiplier=1.0)["w"].isfinite().all()
        return
    with pytest.raises(FdpError, match=r"clip style 'mine': expected a Clip that somebody vouches for.*declare_clip"):
        gradient(params, (), data, torch.ones(4))
