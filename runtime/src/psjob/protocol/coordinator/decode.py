"""What comes to the coordinator from workers, and a shard's hello, as events. What is not in shape never reaches the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psjob.contract import MOST_NUMBER
from psjob.protocol.coordinator import events
from psjob.protocol.coordinator.consistency import KINDS, LOOKS, Digest, Told
from psjob.protocol.messages import MOST, Malformed, number_of, rank_of, whole

MOST_INPUTS: Final = 64
MOST_NAME: Final = 80
"""Characters of a class's name."""
MOST_WAITS: Final = 120
"""Characters of what a worker of a stage waits for."""
MOST_SUMS: Final = 4096
"""Sums of a digest."""
LONGEST_NAME: Final = 200
"""Characters of a tensor's name."""


def shard_hello(link: int, body: Mapping[str, Any], shards: int) -> events.ShardHello:
    """What another shard says of itself. Raises Malformed."""
    carried, mode = body.get("carried"), body.get("mode")
    if not isinstance(mode, str) or not isinstance(body.get("serving"), bool):
        raise Malformed("a shard's hello has a mode and says whether it serves")
    return events.ShardHello(
        link, number_of(body, "index", 1, shards - 1), number_of(body, "attempt", 0, MOST_NUMBER), number_of(body, "term", 0, MOST_NUMBER),
        bool(body["serving"]), number_of(body, "restore_id"), mode[:80], None if carried is None else whole(carried, "carried"),
    )  # fmt: skip


def inputs(body: Mapping[str, Any]) -> tuple[int, ...]:
    """The sums of an INPUTS; none where it is not in shape."""
    told = body.get("inputs")
    return tuple(value for value in told[:MOST_INPUTS] if type(value) is int) if isinstance(told, list) else ()


def digest(body: Mapping[str, Any]) -> Digest | None:
    """A worker's DIGEST; None where it is not in shape: nothing is decided by it."""
    kinds, sums, names = body.get("kinds"), body.get("sums"), body.get("names", [])
    clock, numbers = body.get("clock"), body.get("numbers", [])
    if not (isinstance(kinds, str) and len(kinds) <= MOST_SUMS and not set(kinds) - set(KINDS)):
        return None
    if not (isinstance(sums, list) and len(sums) == len(kinds) and all(type(value) is int for value in sums)):
        return None
    if (look := body.get("look")) not in LOOKS:
        return None
    if not (isinstance(names, list) and len(names) in (0, len(kinds)) and type(clock) is int and 0 <= clock <= MOST):
        return None
    if not (isinstance(numbers, list) and all(isinstance(group, dict) for group in numbers)):
        return None
    groups = ({str(key)[:64]: value for key, value in group.items() if type(value) in (int, float, bool)} for group in numbers)
    strangers = body.get("strangers", [])
    return Digest(
        clock, look, kinds, tuple(sums), tuple(_printable(name) for name in names), tuple(groups),
        _printable(body.get("machine", "")), body.get("alone") is True,
        tuple(_printable(name) for name in strangers[:8]) if isinstance(strangers, list) else (), _sum(body.get("leftOut")) or 0,
    )  # fmt: skip


def _printable(value: Any) -> str:
    return "".join(filter(str.isprintable, str(value)[:LONGEST_NAME]))


def data(body: Mapping[str, Any]) -> Told | None:
    """What an INPUTS says of data that are given to `ps.shard`; None where it says nothing, or not in shape."""
    told = body.get("data")
    if not isinstance(told, dict) or (site := _sum(told.get("site"))) is None or (number := _sum(told.get("number"))) is None:
        return None
    loader, kind = ("".join(filter(str.isprintable, str(told.get(name))))[:MOST_NAME] for name in ("loader", "data"))
    length, batch, processes, content, samples, traits, first = (
        _sum(told.get(name)) for name in ("length", "batch", "processes", "content", "samples", "traits", "first")
    )
    return Told(site, number, loader, kind, length, batch, processes, content, samples, traits, first, told.get("ordered") is True)


def passes(body: Mapping[str, Any]) -> int:
    """The passes of a HEARTBEAT; 0 where it tells none, or not in shape."""
    return _size(body.get("passes")) or 0


def step_lost(stream: int, body: Mapping[str, Any], workers: int) -> events.StepLost:
    """A worker's STEP_LOST. Raises Malformed."""
    return events.StepLost(stream, rank_of(body.get("rank"), workers), number_of(body, "step"))


def measured(stream: int, clock: int, body: Mapping[str, Any], workers: int) -> events.Measured:
    """A worker's MEASURED. What is not in shape is not known: nothing is decided by it."""
    idle, waits, awaited = _amount(body.get("idle")), body.get("waits"), body.get("for")
    return events.Measured(
        stream, clock, None if idle is None else min(1.0, idle), _size(body.get("rss")), _size(body.get("peak")),
        _size(body.get("devicePeak")),
        "".join(filter(str.isprintable, waits))[:MOST_WAITS] if isinstance(waits, str) else None,
        awaited if type(awaited) is int and 0 <= awaited < workers else None, _amount(body.get("seconds")) or 0.0,
        _amount(body.get("delay")),
    )  # fmt: skip


def _amount(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST else None


def _sum(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MOST else None


def _size(value: Any) -> int | None:
    return None if (told := _amount(value)) is None else int(told)
