"""Synthetic samples are valid, differ from each other, and reveal models that look across samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fdp import ops, tree
from fdp.checks.model_checks import check_independent, mix_samples
from fdp.checks.synthetic_samples import concatenate, make_synthetic_samples, nan_sample
from fdp.model import from_loss
from fdp.types import FdpError, Tree

WORDS, LENGTH = 23, 12


def packed(samples: int = 4, windows: int | None = None) -> dict[str, Tensor]:
    """Rows of two short documents and padding, none of them long: what a file may begin with."""
    draw = torch.Generator().manual_seed(1)
    shape = (samples,) if windows is None else (samples, windows)
    tokens = torch.randint(1, WORDS, (*shape, LENGTH + 1), generator=draw)
    segments = torch.tensor([1, 1, 2, 2, 2, *[0] * (LENGTH - 5)]).expand(*shape, -1).clone()
    return {"tokens": tokens, "segments": segments, "loss_mask": segments > 0}


TABLE = {"w": torch.randn(WORDS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))}
EXAMPLES: dict[str, Tree] = {
    "packed": packed(),
    "windows": packed(3, windows=2),
    "text": {"tokens": packed()["tokens"]},
    "positions": {"ids": packed()["tokens"], "position_ids": torch.arange(LENGTH + 1).expand(4, -1) % 3},
    "images": {"image": torch.randn(3, 1, 4, 4), "label": torch.tensor([4, 7, 7])},
    "tuple": (torch.randn(2, 5, dtype=torch.float64), torch.tensor([-100, 3])),
    "masked": {"tokens": packed()["tokens"], "mask": torch.ones(4, LENGTH + 1, dtype=torch.int64)},
    "bytes": torch.randint(0, 256, (3, 5), dtype=torch.uint8),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_synthetic_samples_have_the_shapes_and_dtypes_of_the_data_and_repeat(name: str) -> None:
    data = EXAMPLES[name]
    samples = [*make_synthetic_samples(data), nan_sample(data)]
    again = [*make_synthetic_samples(data), nan_sample(data)]
    for sample, same in zip(samples, again):
        for path, leaf in tree.flatten(sample.data).items():
            real = tree.flatten(data)[path]
            assert (leaf.shape, leaf.dtype) == ((1, *real.shape[1:]), real.dtype)
            assert torch.equal(leaf.nan_to_num(), tree.flatten(same.data)[path].nan_to_num())
    assert len(tree.leaves(concatenate(samples))[0]) == len(samples)


@pytest.mark.parametrize("name", EXAMPLES)
def test_integers_are_of_the_values_seen_so_that_an_index_stays_one(name: str) -> None:
    for sample in make_synthetic_samples(EXAMPLES[name]):
        for path, leaf in tree.flatten(sample.data).items():
            free = path in ("segments", "position_ids") or leaf.is_floating_point() or leaf.dtype == torch.bool
            known = {0, *tree.flatten(EXAMPLES[name])[path].flatten().tolist()}
            assert free or set(leaf.flatten().tolist()) <= known, (sample.words, path)
            assert path != "position_ids" or 0 <= int(leaf.min()) <= int(leaf.max()) <= LENGTH


def test_documents_are_one_many_and_none() -> None:
    counts = {
        sample.words: len(set(sample.data["segments"].flatten().tolist()) - {0})
        for sample in make_synthetic_samples(packed())
    }
    assert {0, 1, LENGTH // 2, LENGTH} <= set(counts.values())


# ---------------------------------------------------------------- what looks across samples


def plain(p: Tree, d: Tree) -> Tensor:
    return ops.embedding(d["tokens"], p["w"]).square().sum(-1).flatten(1).mean(1)


def longest_document(segments: Tensor) -> Tensor:
    """The number of tokens of the longest document of all samples."""
    same = segments.unsqueeze(-1) == segments.unsqueeze(-2)
    return (same & (segments > 0).unsqueeze(-1)).sum(-1).amax()


LOOKING: dict[str, Callable[[Tree, Tree], Tensor]] = {
    "the longest document": lambda p, d: plain(p, d) * torch.where(longest_document(d["segments"]) > 8, 2.0, 1.0),
    "the number of documents": lambda p, d: plain(p, d) / d["segments"].amax().clamp_min(2),
    "any padding": lambda p, d: plain(p, d) * (2.0 if bool((d["tokens"][..., 1] == 0).any()) else 1.0),
    "all of it padding": lambda p, d: plain(p, d) * (2.0 if bool((d["tokens"] == 0).flatten(1).all(1).any()) else 1.0),
    "no padding at all": lambda p, d: plain(p, d) + (1.0 if bool((d["segments"] > 0).all()) else 0.0),
    "all that counts": lambda p, d: plain(p, d) / (1 + d["loss_mask"].double().sum() / len(d["tokens"])),
    "equal tokens": lambda p, d: plain(p, d) + (d["tokens"].flatten(1).double().std(1) == 0).any(),
    "its place": lambda p, d: plain(p, d) + 1e-3 * torch.arange(len(d["tokens"])),
    "its neighbour": lambda p, d: plain(p, d) + 1e-3 * plain(p, d).roll(1),
    "how many": lambda p, d: plain(p, d) * (2.0 if len(d["tokens"]) > 6 else 1.0),
}


@pytest.mark.parametrize("windows", [None, 2])
@pytest.mark.parametrize("name", LOOKING)
def test_models_that_look_across_samples_are_refused_even_if_the_data_do_not_show_it(
    name: str, windows: int | None
) -> None:
    data = packed(windows=windows)
    with pytest.raises(FdpError, match="samples are not independent"):
        check_independent(from_loss(LOOKING[name], TABLE), TABLE, data)


@pytest.mark.parametrize("name", ["the longest document", "any padding", "its place", "its neighbour"])
def test_models_that_look_across_samples_are_refused_in_small_batches(name: str) -> None:
    with pytest.raises(FdpError, match="samples are not independent"):
        check_independent(from_loss(LOOKING[name], TABLE), TABLE, packed(2), at_most=3)


@pytest.mark.parametrize("windows", [None, 2])
def test_models_that_look_at_their_own_sample_pass(windows: int | None) -> None:
    def loss(p: Tree, d: Tree) -> Tensor:
        longest = torch.stack([longest_document(one) for one in d["segments"]])
        counted = d["loss_mask"].flatten(1).sum(1).clamp_min(1)
        return plain(p, d) * longest / counted

    check_independent(from_loss(loss, TABLE), TABLE, packed(windows=windows), tolerance=1e-12)


def test_the_error_names_the_samples_and_shows_no_loss() -> None:
    seen: list[float] = []

    def loss(p: Tree, d: Tree) -> Tensor:
        losses = 12345.678 * LOOKING["the longest document"](p, d)
        seen.extend(losses.tolist())
        return losses

    with pytest.raises(FdpError) as caught:
        check_independent(from_loss(loss, TABLE, name="mine"), TABLE, packed())
    message = str(caught.value)
    assert message.startswith("mine: the loss of a sample changed by 1.0e+00 of itself: sample 0 of the data has one")
    assert "beside a synthetic sample (one long document)" in message
    assert not any(f"{value:.4g}"[:4] in message for value in seen)


def test_a_cause_that_is_known_is_named_instead() -> None:
    with pytest.raises(FdpError, match=r"bounds nothing\. It is the table$"):
        check_independent(from_loss(LOOKING["its place"], TABLE), TABLE, packed(), cause="It is the table")


def test_samples_that_fail_only_together_are_refused_and_those_that_fail_alone_left_out() -> None:
    def equal_lengths(p: Tree, d: Tree) -> Tensor:
        lengths = (d["tokens"] != 0).flatten(1).sum(1)
        if bool((lengths != lengths[0]).any()):
            raise ValueError("expected equal lengths")
        return plain(p, d)

    with pytest.raises(FdpError, match=r"fails on a batch of \d+ samples .* although it accepts each of them alone"):
        check_independent(from_loss(equal_lengths, TABLE), TABLE, packed())

    def no_padding(p: Tree, d: Tree) -> Tensor:
        if bool((d["tokens"] == 0).any()):
            raise ValueError("expected no padding")
        return plain(p, d)

    check_independent(from_loss(no_padding, TABLE), TABLE, packed())


def test_a_mixed_batch_holds_the_data_and_synthetic_samples_of_finite_loss() -> None:
    def loss(p: Tree, d: Tree) -> Tensor:
        return plain(p, d) / (d["tokens"] != 0).sum(1).ge(LENGTH // 2)

    model, data = from_loss(loss, TABLE), packed()
    for at_most, expected in ((None, None), (5, 5), (4, 4), (2, 4)):
        mixed: Any = mix_samples(model, TABLE, data, at_most=at_most)
        assert torch.equal(mixed["tokens"][:4], data["tokens"])
        assert bool(torch.isfinite(model.loss(TABLE, mixed)).all())
        assert len(mixed["tokens"]) == (expected or 4 + 6)  # all but one token and padding
