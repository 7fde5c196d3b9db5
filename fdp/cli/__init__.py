"""The ``fdp`` command: it turns names and numbers into values, and calls the functions of :mod:`fdp` with them."""
