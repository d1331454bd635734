"""A shard's words as events: what is not in shape is refused here, before the machine sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from psjob.contract import MOST_NUMBER
from psjob.protocol.coordinator import events
from psjob.protocol.coordinator.consistency import KINDS, LOOKS, Digest, Told
from psjob.protocol.coordinator.events import Event, ShardProgress

MOST_INPUTS: Final = 64
MOST_NAME: Final = 80
"""Characters of a class's name."""
MOST: Final = 1 << 63
MOST_WAITS: Final = 120
"""Characters of what a worker of a stage waits for."""
MOST_SUMS: Final = 4096
"""Sums of a digest."""
LONGEST_NAME: Final = 200
"""Characters of a tensor's name."""
LONGEST: Final = 2000
"""Characters of a sentence."""


class Malformed(ValueError):
    """A message is not in shape; the text names what was read."""


def shard_hello(link: int, body: Mapping[str, Any], shards: int) -> events.ShardHello:
    """What another shard says of itself. Raises Malformed."""
    carried, mode = body.get("carried"), body.get("mode")
    if not isinstance(mode, str) or not isinstance(body.get("serving"), bool):
        raise Malformed("a shard's hello has a mode and says whether it serves")
    return events.ShardHello(
        link, _number(body, "index", 1, shards - 1), _number(body, "attempt", 0, MOST_NUMBER), _number(body, "view", 0, MOST_NUMBER),
        bool(body["serving"]), _number(body, "recovery"), mode[:80], None if carried is None else _whole(carried, "carried"),
    )  # fmt: skip


def decode_shard_message(shard: int, body: Mapping[str, Any], workers: int, content: Callable[[Mapping[str, Any]], Any]) -> Event | None:
    """What a shard answers; None for a word that is not this machine's. `content` reads what a manifest says of a shard's part.

    Raises Malformed.
    """
    read = _READERS.get(str(body.get("do" if "did" not in body else "did")))
    if read is None:
        return None
    try:
        return read(shard, body, workers, content)
    except Malformed:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise Malformed(f"shard {shard}: {str(body.get('did'))[:40]} is not in shape: {type(error).__name__}: {str(error)[:200]}") from None


Content = Callable[[Mapping[str, Any]], Any]


def _restored(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    told = "complete" in body
    return events.ShardRestored(
        shard, _number(body, "recovery"), _stands(body) if told else None, _clocks(body["complete"], workers) if told else None
    )


def _unrestored(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    return events.Unrestored(shard, _number(body, "recovery"), _text(body, "why"), body.get("damaged") is True)


def _where(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    rows = {_rank(row[0], workers): (_whole(row[1], "complete"), _whole(row[2], "open")) for row in body["rows"]}
    return events.StandsAt(shard, _number(body, "ask"), _stands(body), rows)


def _late(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    return events.CutLate(shard, _number(body, "cut"), _text(body, "why"))


def _unwritten(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    return events.CutUnwritten(shard, _number(body, "cut"), _text(body, "why"), body.get("full") is True)


def _written(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    table = body["table"]
    left = {_rank(int(rank), workers): _whole(clock, "left") for rank, clock in table["left"].items()}
    versions = [_whole(block["n"], "n") for block in body["blocks"]]
    versions += [_whole(n, "versions") for n in (body["rows"]["versions"] if body.get("rows") is not None else ())]
    return events.CutWritten(
        shard, _number(body, "cut"), content(body), max(versions, default=0), _clocks(table["complete"], workers), left
    )


def _progress(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    if body["doing"] not in ("writing", "reading"):
        raise Malformed(f"shard {shard} reports progress of {str(body['doing'])[:40]!r}, expected writing or reading")
    writing = body["doing"] == "writing"
    return events.BytesMoved(shard, writing, _number(body, "cut" if writing else "recovery"), _number(body, "done"), _number(body, "total"))


def _arrived(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    worker, clock = body["push"]
    base = None if body["base"] is None else _whole(body["base"], "base")
    carried = _whole(body["carried"], "carried")
    return events.PushArrived(shard, _number(body, "recovery"), _rank(worker, workers), _whole(clock, "clock"), base, carried)


def _measured(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    squares = float(body["squares"]) if body["squares"] is not None else math.nan if body["nan"] is True else math.inf
    limit = float(body["limit"])
    if squares < 0 or not 0 < limit < math.inf:
        raise Malformed(f"shard {shard} reports squares of {squares} with limit {limit}, expected 0 or more and a limit above 0")
    return events.NormMeasured(shard, _number(body, "recovery"), _number(body, "version"), squares, limit)


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
    """The passes of a STIRRED; 0 where it tells none, or not in shape."""
    return _size(body.get("passes")) or 0


def step_lost(stream: int, body: Mapping[str, Any], workers: int) -> events.StepLost:
    """A worker's STEP_LOST. Raises Malformed."""
    return events.StepLost(stream, _rank(body.get("rank"), workers), _number(body, "step"))


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


def _awaited(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> Event:
    seconds = {_rank(int(rank), workers): float(told) for rank, told in body["seconds"].items()}
    return events.WorkersAwaited(shard, seconds, {_rank(int(rank), workers): int(clock) for rank, clock in body.get("clocks", {}).items()})


_READERS: Final[dict[str, Callable[[int, Mapping[str, Any], int, Content], Event]]] = {
    "initialised": lambda shard, body, workers, content: events.Initialised(shard, _number(body, "setup")),
    "restored": _restored,
    "unrestored": _unrestored,
    "doubts": lambda shard, body, workers, content: events.AckedDoubted(shard),
    "where": _where,
    "prepared": lambda shard, body, workers, content: events.MemoryReady(shard, _number(body, "number")),
    "ready": lambda shard, body, workers, content: events.CutReady(shard, _number(body, "cut")),
    "late": _late,
    "held": lambda shard, body, workers, content: events.CutHeld(shard, _number(body, "cut")),
    "written": _written,
    "unwritten": _unwritten,
    "voided": lambda shard, body, workers, content: events.CutVoided(shard, _number(body, "cut")),
    "progress": _progress,
    "arrived": _arrived,
    "measured": _measured,
    "awaited": _awaited,
    "stopping": lambda shard, body, workers, content: events.StopAsked(),
}


def _stands(body: Mapping[str, Any]) -> ShardProgress:
    stages = tuple((_whole(lo, "lo"), _whole(hi, "hi"), _whole(owned, "owned")) for lo, hi, owned in body.get("stages", ()))
    return ShardProgress(_number(body, "lo"), _number(body, "hi"), _number(body, "owned"), _number(body, "stored"), stages)


def _clocks(told: Any, workers: int) -> tuple[int, ...]:
    if not isinstance(told, list) or len(told) != workers:
        raise Malformed(f"steps of {workers} workers are {str(told)[:80]}, expected a list of one for each")
    return tuple(_whole(clock, "complete") for clock in told)


def _rank(value: Any, workers: int) -> int:
    if not 0 <= _whole(value, "rank") < workers:
        raise Malformed(f"worker {value} is not one of this job's {workers}")
    return int(value)


def _number(body: Mapping[str, Any], key: str, low: int = 0, high: int = MOST) -> int:
    value = _whole(body.get(key), key)
    if not low <= value <= high:
        raise Malformed(f"{key} is {value}, expected {low} to {high}")
    return value


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise Malformed(f"{what} is {str(value)[:40]!r}, expected a whole number from 0")
    return value


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise Malformed(f"{key} is {str(value)[:40]!r}, expected a sentence")
    return value[:LONGEST]
