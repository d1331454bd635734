"""Which workers were given a start number and were not seen with it yet, as text: `3:0-2,7 4:5`.

Without it a failure would count twice when the operator dies between raising the number and creating the pod: the next one finds the
failed pod of the start before, and the one number for all workers does not tell whose failure it answered.
"""

from __future__ import annotations

from collections.abc import Mapping

from psjob_operator.plan import indexes


def to_text(pending: Mapping[int, int]) -> str:
    """The text for a map of index to start number."""
    groups: dict[int, list[int]] = {}
    for index, number in pending.items():
        groups.setdefault(number, []).append(index)
    return " ".join(f"{number}:{indexes.to_text(groups[number])}" for number in sorted(groups))


def to_map(text: str, below: int, most: int) -> dict[int, int]:
    """Start number by index, of indexes under `below` and numbers up to `most`; what is neither says nothing."""
    found: dict[int, int] = {}
    for group in text.split():
        number, _, which = group.partition(":")
        if number.isdecimal() and 0 < int(number) <= most:
            for index in indexes.to_set(which, below):
                found[index] = max(int(number), found.get(index, 0))
    return found
