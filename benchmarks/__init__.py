"""Timings and their pages; each file is a program. (Opacus installs a package of this name: this one comes first.)"""
