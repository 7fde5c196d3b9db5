"""Timings and their pages; a file with a main is a program. (Opacus installs a package of this name: ours is first.)"""
