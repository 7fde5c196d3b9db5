"""The ``fdp`` command: names and numbers in at the door, plain functions of :mod:`fdp` behind it."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str:
    """The installed version; of a source tree that is run in place, that it is one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "run from source, not installed"
