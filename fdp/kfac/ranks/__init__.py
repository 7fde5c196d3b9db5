"""Curvature on several ranks: sum factors, gather columns, and invert in a ring or by one owner per layer."""
