"""Faster ways to compute the same step: compiled blocks, chunked and fused heads, one-pass updates, CUDA graphs."""
