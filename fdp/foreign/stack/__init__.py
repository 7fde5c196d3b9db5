"""Split a module from elsewhere into blocks: before its layers, the layers, after; or one block."""
