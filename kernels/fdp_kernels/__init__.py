"""Device kernels of fdp, one per file. Imports nothing of ``fdp``."""
