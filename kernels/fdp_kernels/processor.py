"""The kind of CPU, by which the sizes of pieces that it computes at a time were measured.

>>> pieces = 1 << (19 if ON_ARM else 17)
"""

from __future__ import annotations

import platform

ON_ARM = platform.machine() in ("aarch64", "arm64")
