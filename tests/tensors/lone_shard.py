"""Shard 1 of two without a coordinator: a test orders, and reads what it answers. No sockets; only the disk is real."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from psjob.process.config import Config, ProcessContext, ShardAddress
from psjob.shard.pending import Replies
from psjob.shard.server import Server
from tests.live.live_shards import NEVER
from tests.support.runkeys import handed

TABLE = [{"name": f"w{i}", "shape": [256], "dtype": "float32", "group": i} for i in range(4)]
"""Four blocks, one per group, two of which are this shard's."""


class LoneShard:
    """Of attempt and term `attempt`; its run's folder is `folder`."""

    def __init__(self, checkpoints: Path, attempt: int = 1, mode: str = "sync", workers: int = 2) -> None:
        shards = (ShardAddress("127.0.0.1", 1, 0), ShardAddress("127.0.0.1", 2, 0))
        self.mode = mode
        config = Config("job", "run-1", "0" * 64, mode, 5, None, workers, shards, NEVER, "AllWorkers", 10.0, 60.0)
        place = ProcessContext(
            "shard", 1, "run-1", attempt, attempt, 0, "shard-1", config, None, checkpoints, 0, "", handed("shard", 1, attempt)
        )
        self.folder = checkpoints / "run-1"
        self.server = Server(place, self.folder)
        self.said: list[Mapping[str, Any]] = []
        self.server.control.answer = self.said.append

    def serving(self, table: list[dict[str, Any]] = TABLE) -> LoneShard:
        """Set up, with zeros in every block."""
        self.folder.mkdir(exist_ok=True, parents=True)
        self.order({"do": "setup", "setup": 1, "term": 1, "mode": self.mode, "rule": "sgd", "table": table})
        for index, cell in self.server.store.cells.items():
            if self.server.store.initialise(index, torch.zeros(cell.block.length)):
                self.server.initialised()
        self.order({"do": "open", "term": 1, "restore_id": 1})
        return self

    def order(self, body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What is answered to an order, once all disk work is done."""
        before = len(self.said)
        self.server.control.order(body)
        self.settle()
        return self.said[before:]

    def snapshot(self, number: int, base: int | None = None) -> list[Mapping[str, Any]]:
        """Write the blocks as they stand."""
        return self.order({"do": "snapshot", "snapshot": number, "step": -1, "marks": False, "base": base})

    def settle(self) -> None:
        """Come back when no thread of this shard has anything left to do."""
        self.server.control.disk.wait()

    def files(self) -> list[str]:
        """What lies in the run's folder."""
        return sorted(path.name for path in self.folder.iterdir())


def did(answers: list[Mapping[str, Any]]) -> list[str]:
    """The words of answers."""
    return [str(body["did"]) for body in answers]


class Answers(Replies):
    """Of one stream: how many answers it was given."""

    def __init__(self) -> None:
        self.count = 0

    def param(self, cell: Any, waiter: Any) -> None:
        self.count += 1

    rows = waiting = param
