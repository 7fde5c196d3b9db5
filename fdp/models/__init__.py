"""Models as stacks of blocks, and the named presets of the command line.

>>> model = build("gpt-nano", context=128)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fdp.model import Model
from fdp.models.classifiers import cnn as cnn
from fdp.models.classifiers import logistic as logistic
from fdp.models.classifiers import logits as logits
from fdp.models.classifiers import mlp as mlp
from fdp.models.gpt import GPTConfig as GPTConfig
from fdp.models.gpt import gpt as gpt
from fdp.models.llama import LlamaConfig as LlamaConfig
from fdp.models.llama import llama as llama
from fdp.types import FdpError

GPT2 = GPTConfig(layers=12, width=768, heads=12, context=1024, vocab_size=50257)
LANGUAGE: dict[str, GPTConfig | LlamaConfig] = {
    "gpt-nano": GPTConfig(layers=4, width=128, heads=4, context=128, vocab_size=256),
    "gpt2": GPT2,
    "gpt2-medium": GPT2._replace(layers=24, width=1024, heads=16),
    "gpt2-large": GPT2._replace(layers=36, width=1280, heads=20),
    "gpt2-xl": GPT2._replace(layers=48, width=1600, heads=25),
    "gpt3-175b": GPTConfig(layers=96, width=12288, heads=96, context=2048, vocab_size=50257),
    "gpt-1t": GPTConfig(layers=128, width=25600, heads=160, context=2048, vocab_size=51200),
    "llama-nano": LlamaConfig(
        layers=4, width=128, heads=4, key_heads=2, hidden=344, context=128, vocab_size=256
    ),
    "llama-1b": LlamaConfig(
        layers=16, width=2048, heads=32, key_heads=8, hidden=8192, context=2048, vocab_size=128256, tied=True,
        rope_base=500_000.0,
    ),
    "llama-7b": LlamaConfig(
        layers=32, width=4096, heads=32, key_heads=32, hidden=11008, context=2048, vocab_size=32000
    ),
    "llama-8b": LlamaConfig(
        layers=32, width=4096, heads=32, key_heads=8, hidden=14336, context=2048, vocab_size=128256,
        rope_base=500_000.0,
    ),
    "llama-13b": LlamaConfig(
        layers=40, width=5120, heads=40, key_heads=40, hidden=13824, context=2048, vocab_size=32000
    ),
    "llama-70b": LlamaConfig(
        layers=80, width=8192, heads=64, key_heads=8, hidden=28672, context=4096, vocab_size=32000
    ),
}  # fmt: skip
CLASSIFIERS: dict[str, Callable[..., Model]] = {
    "logistic": partial(logistic, inputs=64, classes=10),
    "mlp": partial(mlp, widths=(64, 128), classes=10),
    "cnn": partial(cnn, channels=(16, 32), side=8, classes=10),
}
PRESETS = (*LANGUAGE, *CLASSIFIERS)


def build(name: str, *, vocab_size: int | None = None, context: int | None = None, tied: bool | None = None) -> Model:
    """Build the preset ``name``, optionally with another vocabulary, context length or tying."""
    if name in CLASSIFIERS:
        if (vocab_size, context, tied) != (None, None, None):
            raise FdpError(f"model {name}: a classifier has no vocabulary, context or tied head; leave them out")
        return CLASSIFIERS[name](name=name)
    if name not in LANGUAGE:
        raise FdpError(f"model: expected one of {', '.join(PRESETS)}, got {name!r}")
    if context is not None and context < 1:
        raise FdpError(f"context: expected at least 1 token, got {context}")
    changes = {"vocab_size": vocab_size, "context": context, "tied": tied}
    config = LANGUAGE[name]._replace(**{field: value for field, value in changes.items() if value is not None})
    return gpt(config, name=name) if isinstance(config, GPTConfig) else llama(config, name=name)
