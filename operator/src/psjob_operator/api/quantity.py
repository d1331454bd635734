"""Quantities of Kubernetes, such as 500m and 2Gi, as numbers."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

UNITS = {"": Decimal(1), "m": Decimal("0.001"), **{letter: Decimal(1000 ** (i + 1)) for i, letter in enumerate("kMGTPE")}}
UNITS |= {f"{letter}i": Decimal(1024 ** (i + 1)) for i, letter in enumerate("KMGTPE")}
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|[kMGTPE]|[KMGTPE]i)?", re.ASCII)


def quantity(value: Any) -> Decimal | None:
    """`value` as a number of its base unit (cores, bytes, pieces); None where it is no quantity in decimal form."""
    found = QUANTITY.fullmatch(str(value)) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    return Decimal(found[1]) * UNITS[found[2] or ""] if found else None
