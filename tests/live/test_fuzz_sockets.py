"""Changed streams and questions, over sockets to a shard's own process: it answers or hangs up, lives and keeps its memory."""

from __future__ import annotations

import socket
from random import Random

from psjob import contract
from psjob.contract import keys
from psjob.process.asking import ask
from psjob.wire import auth
from psjob.wire.auth import Peer
from psjob.wire.frame import Kind, run_digest
from tests.fuzzing import Change, byte_changes, changed_bytes, changed_json, counts, fuzz, json_changes
from tests.live.test_wire_hostile import HELLO, RUN, Idle, hello, idle, read_all, settled, sized
from tests.runkeys import RUN as KEYS
from tests.runkeys import get

__all__ = ["idle"]
MOST = 4 << 20
"""Bytes of memory for one case on this side."""
KEPT = 4 << 20
"""Bytes that the shard's process may have more after all cases: what it imports and caches."""
GREETING = auth.greeting(Peer("worker", 0, 1), run_digest(RUN), bytes(auth.NONCE_BYTES))


@counts(100, 10_000)
def test_changed_streams_end_and_the_process_lives(idle: Idle, cases: int) -> None:
    def make(random: Random) -> tuple[bool, bytes]:
        if random.random() < 0.4:
            return False, changed_bytes(GREETING, byte_changes(random)) + random.randbytes(random.choice((0, 32, 300)))
        body = changed_json(HELLO, json_changes(random))
        raw = hello(body=body) if random.random() < 0.5 else changed_bytes(hello(body=body), byte_changes(random))
        return True, raw + sized(random.choice(tuple(Kind)), random.choice((0, 1, 1 << 20, 1 << 63)))

    def read(case: tuple[bool, bytes]) -> None:
        proven, raw = case
        to = idle.dial(proven)
        with to.sock:
            to.sock.settimeout(30)
            to.say(raw)
            try:
                to.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            assert RUN.encode() not in read_all(to.sock)

    fuzz(50, make, read, MOST)
    before = settled(idle)
    fuzz(cases, make, read, MOST)
    assert idle.process.poll() is None and idle.status()["state"] == "waiting"
    assert settled(idle) - before <= KEPT


QUESTION = "GET {path} HTTP/1.1\r\nHost: shard\r\n{header}: {nonce} {proof}\r\nConnection: close\r\n\r\n"


@counts(150, 20_000)
def test_changed_questions_are_refused_or_answered(idle: Idle, cases: int) -> None:
    """Who has not the key hears nothing of the run."""

    def make(random: Random) -> tuple[str, list[Change], bool]:
        path = random.choice((contract.STATUS_PATH, contract.HISTORY_PATH, contract.CHALLENGE_PATH, contract.HEALTH_PATH, "/x"))
        return path, byte_changes(random), random.random() < 0.3

    def read(case: tuple[str, list[Change], bool]) -> None:
        path, changes, right = case
        nonce = get(idle.status_port, contract.CHALLENGE_PATH, seconds=30)[1]["nonce"] if right else "0" * 96
        proof = keys.question(KEYS["questions"] if right else bytes(32), nonce, path)
        raw = QUESTION.format(path=path, header=contract.PROOF_HEADER, nonce=nonce, proof=proof).encode()
        with socket.create_connection(("127.0.0.1", idle.status_port), timeout=30) as sock:
            try:
                sock.sendall(changed_bytes(raw, changes))
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            assert right or b'"pushes"' not in read_all(sock)

    fuzz(cases, make, read, MOST)
    assert idle.process.poll() is None
    assert ask("127.0.0.1", idle.status_port, KEYS["questions"], seconds=30)["run"] == RUN
