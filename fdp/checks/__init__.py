"""Checks that a private step relies on.

gate               refuse settings and batches that would break the guarantee
model_checks       check that samples are independent and norms are right
synthetic_samples  samples with unusual values, to try besides the real ones
first_call         the checks that a step runs at its first call
equal_sizes        a sample adds the same to the sum in microbatches of every size
"""
