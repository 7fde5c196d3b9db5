"""Advice on the settings of a private run: recipes, signal against noise, and hints while it trains."""
