"""Benchmarks; a file with a ``main`` is a program. (Opacus installs a package of this name: ours comes first.)"""
