"""Uses of parameters in a foreign module: which torch function is which operation, and its rule."""
