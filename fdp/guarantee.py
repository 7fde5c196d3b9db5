"""What a run promises, in words and numbers: the neighbour relation, and how small delta must be.

>>> delta = default_delta(sampling.population)
"""

from __future__ import annotations

RELATION = "add or remove one sample; sampling rate public"
"""The neighbour relation of every epsilon, in the words that users see."""


def delta_advice(population: int, delta: float) -> str | None:
    """Return a warning where ``delta`` is too large to mean much for that many samples, else None.

    Publishing one sample, picked at random, is (0, 1 / population)-private: such a delta allows it.
    """
    if delta < 1 / population:
        return None
    return (
        f"delta {delta:g} is not below 1 / population = {1 / population:.3g}: publishing one sample outright would "
        f"pass. Use {default_delta(population):g} or less"
    )


def default_delta(population: int) -> float:
    """Return ``min(1e-6, 0.01 / population)``, rounded down to one digit: ``population * delta <= 0.01``.

    ``population`` is the public number of samples, so that delta says nothing about the private one.
    """
    most = min(1e-6, 0.01 / population)
    digits, _, exponent = f"{most:.15e}".partition("e")
    return float(f"{int(float(digits))}e{exponent}")
