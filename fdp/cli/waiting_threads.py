"""Let threads that wait for each other sleep soon, so that a step does not stall on a machine that does other work.

At the end of every operation the threads of GNU's OpenMP wait for the last one by spinning, for milliseconds. If
another process holds that thread's core, the others burn theirs. With one busy process beside it on two cores, a step
of gpt-nano took 662 ms, private 1044; if threads spin for a thirtieth of that time and then sleep, 268 and 383.
With nothing beside it a step takes 2 to 3 % longer.

    >>> limit_spinning()           # before torch is imported
"""

from __future__ import annotations

import os

SPINS = 10_000
"""How often a waiting thread looks before it sleeps; by default 300,000 times."""


def limit_spinning() -> None:
    """Tell OpenMP so, unless the environment says how threads wait."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
