"""How status holds times, sets of indexes and sentences, as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from psjob_operator.api.status import MESSAGE_LIMIT
from psjob_operator.printable import printable


def stamp(at: float) -> str:
    """Unix seconds as RFC 3339 in UTC with whole seconds; the fraction is cut off."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def stamp_exact(at: float) -> str:
    """As `stamp`, with milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix(text: str | None) -> float | None:
    """Text as unix seconds; None where there is none, or where it is not such a time (then it is no fact)."""
    if not text:
        return None
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


def index_text(indexes: Iterable[int]) -> str:
    """A set of indexes as ranges in rising order, such as `0-2,5`; empty text for no index."""
    ranges: list[list[int]] = []
    for index in sorted(set(indexes)):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def index_set(text: str, below: int) -> frozenset[int]:
    """The indexes under `below` that the text names; parts that are not ranges name none (status can be edited by hand)."""
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdecimal() and (not high or high.isdecimal()):
            found.update(range(int(low), min(int(high or low), below - 1) + 1))
    return frozenset(index for index in found if index < below)


def starts_text(pending: Mapping[int, int]) -> str:
    """Which workers were given a start number and were not seen with it yet, as text: `3:0-2,7 4:5`.

    Without it a failure would count twice when the operator dies between raising the number and creating the pod. The next operator finds
    the failed pod of the start before, and the one number for all workers does not tell whose failure it answered.
    """
    groups: dict[int, list[int]] = {}
    for index, number in pending.items():
        groups.setdefault(number, []).append(index)
    return " ".join(f"{number}:{index_text(groups[number])}" for number in sorted(groups))


def starts_map(text: str, below: int, most: int) -> dict[int, int]:
    """Start number by index, of indexes under `below` and numbers up to `most`; what is neither says nothing."""
    found: dict[int, int] = {}
    for group in text.split():
        number, _, which = group.partition(":")
        if number.isdecimal() and 0 < int(number) <= most:
            for index in index_set(which, below):
                found[index] = max(int(number), found.get(index, 0))
    return found


def short(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """The text on one line, cut in its middle to `limit` characters: the start names, the end holds the error."""
    line = printable(" ".join(text.split()))
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
    ranges = index_text(which).split(",")
    listed = ",".join(ranges[:6]) + (",…" if len(ranges) > 6 else "")
    return f"{noun}{'' if len(which) == 1 else 's'} {listed}"
