"""Generate text from a language model, one token after another.

    p = softmax(scores(window)[last] / temperature),   restricted to the most likely tokens of total mass top_p

Every token is one forward pass over the last ``context`` tokens, block by block (:mod:`fdp.run.forward`), so that it
works for every model and for sharded parameters. A generated text depends on the training data only through the
parameters: it is post-processing and costs nothing.

    >>> weights = forward_weights(model, params, dtype=torch.float32, device=device, sharding=None)
    >>> tokens = generate(weights, tokenizer.encode("Once"), window_of(example), Decoding(100, 0.8), key=key)
    >>> tokenizer.decode(tokens)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import keys, tree
from fdp.data.text import Tokenizer
from fdp.gradients.block_loop import Weights
from fdp.parallel import collectives
from fdp.run.forward import scores
from fdp.run.kept import evaluated_params
from fdp.run.step_record import Evaluation, StepRecord
from fdp.types import FdpError, Key, TrainState, Tree


class Decoding(NamedTuple):
    """The way text is generated: up to ``tokens`` tokens; temperature 0 takes the most likely token each time.

    Tokens from ``vocab_size`` on are never taken; ``end`` ends the text.
    """

    tokens: int
    temperature: float
    top_p: float = 1.0
    vocab_size: int | None = None
    end: int | None = None


def check_decoding(how: Decoding) -> None:
    """Refuse numbers out of range, by the names of their options."""
    if how.tokens < 1:
        raise FdpError(f"--tokens: expected at least 1, got {how.tokens}")
    if not 0 <= how.temperature < math.inf:
        raise FdpError(f"--temperature: expected 0 (the most likely token) or more, got {how.temperature:g}")
    if not 0 < how.top_p <= 1:
        raise FdpError(f"--top-p: expected a number above 0 and at most 1, got {how.top_p:g}")


def window_of(example: Tree) -> Tree:
    """Return an empty window with the entries of one sample, ``(1, ...)``: no token, and everything counts."""
    return {
        name: torch.zeros_like(leaf) if name == "tokens" else torch.ones_like(leaf) for name, leaf in example.items()
    }


def generate(weights: Weights, prompt: Sequence[int], window: Tree, how: Decoding, *, key: Key) -> list[int]:
    """Return the prompt and the tokens generated after it. Every rank calls it, and all return the same."""
    check_decoding(how)
    if not prompt:
        raise FdpError("prompt: expected at least one token to go on from, got an empty text; give a word")
    found = list(prompt)
    for i in range(how.tokens):
        logits = _next_scores(weights, found, window)
        token = _choose(logits[: how.vocab_size], how, keys.fold_in(key, i))
        sharding = weights.execution.sharding
        if sharding is not None:
            chosen = torch.tensor([token], device=weights.device)
            token = int(collectives.wait(collectives.broadcast(chosen, sharding.world)))
        if token == how.end:
            break
        found.append(token)
    return found


def attach_texts(
    stream: Iterable[tuple[TrainState, StepRecord]],
    write: Callable[[Tree], tuple[str, ...]] | None,
    steps: Sequence[int],
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on; after each of ``steps``, put the texts that ``write(params)`` returns into the record."""
    for state, record in stream:
        if write is not None and record.step in steps:
            found = record.evaluation or Evaluation(None, None, "public")  # the texts themselves cost nothing
            record = record._replace(evaluation=found._replace(texts=write(evaluated_params(state))))
        yield state, record


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens."""
    if tokenizer.decode is None:
        raise FdpError("tokenizer: expected one that turns tokens into text, got one that does not")
    return tokenizer.decode(tokens)


def _next_scores(weights: Weights, found: Sequence[int], window: Tree) -> Float[Tensor, " vocab"]:
    """Return the scores of the token after ``found``; a causal model does not see what stands behind it."""
    data = dict(window)
    context = window["tokens"].shape[-1] - 1
    seen = torch.tensor(list(found[-context:]))
    tokens = window["tokens"].clone()
    tokens.flatten()[: len(seen)] = seen  # in the first window, if a sample has several
    data["tokens"] = tokens
    data = tree.map(lambda leaf: leaf.to(weights.device), data)
    return scores(weights, data)[0, len(seen) - 1].double().cpu()


def _choose(logits: Float[Tensor, " vocab"], how: Decoding, key: Key) -> int:
    """Return the next token: the most likely, or a draw from (key)."""
    if how.temperature == 0:
        return int(logits.argmax())
    ordered, tokens = torch.softmax(logits / how.temperature, 0).sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept = torch.where(before < how.top_p, ordered, 0.0)  # the first is always kept
    drawn = keys.uniform(key, (1,), dtype=torch.float64) * kept.sum()
    return int(tokens[min(int(torch.searchsorted(kept.cumsum(0), drawn, right=True)), len(tokens) - 1)])
