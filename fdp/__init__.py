"""fdp: functional, differentially private, fully sharded training on PyTorch."""
