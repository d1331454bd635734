"""Progress, pulled from shard 0's read-only status port and trusted with little: it is shown, and one thing is acted on (who hangs)."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from psjob_operator import keys
from psjob_operator.contract import ANSWER_HEADER, CHALLENGE_PATH, PROOF_HEADER, STATUS_BYTES, STATUS_PATH, STATUS_PORT
from psjob_operator.printable import printable

SECONDS = 2.0
TEXT = 256
REFUSED = 403
UNKNOWN_KEY = (
    "progress is unknown: shard 0 does not take this operator's key; the key was another when the run began,"
    " suspend and resume the job to hand out this one"
)
UNPROVEN = "progress is unknown: what answers at shard 0's status port does not prove that it has the run's key"
_DEPTH = 6
_ITEMS = 4096


@dataclass(frozen=True)
class Told:
    """What shard 0 said; None where it is out of reach, slow, too long or no JSON object. `problem`: why an answer is not believed."""

    status: Mapping[str, Any] | None = None
    problem: str = ""


async def pull(session: aiohttp.ClientSession, ip: str, questions: bytes | None) -> Told:
    """Ask the process at this pod IP for its status, with the run's key `questions`; None: this operator has none yet."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return Told()
    if questions is None:
        return Told()
    host = f"[{address}]" if address.version == 6 else str(address)
    try:
        async with asyncio.timeout(SECONDS):
            return await _ask(session, f"http://{host}:{STATUS_PORT}", questions)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return Told()


async def _ask(session: aiohttp.ClientSession, base: str, questions: bytes) -> Told:
    """The challenge, then the question: over one connection, where the process keeps it."""
    async with session.get(base + CHALLENGE_PATH, allow_redirects=False) as reply:
        nonce = nonce_of(await bounded(reply.content)) if reply.status == 200 else ""
    if not nonce:
        return Told()
    proof = {PROOF_HEADER: f"{nonce} {keys.question(questions, nonce, STATUS_PATH)}"}
    async with session.get(base + STATUS_PATH, headers=proof, allow_redirects=False) as reply:
        if reply.status == REFUSED:
            return Told(problem=UNKNOWN_KEY)
        raw = await bounded(reply.content) if reply.status == 200 else None
        if raw is None:
            return Told()
        if not is_proven(questions, nonce, STATUS_PATH, raw, reply.headers.get(ANSWER_HEADER)):
            return Told(problem=UNPROVEN)
    return Told(parse_status(raw))


def nonce_of(raw: bytes | None) -> str:
    """What a challenge asks to be proven; empty where it is none."""
    nonce = (parse_status(raw) or {}).get("nonce")
    return nonce if isinstance(nonce, str) and nonce.isascii() and nonce.isalnum() else ""


def is_proven(questions: bytes, nonce: str, path: str, body: bytes, header: str | None) -> bool:
    """Whether who sent this body to that question has the run's key."""
    return header is not None and keys.same(header.strip(), keys.answer(questions, nonce, path, body))


def parse_status(raw: bytes | None) -> Mapping[str, Any] | None:
    """A JSON object with numbers finite, strings cut and nesting bounded; None for anything else."""
    if raw is None or len(raw) > STATUS_BYTES:
        return None
    try:
        found = json.loads(raw, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    clean = _clean(found, _DEPTH)
    return clean if isinstance(clean, dict) else None


async def bounded(stream: aiohttp.StreamReader) -> bytes | None:
    """A body; None where it is longer than any that is right."""
    parts = bytearray()
    async for part in stream.iter_chunked(16 * 1024):
        parts += part
        if len(parts) > STATUS_BYTES:
            return None
    return bytes(parts)


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return printable(value, most=TEXT)
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
        return {_clean(str(key), 0): _clean(item, depth - 1) for key, item in list(value.items())[:_ITEMS]}
    return None
