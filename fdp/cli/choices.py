"""Names that options of the command line accept, for shell completion, which must not wait for torch.

fdp train --method <Tab>                            # auto  ghost  ghost_bk ...

The values behind the names are in :mod:`fdp.cli.names` and :mod:`fdp.cli.configure`; a test compares the two.
"""

from __future__ import annotations

MODELS = (
    "gpt-nano",
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-175b",
    "gpt-1t",
    "llama-nano",
    "llama-1b",
    "llama-7b",
    "llama-8b",
    "llama-13b",
    "llama-70b",
    "logistic",
    "mlp",
    "cnn",
)
DATA = ("stdlib", "digits")
FORMS = ("auto", "text", "completion", "messages", "file")
UNITS = ("window", "record", "user", "row")
CLIPS = ("flat", "per-layer", "automatic", "quantile")
METHODS = ("auto", "ghost", "ghost_bk", "flash", "flash_bk", "materialize", "none")
OPTIMIZERS = ("adamw", "adam", "sgd", "lamb", "adafactor", "adagrad", "adadelta", "adamax", "kfac")
SCHEDULES = ("constant", "cosine", "linear")
DTYPES = ("auto", "float32", "bfloat16")
SUM_DTYPES = ("float64", "float32")
STORED_DTYPES = ("auto", "full", "int8")
MOMENTS = ("float32", "bfloat16")
COMPILE = ("auto", "none", "block", "step")
DEVICES = ("auto", "cpu", "cuda")
