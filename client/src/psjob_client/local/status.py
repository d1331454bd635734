"""What the shards of a run say on their status ports: asked with a deadline, proven with the run's key, read as a stranger's.

Answers have the shapes of contract.STATUS_KEYS: an entry that has another one is left out, and `numbers` and `part` read what is left.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from psjob_client.local.process import Listening
from psjob_operator import contract, keys

LARGEST = contract.STATUS_BYTES
WARNINGS = ("warning", "nonFinite", "largePush", "diverged", "drift", "dataProblem", "buffersDiffer")
"""What the coordinator tells that a user should look at, the most urgent first."""
LARGEST_NUMBER = 1e300
PAIRS = ("buckets", "passed")
"""Lists of [number, number]."""
OBJECTS = ("workers", "hung", "shards", "entries", "stages")
"""Lists of objects."""
DEEPEST = 8
"""Levels of objects; the contract has fewer."""


async def ask_status(shard: Listening, questions: bytes, timeout: float) -> Mapping[str, Any] | None:
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


async def is_healthy(shard: Listening, timeout: float) -> bool:
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


PART_WORDS = {"copyOut": "copy out", "copyBack": "copy back"}
"""Parts of a step whose name in a status is not what people read."""


def step_parts(coordinator: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by part (contract.STEP_PARTS); empty where they were not told."""
    told = part(coordinator, "stepParts")
    found = {name: float(told[name]) for name in contract.STEP_PARTS if is_number(told.get(name)) and told[name] >= 0}
    return found if len(found) == len(contract.STEP_PARTS) else {}


def step_line(parts: Mapping[str, float]) -> str:
    """`207 ms: compute 26, copy out 9, wire 120, …`; of a step of 10 s and more in seconds."""
    whole = sum(parts.values())
    unit, scale = ("s", 1.0) if whole >= 10 else ("ms", 1000.0)
    each = ", ".join(f"{PART_WORDS.get(name, name)} {_short(scale * seconds)}" for name, seconds in parts.items())
    return f"{_short(scale * whole)} {unit}: {each}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}" if value >= 0.05 else "0"


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


def shaped(told: Mapping[str, Any], depth: int = DEEPEST) -> dict[str, Any]:
    """The same, whose lists by these names hold what they should; numbers in them are not looked at."""
    return {name: _shaped(name, value, depth) for name, value in told.items()}


def is_number(value: Any) -> TypeGuard[int | float]:
    """A finite number that fits a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _shaped(name: str, value: Any, depth: int) -> Any:
    if name in PAIRS:
        pairs = value if isinstance(value, list) else ()
        return [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))]
    if name in OBJECTS:
        return [shaped(entry, depth - 1) for entry in (value if isinstance(value, list) else ()) if isinstance(entry, Mapping) and depth]
    if isinstance(value, Mapping):
        return shaped(value, depth - 1) if depth else {}
    return value


def lateness(statuses: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]] | None:
    """Staleness {median, p95, max, mean} in updates and gap {mean, max} of shards (contract.STATUS_KEYS). None: no push was seen.

    A push counts once on each shard. Quantiles are rounded up to the edge of their bucket.
    """
    late, gap = histograms(statuses).values()
    if not late["count"]:
        return None

    most = float(late["max"])

    def quantile(share: float) -> float:
        edges = (float(edge) for edge, held in late["buckets"] if held >= share * late["count"])
        return min(next(edges, most), most)

    def mean(one: Mapping[str, Any]) -> float:
        return float(one["sum"] / max(1, one["count"]))

    return {
        "staleness": {"median": quantile(0.5), "p95": quantile(0.95), "max": most, "mean": mean(late)},
        "gap": {"mean": mean(gap), "max": gap["max"]},
    }


def histograms(statuses: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Staleness and gap of all pushes that the shards saw, each as one of contract.STATUS_KEYS; a push counts once on each shard."""
    told = list(statuses)
    return {name: _summed([part(one, name) for one in told]) for name in ("staleness", "gap")}


def _summed(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    count = total = most = 0.0
    below: Counter[float] = Counter()
    for one in told:
        count, total, most = count + numbers(one, "count"), total + numbers(one, "sum"), max(most, numbers(one, "max"))
        below.update(dict(one.get("buckets") or ()))
    return {"count": count, "sum": total, "max": most, "buckets": sorted(below.items())}


def staleness_line(late: Mapping[str, Mapping[str, float]]) -> str:
    """`staleness of pushes: 3 updates (median), 6 (95 %), 7 (largest); the mean gap was 0.0012`."""
    stale = late["staleness"]
    words = f"staleness of pushes: {stale['median']:g} updates (median), {stale['p95']:g} (95 %), {stale['max']:g} (largest)"
    return f"{words}; the mean gap was {late['gap']['mean']:.2g}"
