"""Per-sample gradients: from taps to the clipped sum.

taps, vjp            differentiate a block and record every use of a parameter
rules                norm, weighted sum and cross term of a record (``sample_gradients``: its forms)
launches             rules applied to many records in one launch
costs, timing, plan  which rule to use for which leaf
block_loop           forward and backward, block by block
per_sample           norms in one backward, and the clipped sum
accumulate           the sum over microbatches
precondition         gradients mapped before clipping (``linear_maps``: by what)
scores               the logits of a forward pass, for comparisons
"""
