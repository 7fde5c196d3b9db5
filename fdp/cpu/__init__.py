"""Operations that a CPU computes faster in another way than torch's own, with the same numbers up to rounding.

attention    causal attention, some queries at a time
gelu         GELU, its slope found with its value
layer_norm   layer norm with a scale and a bias of each sample's own
token_sums   sums over tokens
promise      whether what is computed is differentiated once, and by whom

On other devices, and where a graph is traced or samples are vectorised, they are torch's operations. So are GELU, layer
norm and the backward of attention unless their caller says that nothing will be differentiated twice, a sum of narrow
rows or on another processor than ARM, and layer norm without compiled loops.
"""
