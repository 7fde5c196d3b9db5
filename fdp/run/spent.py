"""The epsilon spent on a state, from the steps that the state itself counts.

    epsilon(mechanism, steps=state.step)          and every release of statistics that the state has used

A number of steps typed by hand can be too small; the state's own count cannot.

    >>> state, metrics = step(state, batch, key)
    >>> spent(state, mechanism, delta=1e-6)
"""

from __future__ import annotations

from fdp.kfac.state import count_measurements
from fdp.privacy.accounting import Accountant, epsilon
from fdp.privacy.mechanism import Mechanism
from fdp.types import TrainState


def spent(state: TrainState, mechanism: Mechanism, *, delta: float, accountant: Accountant = Accountant.PLD) -> float:
    """Return the epsilon spent on ``state`` at ``delta``; 0 before the first step, ``inf`` without noise.

    ``mechanism`` must be the one of every step of the state. The epsilon covers the sums, the counts of adaptive
    clipping and the releases of statistics; not the metrics, and not other states trained on the same data.

    Guarantees:
      - at least the epsilon of ``state.step`` steps;
      - statistics released for a step still to come are charged for, together with that step.
    """
    steps, more = int(state.step), mechanism.statistics
    if more is not None and (released := count_measurements(state.opt)) > more.releases(steps):
        steps = (released - 1) * more.period + 1
    return epsilon(mechanism, steps=steps, delta=delta, accountant=accountant) if steps else 0.0
