"""Amounts and times as manifests write them: quantities of Kubernetes such as 500m and 2Gi, durations such as 30s and 1h30m."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)((?P<unit>[KMGTPE]i|[numkMGTPE])|(?P<exponent>[eE][+-]?[0-9]+))?", re.ASCII
)
"""As in apimachinery's resource.ParseQuantity."""
UNITS = {"": Decimal(1), "m": Decimal("0.001"), **{letter: Decimal(1000 ** (i + 1)) for i, letter in enumerate("kMGTPE")}}
UNITS |= {f"{letter}i": Decimal(1024 ** (i + 1)) for i, letter in enumerate("KMGTPE")}
DURATION = "^([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,5}s)?$"
"""The same expression in CEL and in Python (both are linear in the text's length)."""


def quantity(value: Any) -> Decimal | None:
    """`value` as a number of its base unit (cores, bytes, pieces). None for what is no quantity, or is written with a sign or an exponent,
    or in millionths or less."""
    found = QUANTITY.fullmatch(str(value)) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    if found is None or found["sign"] or found["exponent"] or (found["unit"] or "") not in UNITS:
        return None
    return Decimal(found["number"]) * UNITS[found["unit"] or ""]


def seconds(duration: str) -> float:
    """The duration in seconds. Raises ValueError, naming the text, if it is none."""
    found = re.fullmatch(DURATION[1:-1], duration, re.ASCII)
    if found is None or not duration:
        raise ValueError(f"{duration!r} is not a duration such as 30s, 5m or 1h30m")
    hours, minutes, rest = (int(part[:-1]) if part else 0 for part in found.groups())
    return float(hours * 3600 + minutes * 60 + rest)
