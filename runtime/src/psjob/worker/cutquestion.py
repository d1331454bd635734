"""Before a worker joins a job of stages whose cuts psjob chooses: it asks shard 0 for them, and worker 0 tells those that it has chosen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from psjob.pipeline.chosen import ASKS, ChosenCuts
from psjob.process.config import Place
from psjob.protocol.worker.link import newest
from psjob.wire import tcp
from psjob.wire.frame import Header, Kind, WireError, run_digest
from psjob.wire.handshake import greet
from psjob.wire.tcp import Stream, StreamClosed
from psjob.wire.unauthenticated import one_line
from psjob.worker.link import DIAL_SECONDS

ANSWER_SECONDS = 10.0
PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two questions: the first pause, and the longest."""
SAID_SECONDS = 30.0
log = logging.getLogger("psjob.worker")


class NoCuts(Exception):
    """None came in time. The message says who was waited for."""


def agreed(place: Place, choose: Callable[[], ChosenCuts]) -> ChosenCuts:
    """The cuts of the job, which are the same for all its workers and all their starts.

    Worker 0 calls `choose` where none are kept. Raises NoCuts after `place.config.connect_seconds` in which it had nothing to do but to
    wait, and what `choose` raises.
    """
    chooser, offer = place.index == 0 and place.local == 0, None
    limit = place.config.connect_seconds
    began = said = time.monotonic()
    pause, what = PAUSE, ""
    while True:
        try:
            found = _asked(place, offer)
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


def _asked(place: Place, offer: ChosenCuts | None) -> ChosenCuts | None:
    """One question. Raises StreamClosed, TimeoutError and WireError where no shard 0 of this run answers."""
    stream = dialled(place)
    try:
        hello = {"role": "worker", "fresh": True, "asks": ASKS, **({} if offer is None else offer.to_json())}
        head = Header(Kind.HELLO, run=run_digest(place.run), worker=place.index, start=place.number, rewinds=place.rewinds)
        stream.send_json(head, hello)
        header = stream.recv_header(ANSWER_SECONDS)
        body = stream.recv_json(header)
    finally:
        stream.close()
    if header.kind is not Kind.WELCOME:
        raise WireError(str(body.get("error", f"it answered {header.kind.name}")))
    try:
        return ChosenCuts.from_json(body, len(place.config.stages.replicas)) if body else None
    except ValueError as error:
        raise WireError(f"shard 0: {error}") from None


def dialled(place: Place) -> Stream:
    """To the newest process that proves to be shard 0."""
    peer, found = place.config.shards[0], []
    problem: Exception = StreamClosed(f"{peer.host}:{peer.port} does not answer")
    for stream in tcp.connect(peer.host, peer.port, DIAL_SECONDS):
        try:
            standing = greet(stream, place, 0)
        except (StreamClosed, TimeoutError, WireError) as error:
            problem = error
            stream.close()
        else:
            found.append(((standing.view, standing.attempt), stream))
    if not found:
        raise problem
    chosen = found[newest([told for told, _ in found])][1]
    for _, stream in found:
        if stream is not chosen:
            stream.close()
    return chosen
