"""Generation of text: the choice of a token, the window, and texts in the records of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fdp import keys
from fdp.data.text import BYTES
from fdp.models import GPTConfig, gpt
from fdp.run.forward import forward_weights
from fdp.run.generate import Decoding, _choose, attach_texts, check_decoding, decode, generate, window_of
from fdp.run.step_record import StepRecord
from fdp.types import FdpError, TrainState

MODEL = gpt(GPTConfig(layers=2, width=16, heads=2, context=8, vocab_size=300))
PARAMS = MODEL.init(keys.key(0))
WINDOW = window_of({"tokens": torch.zeros(1, 9, dtype=torch.int64)})
WEIGHTS = forward_weights(MODEL, PARAMS, dtype=torch.float32, device=torch.device("cpu"), sharding=None)


def greedy(tokens: list[int], count: int) -> list[int]:
    """Take the most likely token, from the scores of the model's own blocks on a full window without padding."""
    found = list(tokens)
    for _ in range(count):
        seen = found[-8:]
        row = torch.tensor([[*([0] * 9)]])
        row[0, : len(seen)] = torch.tensor(seen)
        carry: Any = ()
        flat = {path: leaf for block in (PARAMS,) for path, leaf in _flat(block).items()}
        for block in MODEL.blocks[:-1]:
            carry = block.apply({name: flat[path] for name, path in block.params.items()}, carry, {"tokens": row})
        last = MODEL.blocks[-1]
        assert last.outputs is not None
        scores: Tensor = last.outputs.scores({k: flat[p] for k, p in last.params.items()}, carry, {"tokens": row})
        found.append(int(scores[0, len(seen) - 1, :256].argmax()))
    return found


def _flat(params: Any) -> dict[str, Tensor]:
    from fdp import tree

    return tree.flatten(params)


def test_greedy_text_is_the_most_likely_token_of_a_sliding_window() -> None:
    how = Decoding(12, 0.0, vocab_size=256)
    assert generate(WEIGHTS, [5, 7], WINDOW, how, key=keys.key(0)) == greedy([5, 7], 12)


def test_several_windows_and_a_mask_change_nothing() -> None:
    """A sample of a user has several windows; the text is in the first."""
    users = window_of({"tokens": torch.zeros(1, 3, 9, dtype=torch.int64), "loss_mask": torch.zeros(1, 3, 8)})
    how = Decoding(6, 0.0)
    assert generate(WEIGHTS, [5], users, how, key=keys.key(0)) == generate(WEIGHTS, [5], WINDOW, how, key=keys.key(0))


def test_draws_follow_the_temperature_and_top_p_and_repeat_with_the_key() -> None:
    how, key = Decoding(1, 1.0), keys.key(1)
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    drawn = torch.tensor([_choose(logits, how, keys.fold_in(key, i)) for i in range(3000)])
    shares = [float((drawn == token).double().mean()) for token in range(3)]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.04)
    nucleus = {_choose(logits, how._replace(top_p=0.6), keys.fold_in(key, i)) for i in range(200)}
    assert nucleus == {0, 1}
    assert {_choose(logits, how._replace(top_p=1e-9), keys.fold_in(key, i)) for i in range(50)} == {0}
    texts = [generate(WEIGHTS, [5], WINDOW, Decoding(9, 1.0), key=keys.key(seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_text_ends_at_the_end_token() -> None:
    first = generate(WEIGHTS, [5], WINDOW, Decoding(3, 0.0), key=keys.key(0))
    assert generate(WEIGHTS, [5], WINDOW, Decoding(3, 0.0, end=first[1]), key=keys.key(0)) == [5]


def test_bytes_become_text_and_mistakes_are_named() -> None:
    assert decode(BYTES, [*"né".encode(), 300]) == "né?"
    for how, flag in (
        (Decoding(0, 1.0), "--tokens"),
        (Decoding(1, -1.0), "--temperature"),
        (Decoding(1, 1.0, 0.0), "--top-p"),
    ):
        with pytest.raises(FdpError, match=f"{flag}: expected"):
            check_decoding(how)
    with pytest.raises(FdpError, match="expected at least one token to go on from"):
        generate(WEIGHTS, [], WINDOW, Decoding(1, 1.0), key=keys.key(0))


def test_texts_are_put_into_the_records_of_their_steps() -> None:
    state = TrainState({"w": torch.ones(1)}, (), (), torch.tensor(1))
    records = [StepRecord(step, None, None, None, None, None, None, None, 0, 1.0) for step in (1, 2, 3)]
    found = list(attach_texts(((state, record) for record in records), lambda params: ("a", "b"), (2,)))
    assert [record.evaluation and record.evaluation.texts for _, record in found] == [None, ("a", "b"), None]
    assert found[1][1].evaluation.cost == "public"  # pyright: ignore
