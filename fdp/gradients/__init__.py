"""Per-sample gradients: from taps to the clipped sum.

taps, vjp            differentiate a block and record every use of a parameter
rules                norm, weighted sum and cross term of a record (``sample_gradients``: its forms)
launches             rules applied to many records in one launch
eight_bits           gradients rounded to 8 bits between norm and sum
costs, timing, plan  which rule to use for which leaf
execution            how a step is computed: sharding, memory, eager or compiled runner
block_loop           forward and backward, block by block
per_sample           norms in one backward
clipped_sum          the clipped sum (``lazy_sum``: evaluated later, with the noise)
accumulate           the sum over microbatches
precondition         gradients mapped before clipping (``linear_maps``: by what)
scores               the logits of a forward pass, for comparisons
"""
