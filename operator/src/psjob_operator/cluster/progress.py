"""Progress, pulled from shard 0's read-only status port and trusted with little: it is shown, and one thing is acted on (plan/hung.py)."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
from collections.abc import Mapping
from typing import Any

import aiohttp

from psjob_operator.contract import STATUS_BYTES, STATUS_PATH, STATUS_PORT

SECONDS = 2.0
TEXT = 256
_DEPTH = 6
_ITEMS = 4096


async def pull(session: aiohttp.ClientSession, ip: str) -> Mapping[str, Any] | None:
    """What the process at this pod IP says; None where it is out of reach, slow, too long or no JSON object."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return None
    host = f"[{address}]" if address.version == 6 else str(address)
    try:
        async with asyncio.timeout(SECONDS):
            async with session.get(f"http://{host}:{STATUS_PORT}{STATUS_PATH}", allow_redirects=False) as reply:
                if reply.status != 200:
                    return None
                raw = await _read(reply.content)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return None
    return parse(raw)


def parse(raw: bytes | None) -> Mapping[str, Any] | None:
    """A JSON object with numbers finite, strings cut and nesting bounded; None for anything else."""
    if raw is None or len(raw) > STATUS_BYTES:
        return None
    try:
        found = json.loads(raw, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    clean = _clean(found, _DEPTH)
    return clean if isinstance(clean, dict) else None


async def _read(stream: aiohttp.StreamReader) -> bytes | None:
    parts = bytearray()
    async for part in stream.iter_chunked(16 * 1024):
        parts += part
        if len(parts) > STATUS_BYTES:
            return None
    return bytes(parts)


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return "".join(char for char in value[:TEXT] if char.isprintable())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else None
    if depth == 0:
        return None
    if isinstance(value, list):
        return [_clean(item, depth - 1) for item in value[:_ITEMS]]
    if isinstance(value, dict):
        return {str(key)[:TEXT]: _clean(item, depth - 1) for key, item in list(value.items())[:_ITEMS]}
    return None
