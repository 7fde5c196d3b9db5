"""The texts of ``--sample``: generated at every evaluation, from the parameters alone.

>>> write = make_writer(options, run)                   # None without --sample
>>> write(state.params)                                 # ("Once upon a time ...",)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fdp import keys
from fdp.cli.check_data import load_tokenizer
from fdp.cli.model_and_data import is_folder
from fdp.cli.train_options import TrainOptions
from fdp.data import text
from fdp.data.files import find_token_files
from fdp.parallel.sharding import over_tensor_axis
from fdp.run.evaluation_config import default_every, planned_steps
from fdp.run.forward import forward_weights
from fdp.run.generate import Decoding, decode, generate, window_of
from fdp.run.prepare_run import Run
from fdp.types import FdpError, Tree

TEMPERATURE = 0.8


def make_writer(options: TrainOptions, run: Run) -> Callable[[Tree], tuple[str, ...]] | None:
    """Return a function from parameters to one text per ``--sample``; None without any. Every rank calls it.

    The draws are from a public key: the texts show what the parameters say, and no noise of the run.
    """
    given, config = options.evaluation, run.config
    if not given.sample:
        return None
    model = config.model if run.sharding is None else over_tensor_axis(config.model, run.sharding.mesh)
    if model.vocab_size is None:
        raise FdpError(
            f"--sample: expected a language model to write text, got the classifier {model.name}; leave --sample out"
        )
    tokenizer = _tokenizer(options)
    window = window_of(config.dataset.fetch(np.arange(1)))
    how = Decoding(given.sample_tokens, TEMPERATURE, 1.0, tokenizer.vocab_size, tokenizer.end)
    prompts = {prompt: tokenizer.encode(prompt) for prompt in given.sample}
    if empty := [prompt for prompt, tokens in prompts.items() if not tokens]:
        raise FdpError(f"--sample: expected a prompt of at least one token, got {empty[0]!r}")
    key = keys.fold_in(keys.key(0), "sample text")

    def write(params: Tree) -> tuple[str, ...]:
        place = {"dtype": config.dtype, "device": config.device, "sharding": run.sharding}
        weights = forward_weights(model, params, **place)
        texts = (generate(weights, prompts[prompt], window, how, key=key) for prompt in given.sample or ())
        return tuple(decode(tokenizer, found) for found in texts)

    return write


def text_steps(options: TrainOptions) -> tuple[int, ...]:
    """Return the steps after which texts are generated: those of the evaluations."""
    steps, every = options.training.steps, options.evaluation.eval_every
    return planned_steps(default_every(steps) if every is None else every, steps)


def _tokenizer(options: TrainOptions) -> text.Tokenizer:
    folder = Path(options.model.model) if is_folder(options.model.model) else None
    found = load_tokenizer(options.data.tokenizer, folder, options.data.data)
    if found is None and find_token_files(Path(options.data.data)):
        raise FdpError(
            f"--sample: expected a tokenizer to read the prompt and to write text, got --data {options.data.data} of "
            "token ids without one; give its folder with --tokenizer"
        )
    return found or text.BYTES
