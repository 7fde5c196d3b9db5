"""Optional packages: which extra of fdp brings which, and the error that names it.

fdp imports an optional package where it is used. If the package is missing, the error says what needs it and how to
install it:

    >>> try:
    ...     import pyarrow
    ... except ImportError:
    ...     raise missing_package("pyarrow", purpose="to read .parquet files") from None
    FdpError: pyarrow is needed to read .parquet files and is not installed: pip install 'fdp[parquet]'
"""

from __future__ import annotations

from fdp.types import FdpError

EXTRA_OF = {
    "transformers": "hf",
    "tokenizers": "hf",
    "peft": "hf",
    "pyarrow": "parquet",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "sklearn": "examples",
}
"""The extra in ``pyproject.toml`` that brings a package, by the name under which it is imported."""


def missing_package(package: str, *, purpose: str) -> FdpError:
    """Return the error for a package that is not installed; ``purpose`` goes on after "is needed"."""
    return FdpError(f"{package} is needed {purpose} and is not installed: pip install 'fdp[{EXTRA_OF[package]}]'")
