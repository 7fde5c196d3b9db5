"""Invert damped curvature: dense, diagonal, low-rank (Woodbury) and softmax factors, one by one or in batches."""
