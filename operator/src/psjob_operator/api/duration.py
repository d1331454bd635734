"""Durations as manifests write them: 30s, 5m, 1h30m."""

from __future__ import annotations

import re

PATTERN = "^([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,5}s)?$"
"""The same expression in CEL and in Python (both are linear in the text's length)."""


def seconds(text: str) -> float:
    """The duration in seconds. Raises ValueError, naming the text, where it is none."""
    found = re.fullmatch(PATTERN[1:-1], text, re.ASCII)
    if found is None or not text:
        raise ValueError(f"{text!r} is not a duration such as 30s, 5m or 1h30m")
    hours, minutes, rest = (int(part[:-1]) if part else 0 for part in found.groups())
    return float(hours * 3600 + minutes * 60 + rest)
