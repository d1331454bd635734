"""Measures what this machine carries between N processes over loopback TCP, for `psjob plan-topology --probe`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

from psjob_client.local.errors import BadInput

FEWEST, MOST = 2, 16
PINGS = 100
PAIR_SECONDS = 0.1
ALL_SECONDS = 0.3
ANSWER_SECONDS = 20.0
"""Deadline of one measurement, and of a process's start."""
WHOLE_SECONDS = 120.0
"""Deadline of all of them; 16 processes have 120 pairs."""
Told = Callable[[str], None]


def measure(count: int, told: Told) -> dict[str, Any]:
    """A machine as MACHINE.yaml describes it: `count` processes p0, p1, …, links as each pair had them alone, the total of all at once.

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
        argv = [sys.executable, "-m", "psjob_client.local.measuring"]
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
