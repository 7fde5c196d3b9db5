"""A training run: the loop over steps, its metrics, what it spent, and comparisons of two runs."""
