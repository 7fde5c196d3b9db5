"""Measure the Kronecker factors of a model's Fisher information on a microbatch."""
