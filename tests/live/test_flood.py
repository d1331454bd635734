"""Strangers in numbers: connections that say nothing, a byte a second, or all that they may, and never read. Who has a key gets in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import threading
import time
from pathlib import Path

import aiohttp
import pytest

from bench.peers.light_clients import Crowd, status
from bench.peers.strangers import GREETING, client_hello, flood, trickling
from psjob import contract
from psjob.contract import keys
from psjob.process.asking import ask
from psjob.wire import auth
from psjob.wire.auth import Peer
from psjob.wire.frame import run_digest
from psjob.wire.pool import STRANGERS
from psjob_client.local.process import Listening
from psjob_client.local.status import ask_status
from psjob_operator.cluster import progress
from tests.live.live_shards import eventually
from tests.live.shard_processes import processes
from tests.runkeys import RUN, get, write_certificates

FLOOD = 10_000
TRICKLES = 1000
MEMORY_KIB = 16 << 10


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.rotating
@pytest.mark.parametrize("encryption", ["none", "auto"])
def test_a_flood_costs_a_bounded_number_of_files_and_little_memory(tmp_path: Path, encryption: str) -> None:
    """Meanwhile workers that are there go on, and one more that has a key joins. Strangers of an encrypted run begin TLS with it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    words = GREETING if encryption == "none" else client_hello()
    if encryption != "none":
        write_certificates(tmp_path, 1)
    with processes(tmp_path, shards=1, workers=4, mode="async", encryption=encryption) as run:
        shard = run.start(0)
        assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200, 60)
        address = ("127.0.0.1", int(run.config["shards"][0]["port"]))
        crowd = Crowd(address, "run-1", RUN["workers"], 4, "async", 2, 4096)
        try:
            crowd.join()
            crowd.step()
            flood(address, 2 * STRANGERS, words)  # what the first strangers import stays
            (before,), files = status(shard.pid, ("VmRSS",)), files_of(shard.pid)
            most = [before, files]
            with trickling(address, TRICKLES):
                over = threading.Event()

                def look() -> None:
                    while not over.wait(0.02):
                        most[0] = max(most[0], status(shard.pid, ("VmRSS",))[0])
                        most[1] = max(most[1], files_of(shard.pid))

                watching = threading.Thread(target=look, daemon=True)
                watching.start()
                flooding = threading.Thread(target=flood, args=(address, FLOOD, words), daemon=True)
                flooding.start()
                steps = 0
                while flooding.is_alive():
                    crowd.step()
                    steps += 1
                again = Crowd(address, "run-1", RUN["workers"], 1, "async", 2, 4096)
                try:
                    again._hello(0)
                    again.wait(lambda: bool(again.clients[0].welcome), 30)
                finally:
                    again.close()
                over.set()
                watching.join()
                flooding.join()
            print(f"{steps} steps under the flood; memory +{(most[0] - before) / 1024:.1f} MiB, files {files} and {most[1]} at most")
            assert most[0] - before <= MEMORY_KIB
            assert most[1] - files <= 3 * STRANGERS
            assert steps > 3
        finally:
            crowd.close()


def test_a_stranger_is_hung_up_on_after_a_second(tmp_path: Path) -> None:
    """Whatever it says meanwhile: nothing, a byte now and then, or a greeting and no proof."""
    with processes(tmp_path, forked=True, shards=1) as run:
        run.start(0)
        assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200, 60)
        address = ("127.0.0.1", int(run.config["shards"][0]["port"]))
        own = auth.greeting(Peer("worker", 0, 1), run_digest("run-1"), bytes(32))
        for first in (b"", own[:10], own):
            with socket.create_connection(address, timeout=60) as sock:
                began = time.monotonic()
                sock.sendall(first)
                with contextlib.suppress(ConnectionResetError):  # what it said was not read
                    while sock.recv(4096):
                        pass
                assert time.monotonic() - began >= 0.9


def test_status_is_told_to_who_has_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the operator and to `psjob run` too. A stranger hears whether the shard lives; an answer of another run is not believed."""

    async def pulled(key: bytes) -> progress.Told:
        async with aiohttp.ClientSession() as session:
            return await progress.pull(session, "127.0.0.1", key)

    with processes(tmp_path, forked=True, shards=1) as run:
        run.start(0)
        port = int(run.config["shards"][0]["statusPort"])
        assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200, 60)
        assert ask("127.0.0.1", port, RUN["questions"])["run"] == "run-1"
        monkeypatch.setattr(progress, "STATUS_PORT", port)
        assert (asyncio.run(pulled(RUN["questions"])).status or {}).get("run") == "run-1"
        assert asyncio.run(pulled(RUN["workers"])) == progress.Told(problem=progress.UNKNOWN_KEY)
        assert (asyncio.run(ask_status(Listening("127.0.0.1", 0, port), RUN["questions"], 2.0)) or {}).get("run") == "run-1"
        assert get(port, contract.HEALTH_PATH) == (200, {"alive": True})
        assert get(port, contract.STARTED_PATH) == (200, {"started": True})
        nonce = get(port, contract.CHALLENGE_PATH)[1]["nonce"]
        path, right = contract.STATUS_PATH, keys.question(RUN["questions"], nonce, contract.STATUS_PATH)
        others = keys.question(RUN["workers"], nonce, path)
        for proof in (None, "", "x", f"{nonce} ", f"{nonce} {right[::-1]}", f"9{nonce} {right}", f"{nonce} {others}"):
            code, body = get(port, path, {} if proof is None else {contract.PROOF_HEADER: proof})
            assert code == 403 and "run-1" not in str(body) and set(body) == {"error"}
        assert get(port, contract.HISTORY_PATH, {contract.PROOF_HEADER: f"{nonce} {right}"})[0] == 403, "a proof is for one path"
        assert get(port, path, {contract.PROOF_HEADER: f"{nonce} {right}"})[0] == 200
        assert get(port, path, {contract.PROOF_HEADER: f"{nonce} {right}"})[0] == 403, "and for one question"
        with pytest.raises(OSError, match="403"):
            ask("127.0.0.1", port, b"another key of 32 bytes".ljust(32))
