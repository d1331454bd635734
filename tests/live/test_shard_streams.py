"""Streams between a shard and a coordinator that decides, cut at every message: nobody goes back, and the decisions replay to the bits."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from psjob.modes import Batch
from psjob.protocol.shard import machine as links
from psjob.wire import tcp
from psjob.wire.frame import HEADER_BYTES, WireError
from psjob.wire.tcp import Stream
from tests.live.checkpointing import OFTEN
from tests.live.decided import BACKUP, SOFTSYNC, THRESHOLD, batches, given, replayed, sgd, weights
from tests.live.live_shards import all_well, serving
from tests.relay import DIALLER, SHARD, parts
from tests.soaking import rotating

__all__ = ["batches"]
pytestmark = pytest.mark.usefixtures("last_words")
STEPS = 24
WORDS = {"shard", "arrived", "prepared", "ready", "held", "written", "do adopt", "do decide", "do prepare", "do cut"}
"""Those that come more than twice in any such run."""


class Line:
    """Where shards dial the coordinator. Once training is open each word is cut: before it, in its middle, then behind it."""

    def __init__(self, coordinator: int) -> None:
        self.coordinator = coordinator
        self.open = False
        self.seen: Counter[str] = Counter()
        self.listener = tcp.listen("127.0.0.1", 0)
        self.port = int(self.listener.getsockname()[1])
        tcp.accept_forever(self.listener, self.carry, 64, "line")

    def close(self) -> None:
        """End the thread that accepts, which a close alone would leave waiting."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def carry(self, shard: Stream) -> None:
        with suppress(StopIteration):
            coordinator = next(tcp.connect("127.0.0.1", self.coordinator, 10.0))
            back = threading.Thread(target=self.pass_on, args=(coordinator, shard, SHARD), daemon=True)
            back.start()
            self.pass_on(shard, coordinator, DIALLER)
            back.join()

    def pass_on(self, source: Stream, to: Stream, handshake: tuple[int, ...]) -> None:
        """One direction, until the stream ends or is cut."""
        try:
            for header, whole in parts(source.sock, handshake):
                if header is None:
                    to.sock.sendall(whole)
                    continue
                body = json.loads(whole[HEADER_BYTES:])
                word = str(body.get("did") or body.get("role") or (f"do {body['do']}" if "do" in body else header.kind.name))
                self.seen[word] += self.open
                to.sock.sendall({1: b"", 2: whole[: len(whole) // 2]}.get(self.seen[word], whole))
                if self.seen[word] in (1, 2, 3):
                    return
                self.open = self.open or word == "do open"
        except (OSError, WireError):
            pass
        finally:
            source.close()
            to.close()


@pytest.mark.parametrize(
    "mode", [BACKUP, rotating(SOFTSYNC, id="softsync"), rotating(THRESHOLD, id="threshold")], ids=["backup", None, None]
)
def test_a_stream_that_breaks_at_any_message_costs_no_step(
    tmp_path: Path, batches: list[Batch], monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    monkeypatch.setattr(links, "AGAIN_SECONDS", 0.01)
    lines: list[Line] = []

    def line(port: int) -> int:
        lines.append(Line(port))
        return lines[-1].port

    with serving(tmp_path, workers=3, shards=2, checkpoint=OFTEN, line=line, **mode) as shards:
        all_well([sgd(shards, rank) for rank in range(3)], given(STEPS, cut_by=shards))
        assert shards.wait_ended() == [0, 0]
        held = weights(shards)
        lines[0].close()
    assert {word for word, count in lines[0].seen.items() if count > 2} >= WORDS, lines[0].seen
    done = sorted((push.worker, push.clock) for one in batches for push in (*one.kept, *one.dropped))
    assert done == [(worker, clock) for worker in range(3) for clock in range(STEPS)]
    again = replayed(batches)
    assert {cell: again[cell].equal(flat) for cell, flat in held.items()} == dict.fromkeys(again, True)
