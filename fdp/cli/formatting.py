"""Versions as text."""

from __future__ import annotations

from importlib import metadata


def package_version(package: str) -> str:
    """Return the installed version, or say that the package runs from source."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "run from source, not installed"
