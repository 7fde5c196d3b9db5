"""Curvature on several ranks: add factors, gather columns, pass them in a ring, divide the work."""
