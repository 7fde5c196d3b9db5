"""The proof of privacy, one file per step of it.

sampling     which samples a step sees: Poisson, from the key
clipping     factors that bound each sample's gradient by C
noise        the Gaussian mechanism: sum + z C N(0, I)
mechanism    sampling, clipping and noise multiplier as one value
accounting   epsilon of T steps (``composition``: for every T at once)
guarantee    the promise in words
"""
