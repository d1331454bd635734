"""How a worker reaches the newest process of a shard, and how workers meet by way of shard 0, outside a session.

- `meet_workers`: at a point of the script each worker hears what the others have said there (see `psjob.shard.rendezvous`).
- `agreed`: before it joins a job of stages whose cuts psjob chooses, a worker asks for them; worker 0 chooses, and tells them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from psjob.modes.stages import ASKS as ASKS_CUTS
from psjob.modes.stages import ChosenCuts
from psjob.process.config import ProcessContext
from psjob.protocol.records import ASKS, BEFORE
from psjob.protocol.worker.machine import newest_attempt
from psjob.wire import tcp
from psjob.wire.frame import Header, Kind, WireError, run_digest
from psjob.wire.handshake import greet
from psjob.wire.tcp import Stream, StreamClosed
from psjob.wire.unauthenticated import one_line

ANSWER_SECONDS = 15.0
PAUSE = 0.2
SAID_SECONDS = 30.0
log = logging.getLogger("psjob.worker")


class NotMet(Exception):
    """They cannot meet. The message says who is missing, or why shard 0 was not reached."""


def meet_workers(
    place: ProcessContext, point: str, said: str, check: Callable[[], None], waits: bool = True, first: bool = False
) -> list[str] | None:
    """What each worker has said at this point, by rank, once all are there; with `first`, once rank 0 is there, what that has said.

    None: the point was passed before this process began, or it does not wait and some are missing. `check` raises what ends the wait.
    Raises NotMet if a worker has ended its script without coming, or shard 0 cannot be reached for `connect_seconds`.
    """
    heard = noted = time.monotonic()
    while True:
        check()
        try:
            answer = _asked(place, {"asks": ASKS, "point": point, "said": said, "waits": waits, "first": first})
        except (StreamClosed, TimeoutError, WireError, OSError) as error:
            now = time.monotonic()
            if now - heard > place.config.connect_seconds:
                raise NotMet(f"shard 0, by which they meet, was not reached for {now - heard:.0f} s ({one_line(error, 200)})") from None
            if not waits:
                return None
            time.sleep(PAUSE)
            continue
        heard = now = time.monotonic()
        if "said" in answer:
            return [str(each) for each in answer["said"]]
        if not waits or (answer["begun"] and point.startswith(BEFORE) and (place.number > 1 or place.rewinds)):
            return None
        if answer["gone"]:
            raise NotMet(f"worker {answer['gone'][0]} has ended its script without coming there")
        if now - noted > SAID_SECONDS:
            noted = now
            log.warning("waiting for worker %s at %s", ", ".join(map(str, answer["missing"][:8])), point)


def _asked(place: ProcessContext, question: dict[str, object], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The answer of shard 0 to one question. Raises StreamClosed, TimeoutError and WireError if no shard 0 of this run answers."""
    stream = newest_process(place, 0)
    try:
        head = Header(Kind.HELLO, run=run_digest(place.run), worker=place.index, start=place.number, rewinds=place.rewinds)
        stream.send_json(head, {"role": "worker", "fresh": True, **question})
        header = stream.recv_header(seconds)
        body: dict[str, Any] = stream.recv_json(header)
    finally:
        stream.close()
    if header.kind is not Kind.WELCOME:
        raise WireError(str(body.get("error", f"it answered {header.kind.name}")))
    return body


CUTS_ANSWER_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two questions: the first pause, and the longest."""


class NoCuts(Exception):
    """None came in time. The message says who was waited for."""


def agreed(place: ProcessContext, choose: Callable[[], ChosenCuts]) -> ChosenCuts:
    """The cuts of the job, which are the same for all its workers and all their starts.

    Worker 0 calls `choose` where none are kept. Raises NoCuts after `place.config.connect_seconds` in which it had nothing to do but to
    wait, and what `choose` raises.
    """
    chooser, offer = place.index == 0 and place.local == 0, None
    limit = place.config.connect_seconds
    began = said = time.monotonic()
    pause, what = FIRST_PAUSE, ""
    while True:
        try:
            found = _asked_cuts(place, offer)
        except (StreamClosed, TimeoutError, WireError, OSError) as error:
            what = f"shard 0, which keeps the cuts of the stages ({one_line(error, 200)})"
        else:
            if found is not None:
                return found
            if chooser and offer is None:
                offer = choose()
                began = said = time.monotonic()
                continue
            what = "worker 0, which chooses the cuts of the stages"
        now = time.monotonic()
        if now - began > limit:
            raise NoCuts(f"waited {limit:.0f} s for {what}; see its log")
        if now - said > SAID_SECONDS:
            said = now
            log.warning("waiting for %s, %d s", what, now - began)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _asked_cuts(place: ProcessContext, offer: ChosenCuts | None) -> ChosenCuts | None:
    """The cuts that shard 0 keeps; None: it has none yet. Raises as `_asked`."""
    body = _asked(place, {"asks": ASKS_CUTS, **({} if offer is None else offer.to_json())}, CUTS_ANSWER_SECONDS)
    try:
        return ChosenCuts.from_json(body, len(place.config.stages.replicas)) if body else None
    except ValueError as error:
        raise WireError(f"shard 0: {error}") from None


DIAL_SECONDS = 3.0


def newest_process(place: ProcessContext, index: int) -> Stream:
    """A stream to the newest process that proves to be shard `index`, of all addresses of its name.

    Raises StreamClosed or TimeoutError if no shard answers, WireError if only such answer as cannot prove to be that shard.
    """
    peer = place.config.shards[index]
    found: list[tuple[tuple[int, int], Stream]] = []
    unproven: WireError | None = None
    closed: Exception = StreamClosed(f"{peer.host}:{peer.port} does not answer")
    for stream in tcp.connect(peer.host, peer.port, DIAL_SECONDS):
        try:
            standing = greet(stream, place, index)
        except (StreamClosed, TimeoutError) as error:
            closed = error
            stream.close()
        except WireError as error:
            unproven = error
            stream.close()
        else:
            found.append(((standing.term, standing.attempt), stream))
    if not found:
        raise unproven or closed
    chosen = found[newest_attempt([told for told, _ in found])][1]
    for _, stream in found:
        if stream is not chosen:
            stream.close()
    return chosen
