"""Asks the status ports of the shards, each with a deadline; what comes back is read as a stranger's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from psjob_client.local.shapes import is_number, shaped
from psjob_client.local.sites import Listening
from psjob_operator import contract, keys

LARGEST = contract.STATUS_BYTES
WARNINGS = ("warning", "nonFinite", "largePush", "diverged", "drift", "dataProblem", "buffersDiffer")
"""What the coordinator tells that a user should look at, the most urgent first."""


async def status(shard: Listening, questions: bytes, timeout: float) -> Mapping[str, Any] | None:
    """What a shard says about itself (contract.STATUS_KEYS), or None: no good answer within `timeout` seconds, or one of somebody else.

    `questions` is the run's key of that name (contract.KEYS).
    """
    try:
        async with asyncio.timeout(timeout):
            nonce = _object((await _get(shard, contract.CHALLENGE_PATH, timeout)).body).get("nonce")
            if not (isinstance(nonce, str) and nonce.isascii() and nonce.isalnum()):
                return None
            proof = f"{nonce} {keys.question(questions, nonce, contract.STATUS_PATH)}"
            told = await _get(shard, contract.STATUS_PATH, timeout, f"{contract.PROOF_HEADER}: {proof}\r\n")
    except TimeoutError:
        return None
    right = keys.answer(questions, nonce, contract.STATUS_PATH, told.body)
    return _object(told.body) if told.code == 200 and keys.same(told.header(contract.ANSWER_HEADER), right) else None


async def healthy(shard: Listening, timeout: float) -> bool:
    """Whether a shard says that it makes progress."""
    return (await _get(shard, contract.HEALTH_PATH, timeout)).code == 200


class Reply(NamedTuple):
    """An answer; code 0: none."""

    code: int = 0
    head: bytes = b""
    body: bytes = b""

    def header(self, name: str) -> str:
        """Of the answer; empty where it has none of that name."""
        lines = (line.partition(":") for line in self.head.decode("latin-1").split("\r\n"))
        return next((value.strip() for its, _, value in lines if its.lower() == name.lower()), "")


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return shaped(told) if isinstance(told, dict) else {}


async def _get(shard: Listening, path: str, timeout: float, more: str = "") -> Reply:
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(shard.host, shard.status, limit=LARGEST)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {shard.host}\r\n{more}\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                body = bytearray()
                while len(body) <= LARGEST and (part := await reader.read(65536)):
                    body += part
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return Reply()
    words = head.split(None, 2)
    code = int(words[1]) if len(words) > 1 and words[1].isdigit() and len(words[1]) == 3 else 0
    return Reply(code, head, bytes(body)) if len(body) <= LARGEST else Reply()


def numbers(told: Mapping[str, Any] | None, *path: str) -> float:
    """The finite number at `path`, 0 where there is none."""
    part: Any = told
    for step in path:
        part = part.get(step) if isinstance(part, Mapping) else None
    return part if is_number(part) else 0


def passes_again(coordinator: Mapping[str, Any]) -> int:
    """Passes over data that scripts ran through again after restarts, all workers together."""
    workers = coordinator.get("workers")
    return sum(int(numbers(one, "passesAgain")) for one in workers) if isinstance(workers, list | tuple) else 0


def part(told: Mapping[str, Any] | None, *path: str) -> Mapping[str, Any]:
    """The object at `path`, empty where there is none."""
    found: Any = told
    for step in path:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def reports(told: Mapping[str, Any]) -> dict[str, int]:
    """By name of a metric, the step at which it was last given; empty if that was not told."""
    names, steps = part(told, "metrics"), told.get("reported")
    if not isinstance(steps, list) or len(steps) != len(names) or not all(map(is_number, steps)):
        return {}
    return {name: int(step) for name, step in zip(names, steps, strict=True)}
