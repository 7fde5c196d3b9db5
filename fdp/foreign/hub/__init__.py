"""Folders in the format of ``transformers``: read, convert to a stack, save."""
