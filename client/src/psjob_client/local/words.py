"""Numbers as people read them. Pure."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def span(seconds: float | None) -> str:
    """`12 s`, `3 min 5 s`, `2 h 40 min`, `6 d 1 h`; empty where it is not known."""
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole < 86_400 else f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def amount(size: int | None) -> str:
    """`1.5 GiB`; empty where it is not known."""
    if size is None:
        return ""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.3g} {UNITS[unit]}"


def number(value: float | None) -> str:
    """Four digits; empty where there is none."""
    return "" if value is None else f"{value:.4g}"
