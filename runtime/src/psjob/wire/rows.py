"""Sizes of the frames that carry a table's rows, the same for those who send and those who check."""

from __future__ import annotations

from typing import Final

ID_BYTES: Final = 8
LOOKUP_BYTES: Final = 4 << 20
"""A lookup asks for at most so many bytes of rows; a larger one is several."""
MAX_PUSH_BYTES: Final = 1 << 30
"""A clock's rows of one table and shard, ids and gradients."""
ID_PAGE: Final = LOOKUP_BYTES // ID_BYTES
"""Ids that one ROW_IDS answers with, at most."""
LOOKUPS: Final = 12
"""Lookups on their way between a worker and one shard."""
LENT_ANSWERS: Final = LOOKUPS * LOOKUP_BYTES
"""Memory that a shard lends to a worker of its host for rows, a place for each lookup."""
LENT_PUSHES: Final = 1 << 30
"""Memory that a worker lends for what it pushes in a clock, to all shards. Like the other it costs what is touched of it."""
ALIGNED: Final = 64
"""What is lent begins at a multiple of so many bytes."""


def row_bytes(dim: int) -> int:
    """One row in a ROW_PUSH or ROW_INIT: its id and `dim` elements of 4 bytes."""
    return ID_BYTES + 4 * dim


def lookup_limit(dim: int) -> int:
    """How many ids one LOOKUP may have, which is also how many rows of first values a ROW_INIT has."""
    return max(1, LOOKUP_BYTES // (4 * dim))


def push_limit(dim: int) -> int:
    """How many rows one ROW_PUSH may have."""
    return max(1, MAX_PUSH_BYTES // row_bytes(dim))
