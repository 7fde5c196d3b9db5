"""The forms in which one side of a layer's curvature is kept: one matrix, at different costs.

dense      M = sum_t r_t r_t^T / w           n^2 numbers
columns    the rows r_t themselves           n k numbers for k tokens; M is never formed
softmax    diag(p) - P P^T                   the left side of a head, from its own probabilities: n k numbers
diagonal   the diagonal of M                 n numbers; exact where rows are one-hot; of groups, each one's own
skip       the identity                      nothing

>>> Form("columns")
"""

from __future__ import annotations

from enum import Enum


class Form(Enum):
    """What is kept of a side.

    SOFTMAX is the true Fisher information, whichever the gradients of the other sides are of; SKIP is nothing, the side
    is taken for the identity.
    """

    DENSE = "dense"
    COLUMNS = "columns"
    DIAGONAL = "diagonal"
    SOFTMAX = "softmax"
    SKIP = "skip"
