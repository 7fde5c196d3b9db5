"""The folder of files that fdp makes for itself: measured times, tokens of large data, compiled loops.

>>> times = cache_folder() / "timings.json"
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$FDP_CACHE``, else ``$XDG_CACHE_HOME/fdp``, else ``~/.cache/fdp``."""
    base = os.environ.get("FDP_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fdp")
    return Path(base).expanduser()
