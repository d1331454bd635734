"""A worker's stream to a shard: of all addresses of its name, the newest process is said hello to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psjob.modes import written
from psjob.protocol.worker.link import newest
from psjob.wire import tcp
from psjob.wire.frame import Kind, WireError
from psjob.wire.handshake import greet
from psjob.wire.tcp import Stream, StreamClosed
from psjob.worker.sharing import SLOTS

if TYPE_CHECKING:
    from psjob.worker.link import ShardLink

DIAL_SECONDS = 3.0


def dial(link: ShardLink) -> Stream | None:
    """A stream on which hello was said: of all addresses of the name, the one whose shard is the newest.

    Raises WireError where only such answer as cannot prove to be that shard.
    """
    place = link.session.place
    found: list[tuple[tuple[int, int], Stream]] = []
    problem: WireError | None = None
    for stream in tcp.connect(link.peer.host, link.peer.port, DIAL_SECONDS):
        try:
            standing = greet(stream, place, link.index)
        except (StreamClosed, TimeoutError):
            stream.close()
        except WireError as error:
            problem = error
            stream.close()
        else:
            found.append(((standing.view, standing.attempt), stream))
    if not found:
        if problem is not None:
            raise problem
        return None
    chosen = found[newest([told for told, _ in found])][1]
    for _, stream in found:
        if stream is not chosen:
            stream.close()
    with link.session.cond:
        hello = _hello(link, str(chosen.sock.getsockname()[0]))
    chosen.send_json(link.session.header(Kind.HELLO, attempt=link.attempt), hello)
    return chosen


def _hello(link: ShardLink, host: str) -> dict[str, Any]:
    """`host`: the address by which this process reaches the shard."""
    session, codecs = link.session, link.session.exchange.compression
    body: dict[str, Any] = {
        "role": "worker", "codecs": codecs.offered(),
        "transports": session.transports, "rowTransports": session.row_transports, "slots": SLOTS,
        "layout": session.layout.digest(), "mode": written(session.mode),
        "push": codecs.push[link.index], "pull": codecs.pull[link.index],
    } | session.machine.hello(link.index)  # fmt: skip
    if link.index == 0:
        if session.stage_links is not None:
            body["port"] = session.stage_links.listen(host)
        body["has"] = None if link.record.id is None else [*link.record.id, link.record.count]
        body["rule"] = session.rule
        body["aliases"] = session.aliases
        body["tables"] = [spec.to_json() for spec in session.rows.specs]
        body["table"] = [spec.to_json() for spec in session.layout.table]
    return body
