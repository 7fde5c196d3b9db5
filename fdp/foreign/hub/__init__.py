"""Models in the format of ``transformers``: read a folder, convert the module to a stack of blocks, write a folder."""
