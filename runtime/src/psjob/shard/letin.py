"""How a worker's session begins: the one before it ends, and this shard comes to serve the view that the worker was welcomed in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from psjob.modes import written
from psjob.shard.phase import Phase
from psjob.wire.frame import Kind
from psjob.wire.reading import Pause, StreamClosed, Wants

if TYPE_CHECKING:
    from psjob.shard.session import Session

WAITING_SECONDS = 2.0
END_SECONDS = 5.0
"""For the end of a session whose worker has dialled again."""


def let_in(session: Session, old: Session | None) -> Wants[None]:
    """Welcome a worker once `old` is over, or let shard 0's coordinator do so. Raises WireError where it may not join."""
    if old is not None:
        until = time.monotonic() + END_SECONDS
        old.after.append(session.stream.wake)
        while not old.done.is_set() and (left := until - time.monotonic()) > 0:
            yield Pause(left)
    server, store = session.server, session.store
    if server.coordinator is not None:
        server.coordinator.hello(session)
        return
    server.admitting[session] = None
    try:
        yield from _served(session)
    finally:
        server.admitting.pop(session, None)
    if server.final:
        session.tell(Kind.FINISHED)
        session.hang_up()
        return
    together = store.mode.rewinds_together and store.phase is Phase.SERVING
    if (together and int(session.hello.get("recovery", 0)) != store.recovery) or session.mode != written(store.mode):
        session.rewind()
        return
    session.join()
    session.welcome()


def _served(session: Session) -> Wants[None]:
    """Wait until this shard serves the worker's view, or all is over; tell the worker now and then."""
    server, store, hello = session.server, session.store, session.hello
    told = time.monotonic()
    while not server.final:
        ready = store.phase is Phase.SERVING or (store.phase is Phase.INIT and hello.get("init"))
        if ready and store.view >= int(hello.get("view", 0)):
            return
        yield Pause(max(0.0, told + WAITING_SECONDS - time.monotonic()))
        if server.replaced(session):
            raise StreamClosed(session.stream.peer)
        if time.monotonic() - told >= WAITING_SECONDS:
            told = time.monotonic()
            session.tell(Kind.WAITING, {"shard": store.index, "state": store.phase.value, "view": store.view})
