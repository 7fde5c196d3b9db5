"""The proof of privacy, one file per step of it.

sampling             which samples a step sees: Poisson, from the key
microbatches         the drawn samples in padded rows of fixed shape
clipping             factors that bound each sample's gradient by C
noise                the Gaussian mechanism: sum + z C N(0, I)
mechanism            sampling, clipping and noise multiplier as one value
accounting           epsilon of T steps, and the noise for a budget
loss_distributions   the privacy loss of composed steps, on a grid
composition          the same for every number of steps at once
selection            epsilon of the best of a random number of runs
guarantee            the promise of one run in words, and its marker
several_runs         the promises of several runs on the same data
shown_numbers        epsilon and delta as text, rounded up
"""
