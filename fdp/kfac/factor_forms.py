"""The forms in which one side of a layer's curvature is stored: the same matrix at different costs.

dense      M = sum_t r_t r_t^T / w           n^2 numbers
columns    the rows r_t themselves           n k numbers for k tokens; M is never formed
softmax    diag(p) - P P^T                   the left side of a head, from its own probabilities: n k numbers
diagonal   the diagonal of M                 n numbers, exact if rows are one-hot; groups have one diagonal each
skip       the identity                      nothing

>>> Form("columns")
"""

from __future__ import annotations

from enum import Enum


class Form(Enum):
    """The form of one side.

    SOFTMAX is the true Fisher information, whatever Fisher information the other sides use. SKIP stores nothing and
    takes the side for the identity.
    """

    DENSE = "dense"
    COLUMNS = "columns"
    DIAGONAL = "diagonal"
    SOFTMAX = "softmax"
    SKIP = "skip"
