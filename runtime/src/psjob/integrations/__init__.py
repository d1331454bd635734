"""psjob in other training libraries. A module here is imported by the script that uses its library, and imports that library."""

from __future__ import annotations


def needs(package: str, missing: ImportError) -> ImportError:
    """The sentence for a library that is not installed."""
    return ImportError(f"psjob.integrations.{package} needs the package {package}, and {missing.name} is missing: pip install {package}")
