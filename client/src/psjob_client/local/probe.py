"""Asks the status ports of the shards, each with a deadline; what comes back is read as a stranger's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from psjob_client.local.sites import Listening
from psjob_operator import contract

LARGEST = contract.STATUS_BYTES


async def status(shard: Listening, timeout: float) -> Mapping[str, Any] | None:
    """What a shard says about itself (contract.STATUS_KEYS), or None: no good answer within `timeout` seconds."""
    code, body = await _get(shard, contract.STATUS_PATH, timeout)
    if code != 200:
        return None
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


async def healthy(shard: Listening, timeout: float) -> bool:
    """Whether a shard says that it makes progress."""
    return (await _get(shard, contract.HEALTH_PATH, timeout))[0] == 200


async def _get(shard: Listening, path: str, timeout: float) -> tuple[int, bytes]:
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(shard.host, shard.status, limit=LARGEST)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {shard.host}\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                body = bytearray()
                while len(body) <= LARGEST and (part := await reader.read(65536)):
                    body += part
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return 0, b""
    words = head.split(None, 2)
    code = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return (code, bytes(body)) if len(body) <= LARGEST else (0, b"")


def numbers(told: Mapping[str, Any] | None, *path: str) -> float:
    """The number at `path`, 0 where there is none."""
    part: Any = told
    for step in path:
        part = part.get(step) if isinstance(part, Mapping) else None
    return part if isinstance(part, int | float) and not isinstance(part, bool) else 0


def part(told: Mapping[str, Any] | None, *path: str) -> Mapping[str, Any]:
    """The object at `path`, empty where there is none."""
    found: Any = told
    for step in path:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
