"""What the planners ask of this machine: the profile of a script's model, and the bandwidth between processes.

`profile_script` runs a script in a process of its own, with the interpreter that `psjob run` gives workers. `measure` starts processes of
this module: commands are JSON lines on standard input, each is answered by one on standard output, and a process ends with its input. A
peer's connection begins with PING, whose bytes come back one by one, or SEND, whose bytes are counted and told when they end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from psjob_client import problems
from psjob_client.local.manifest import base_environment
from psjob_client.local.process import free_memory
from psjob_client.problems import BadInput
from psjob_operator.printable import printable

KILL_SECONDS = 5.0
LONGEST = 400
"""Letters of what a script said last."""
FEWEST, MOST = 2, 16
PINGS = 100
PAIR_SECONDS = 0.1
ALL_SECONDS = 0.3
ANSWER_SECONDS = 20.0
"""Deadline of one measurement, and of a process's start."""
WHOLE_SECONDS = 120.0
"""Deadline of all of them; 16 processes have 120 pairs."""
Told = Callable[[str], None]
ADDRESS = "127.0.0.1"
PING, SEND = b"p", b"s"
CHUNK = 1 << 20
PATIENCE = 5.0
"""Seconds without a byte before a connection is given up."""
COUNT = struct.Struct("<Q")


def profile_script(script: str, args: Sequence[str], *, meta: bool, deadline: float) -> dict[str, Any]:
    """The profile of `train.py` (the model of its first training step) or of `train.py:build` (what that function returns), unchecked.

    Raises BadInput: no such file, a script that fails, has no such model, or takes more than `deadline` seconds.
    """
    path, function = _split(script, meta)
    problems.must_be_installed("psjob plan-stages")
    with tempfile.TemporaryDirectory(prefix="psjob-profile-") as folder:
        out, said = Path(folder, "profile.json"), Path(folder, "said")
        request = {"script": str(path), "function": function, "args": [*args], "meta": meta, "room": free_memory(), "out": str(out)}
        argv = [sys.executable, "-m", "psjob.profiling", json.dumps(request)]
        with said.open("wb") as output:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=base_environment(), start_new_session=True
            )
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                raise BadInput(
                    f"--deadline {deadline:g}: {script} had no training step within {deadline:g} s; give more, a smaller data set, "
                    f"or a function: {path.name}:build"
                ) from None
            finally:
                _end(process)
        if code == 0 and out.exists():
            found: dict[str, Any] = json.loads(out.read_bytes())
            return found
        raise BadInput(_why(script, code, said.read_text(errors="replace")))


def _split(script: str, meta: bool) -> tuple[Path, str | None]:
    name, colon, function = script.rpartition(":")
    path = Path(name if colon else script)
    if colon and not function.isidentifier():
        raise BadInput(f"{script}: {function or 'nothing'} is no name of a function; write {name or 'train.py'}:build")
    if not path.is_file():
        raise BadInput(f"{path}: {'is a folder' if path.is_dir() else 'there is no such file'}; give the path of a training script")
    if meta and not colon:
        raise BadInput(
            f"--meta: {path.name} is run as it is and makes real weights; give a function that builds the model: {path.name}:build"
        )
    return path, function if colon else None


def _why(script: str, code: int, said: str) -> str:
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    shown = printable(last, most=LONGEST)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    hint = "; that is often too little memory: use --meta and a function" if code == -9 else ""
    about = "" if shown.startswith(Path(script.partition(":")[0]).name) else f"{script}: "
    return f"{about}{shown or f'ended with {how} and said nothing'}{hint}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """With the processes that the script may have started."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait(KILL_SECONDS)


def measure(count: int, told: Told) -> dict[str, Any]:
    """A machine as MACHINE.yaml describes it: `count` processes p0, p1, …, links as each pair had them by itself, the total of all at once.

    `told` is called with each thing that is being measured. Raises BadInput: a count out of range, or a process that does not answer.
    """
    if not FEWEST <= count <= MOST:
        raise BadInput(f"--probe {count}: must be {FEWEST}..{MOST} processes")
    try:
        return asyncio.run(_measure(count, told))
    except TimeoutError:
        raise BadInput(
            f"--probe {count}: no answer in time ({ANSWER_SECONDS:.0f} s a step); try fewer processes or a calmer machine"
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"--probe {count}: {error}; try fewer processes") from None


async def _measure(count: int, told: Told) -> dict[str, Any]:
    async with asyncio.timeout(WHOLE_SECONDS), contextlib.AsyncExitStack() as stack:
        told(f"starting {count} processes")
        peers = [await stack.enter_async_context(_Peer(f"p{i}")) for i in range(count)]
        links = []
        pairs = list(itertools.combinations(peers, 2))
        for i, (one, other) in enumerate(pairs, 1):
            told(f"{one.name} to {other.name} ({i} of {len(pairs)})")
            late = await one.ask(do="ping", port=other.port, count=PINGS)
            fast = await one.ask(do="send", port=other.port, seconds=PAIR_SECONDS)
            links.append({"between": [one.name, other.name], "bandwidth": fast["rate"], "latency": late["seconds"]})
        told("all at once")
        ring = zip(peers, peers[1:] + peers[:1], strict=True)
        rates = await asyncio.gather(*(one.ask(do="send", port=other.port, seconds=ALL_SECONDS) for one, other in ring))
    total = sum(answer["rate"] for answer in rates)
    return {"name": f"{count}-processes-here", "hosts": [peer.name for peer in peers], "links": links, "total": total}


class _Peer:
    """A process of `measuring`; it ends with this one, whose pipe it reads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> _Peer:
        pipe = asyncio.subprocess.PIPE
        argv = [sys.executable, "-m", "psjob_client.local.measure"]
        self._process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
        try:
            self.port = int((await self._answer())["port"])
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def ask(self, **command: object) -> dict[str, float]:
        """The process's answer. Raises TimeoutError, and OSError in its words."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._answer()

    async def _answer(self) -> dict[str, float]:
        assert self._process is not None and self._process.stdout is not None
        async with asyncio.timeout(ANSWER_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise OSError(f"process {self.name} ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OSError(f"process {self.name}: {answer['error']}")
        return answer


def main() -> None:
    """Listen, tell the port, and do what standard input says until it ends."""
    listener = socket.create_server((ADDRESS, 0), backlog=64)
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    _tell({"port": listener.getsockname()[1]})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            _tell(ping(command["port"], command["count"]) if command["do"] == "ping" else send(command["port"], command["seconds"]))
        except OSError as error:
            _tell({"error": str(error)})


def _tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def ping(port: int, count: int) -> dict[str, float]:
    """Seconds that one byte takes one way: half of the median round trip."""
    with _connected(port, PING) as peer:
        found = []
        for _ in range(count):
            begun = time.perf_counter()
            peer.sendall(b".")
            if not peer.recv(1):
                raise ConnectionResetError("the peer closed the connection")
            found.append(time.perf_counter() - begun)
    return {"seconds": statistics.median(found) / 2}


def send(port: int, seconds: float) -> dict[str, float]:
    """Bytes a second of as many as go out in `seconds`, until the peer has told that they are there."""
    chunk, sent = memoryview(bytearray(CHUNK)), 0
    with _connected(port, SEND) as peer:
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            peer.sendall(chunk)
            sent += CHUNK
        peer.shutdown(socket.SHUT_WR)
        told = peer.recv(COUNT.size, socket.MSG_WAITALL)
        taken = time.perf_counter() - begun
    if len(told) < COUNT.size or COUNT.unpack(told)[0] != sent:
        raise ConnectionResetError("the peer did not get all bytes")
    return {"rate": sent / taken}


def _connected(port: int, kind: bytes) -> socket.socket:
    peer = socket.create_connection((ADDRESS, port), timeout=PATIENCE)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(kind)
    return peer


def _serve(listener: socket.socket) -> None:
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=_answer, args=(peer,), daemon=True).start()


def _answer(peer: socket.socket) -> None:
    with peer, contextlib.suppress(OSError):
        peer.settimeout(PATIENCE)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = peer.recv(1)
        if kind == PING:
            while byte := peer.recv(1):
                peer.sendall(byte)
        elif kind == SEND:
            chunk, count = bytearray(CHUNK), 0
            while got := peer.recv_into(chunk):
                count += got
            peer.sendall(COUNT.pack(count))


if __name__ == "__main__":
    main()
