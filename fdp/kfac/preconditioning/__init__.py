"""Multiply gradients by preconditioners: one layer at a time, compiled, or sharded over ranks."""
