"""Quantities of Kubernetes as numbers, and numbers of bytes for people."""

from __future__ import annotations

from decimal import Decimal

from psjob_operator.api.quantity import UNITS, quantity

__all__ = ["UNITS", "of_bytes", "quantity"]


def of_bytes(number: float | Decimal) -> str:
    """A number of bytes for people: 1.5 GiB."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
