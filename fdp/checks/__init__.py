"""Checks that a private step relies on.

gate               settings and batches that a step refuses
model_checks       samples are independent, norms are right
synthetic_samples  samples to try besides the real ones
first_call         the checks that a step runs at its first call
"""
