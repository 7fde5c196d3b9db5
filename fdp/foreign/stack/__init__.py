"""A foreign module as a stack of blocks."""
