"""Invert curvature and apply the inverse to a gradient."""
