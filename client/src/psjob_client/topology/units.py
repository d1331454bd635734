"""Bytes, rates and times as people write them: 160MB, 16GB/s, 10Gb/s, 50us."""

from __future__ import annotations

import math
import re

MOST_BYTES = 1e18
_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?)"
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def rate(given: object) -> float:
    """Bytes a second of a number, or of text such as 16GB/s, 1.2GiB/s or 10Gb/s (bits). Raises ValueError."""
    found = re.fullmatch(rf"{_NUMBER} ?([kKMGT]i?)?([Bb])(?:/s|ps)", given) if isinstance(given, str) else None
    if found is not None:
        value = float(found[1]) * _PREFIX[found[2] or ""] / (8 if found[3] == "b" else 1)
    else:
        value = _plain(given, "a bandwidth such as 16GB/s or 10Gb/s")
    if not value > 0:
        raise ValueError(f"must be more than 0 bytes a second, not {given}")
    return value


def seconds(given: object) -> float:
    """Seconds of a number, or of text such as 50us or 1.5ms. Raises ValueError."""
    found = re.fullmatch(rf"{_NUMBER} ?(s|ms|us|µs|ns)", given) if isinstance(given, str) else None
    return float(found[1]) * _TIME[found[2]] if found is not None else _plain(given, "a time such as 50us or 1.5ms")


def size(given: object) -> float:
    """Bytes of a number, or of text such as 160MB or 64KiB. Raises ValueError."""
    found = re.fullmatch(rf"{_NUMBER} ?([kKMGT]i?)?B", given) if isinstance(given, str) else None
    value = float(found[1]) * _PREFIX[found[2] or ""] if found is not None else _plain(given, "a size such as 160MB or 64KiB")
    if not 1 <= value <= MOST_BYTES:
        raise ValueError(f"must be 1 byte to {MOST_BYTES / 1e12:.0f}TB, not {given}")
    return value


def show_seconds(value: float) -> str:
    """Three digits and a unit: 60.0 ms, 5.19 ms, 350 µs."""
    return _shown(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))


def show_bytes(value: float) -> str:
    """Three digits and a unit: 160 MB."""
    return _shown(value, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def show_rate(value: float) -> str:
    """Three digits and a unit: 16.0 GB/s."""
    return f"{show_bytes(value)}/s"


def _plain(given: object, wanted: str) -> float:
    if isinstance(given, str) and re.fullmatch(_NUMBER, given):
        given = float(given)
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or given < 0:
        raise ValueError(f"must be {wanted}")
    return float(given)


def _shown(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if value == 0:
        return "0"
    unit, scale = next((pair for pair in units if value >= pair[1] * 0.9995), units[-1])
    number = value / scale
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f} {unit}"
