"""Measure curvature: which Fisher information, and the sums that its Kronecker factors are made of."""
