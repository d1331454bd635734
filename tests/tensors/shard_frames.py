"""A shard without sockets, and frames of every kind for it, right and wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from psjob.wire.auth import Peer
from psjob.wire.frame import Kind
from tests.tensors.whole_shard import HELLO, LAYOUT, NUMBERS, RECORD, ROWS, WholeShard

WORKER, SHARD = Peer("worker", 0, 1), Peer("shard", 1, 1)
INFO = {"hyperparameters": [NUMBERS], "rows": [{"lr": 0.1}], "none": [], "nonFinite": None, "clip": None, "clamp": None}
BLOCK = LAYOUT.blocks[0]
BODIES: dict[Kind, Any] = {
    Kind.HELLO: HELLO, Kind.INFO: INFO, Kind.REPORT: {"loss": 0.5, "accuracy": "nan"}, Kind.CHECKPOINT: {}, Kind.STOP: {},
    Kind.HEARTBEAT: {},
    Kind.INPUTS: {"steps": [[0, 12345]]},
    Kind.DIGEST: {"look": "whole", "clock": 16, "kinds": "tf", "sums": [1, 2], "names": ["a", "b"], "numbers": [{"lr": 0.1}]},
    Kind.CODEC: {"pull": "bf16"}, Kind.MARK: {}, Kind.LEAVE: {},
}  # fmt: skip
RAW: dict[Kind, bytes] = {
    Kind.PUSH: bytes(BLOCK.nbytes), Kind.EARLY: bytes(BLOCK.nbytes), Kind.INIT: bytes(BLOCK.nbytes), Kind.RECORD: RECORD,
    Kind.RECORD_PIECE: RECORD, Kind.RECORD_DELTA: RECORD[:9], Kind.LOOKUP: bytes(8), Kind.ROW_PUSH: bytes(8 + 4 * ROWS["dim"]),  # type: ignore[operator]
    Kind.ROW_INIT: bytes(8 + 4 * ROWS["dim"]), Kind.PULL: b"", Kind.STATE: b"", Kind.ROW_IDS: bytes(8),  # type: ignore[operator]
}  # fmt: skip
ANSWERS: list[Any] = [
    {"did": "where", "ask": 1, "rows": [[0, 0, 0]], "lo": 0, "hi": 0, "owned": 1, "stored": 0},
    {"did": "restored", "restore_id": 1, "complete": {"0": 3}, "lo": 0, "hi": 0, "owned": 1, "stored": 0},
    {"did": "written", "snapshot": 1, "file": None,
     "blocks": [{"index": 0, "file": "v000001-c000001-x", "attempt": 1, "n": 3, "counts": {}}],
     "table": {"file": {"name": "x.json", "bytes": 9, "crc": 1, "tensors": {}}, "left": {"0": 4}, "complete": {"0": 3}}, "rows": None},
    {"did": "unwritten", "snapshot": 1, "why": "the volume is full", "full": True},
    {"did": "progress", "doing": "writing", "snapshot": 1, "restore_id": 1, "done": 5, "total": 9},
    {"did": "initialised", "setup": 1}, {"did": "doubts"}, {"did": "ready", "snapshot": 1}, {"did": "counts", "applied": 5, "dropped": 0},
    {"did": "arrived", "restore_id": 1, "push": [0, 3], "base": None, "carried": 0},
    {"did": "measured", "restore_id": 1, "version": 3, "limit": 1.0, "squares": 4.0, "nan": False},
    {"did": "staleness", "attempt": 1, "lag": {"count": 1, "sum": 2, "max": 2, "buckets": [[1, 1]]}, "gap": None},
]  # fmt: skip
"""What another shard answers."""


class Standing:
    """A shard that serves; one that a case has spoilt, as a process with a key may, is put back."""

    def __init__(self, folder: Path, mode: str, shards: int = 1) -> None:
        self._folder, self._mode, self._shards, self._number = folder, mode, shards, 0
        self.shard = self._made()

    def _made(self) -> WholeShard:
        self._number += 1
        made = WholeShard(self._folder / str(self._number), self._shards, self._mode)
        if self._shards == 1:
            made.begin()
        return made

    def again(self) -> None:
        """After a case: it serves on, or is another one."""
        if self.shard.spoilt:
            self.close()
            self.shard = self._made()

    def close(self) -> None:
        self.shard.close()
