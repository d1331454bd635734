"""A shard's admission table as a file of its own beside its blocks: what it had taken of each worker, and which process had sent it.

The rows are those of `psjob.shard.admission.Admission.save`, keyed by rank. In the file a worker is six values; the blocks of its open
clock are one bit each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from psjob.checkpoint import files
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import Manifest
from psjob.checkpoint.problems import Damage
from psjob.layout.blocks import assign

FORMAT: Final = 1
Rows = Mapping[str, Mapping[str, Any]]


def write_admission(folder: Path, name: str, rows: Rows) -> FileFact:
    """Write the table durably, whole or not at all. Raises CheckpointProblem."""
    packed = [[int(rank), row["complete"], row["leftAt"], *row["incarnation"], _bits(row["open"])] for rank, row in rows.items()]
    return files.write_json(folder, name, {"format": FORMAT, "rows": packed})


def read_admission(folder: Path, made: Manifest, shard: int) -> dict[str, dict[str, Any]] | None:
    """The table that `shard` had in checkpoint `made`, None where it has none. Raises Damage or CheckpointProblem."""
    fact = made.tables.get(str(shard))
    if fact is None:
        return None
    body = files.read_json(folder / fact.name, fact)
    try:
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}")
        most = len(made.layout.blocks) + (0 if made.rows is None else len(made.rows.specs))
        rows = {
            str(int(rank)): {
                "complete": int(complete), "leftAt": None if left is None else int(left),
                "incarnation": [int(start), int(rewinds)], "open": _positions(bits, most),
            }
            for rank, complete, left, start, rewinds, bits in body["rows"]
        }  # fmt: skip
        if not rows.keys() <= made.workers.keys():
            raise ValueError(f"ranks of {len(rows)} workers, which are not all of the job's {len(made.workers)}")
        return rows
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Damage(fact.name, "an admission table", f"{type(error).__name__}: {str(error)[:200]}") from None


def open_blocks(made: Manifest, tables: Mapping[int, Rows]) -> dict[int, set[int]]:
    """By rank, the blocks that hold its push of the very clock at which it goes on; `tables` are those of the shards that wrote `made`.

    A worker that died in the middle of a push leaves it in some blocks. It comes again, and must not count there a second time.
    """
    owner = assign(made.layout, made.shards)
    found: dict[int, set[int]] = {}
    for shard, rows in tables.items():
        own = [block for block, held_by in enumerate(owner) if held_by == shard]  # in the order of their positions
        for rank, row in rows.items():
            if row["complete"] == made.workers[rank]["clock"]:
                held = {own[position] for position in row["open"] if position < len(own)}
                found.setdefault(int(rank), set()).update(held)
    return found


def _bits(positions: list[int]) -> str:
    return format(sum(1 << position for position in positions), "x")


def _positions(bits: str, most: int) -> list[int]:
    if not isinstance(bits, str) or len(bits) > most // 4 + 1:
        raise ValueError(f"open blocks {str(bits)[:40]!r}, expected hex digits of {most} bits")
    # To shift a number of so many bits by each of them takes seconds.
    return [position for position, bit in enumerate(reversed(f"{int(bits, 16):b}")) if bit == "1"]
