"""Text for people in status: short, on one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from psjob_operator.api.status import MESSAGE_LIMIT
from psjob_operator.plan import indexes


def short(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """The text on one line, cut in its middle to `limit` characters: the start names, the end holds the error."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    head = limit * 2 // 3
    return f"{line[:head]}…{line[-(limit - head - 1) :]}"


def reason(text: str, otherwise: str = "Waiting") -> str:
    """The text as a condition's reason (one CamelCase word); `otherwise` where it is none."""
    return text[:64] if re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", text[:64]) else otherwise


def count(number: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def named(noun: str, which: Sequence[int]) -> str:
    """`shard 1`, `shards 0-2`; the list is cut after some ranges."""
    ranges = indexes.to_text(which).split(",")
    listed = ",".join(ranges[:6]) + (",…" if len(ranges) > 6 else "")
    return f"{noun}{'' if len(which) == 1 else 's'} {listed}"
