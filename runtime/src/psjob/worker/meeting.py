"""A worker meets the others at a point of its script, by way of shard 0: see `psjob.shard.rendezvous`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from psjob.process.config import Place
from psjob.protocol.records import ASKS, BEFORE
from psjob.wire.frame import Header, Kind, WireError, run_digest
from psjob.wire.tcp import StreamClosed
from psjob.wire.unauthenticated import one_line
from psjob.worker.cutquestion import dialled

ANSWER_SECONDS = 15.0
PAUSE = 0.2
SAID_SECONDS = 30.0
log = logging.getLogger("psjob.worker")


class NotMet(Exception):
    """They cannot meet. The message says who is missing, or why shard 0 was not reached."""


def meet(place: Place, point: str, said: str, check: Callable[[], None], waits: bool = True, first: bool = False) -> list[str] | None:
    """What each worker has said at this point, by rank, once all are there; with `first`, once rank 0 is there, what that has said.

    None: the point was passed before this process began, or it does not wait and some are missing. `check` raises what ends the wait.
    Raises NotMet where a worker has ended its script without coming, or shard 0 cannot be reached for `connect_seconds`.
    """
    heard = noted = time.monotonic()
    while True:
        check()
        try:
            answer = _asked(place, point, said, waits, first)
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


def _asked(place: Place, point: str, said: str, waits: bool, first: bool) -> dict[str, list[object]]:
    stream = dialled(place)
    try:
        head = Header(Kind.HELLO, run=run_digest(place.run), worker=place.index, start=place.number, rewinds=place.rewinds)
        question = {"asks": ASKS, "point": point, "said": said, "waits": waits, "first": first}
        stream.send_json(head, {"role": "worker", "fresh": True, **question})
        header = stream.recv_header(ANSWER_SECONDS)
        body: dict[str, list[object]] = stream.recv_json(header)
    finally:
        stream.close()
    if header.kind is not Kind.WELCOME:
        raise WireError(str(body.get("error", f"it answered {header.kind.name}")))
    return body
