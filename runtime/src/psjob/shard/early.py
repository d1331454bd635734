"""While torch is being imported (which takes seconds): tell the coordinator that this shard comes back with a new view.

The others can rewind their workers meanwhile. It is only a hint: if it is lost, the real hello says the same later.
"""

from __future__ import annotations

from psjob.process.config import Place
from psjob.shard.hello import hello_body
from psjob.wire import tcp
from psjob.wire.frame import Header, Kind, WireError, run_digest
from psjob.wire.handshake import greet

SECONDS = 0.5


def announce(here: Place) -> None:
    """Say hello early to shard 0; whatever goes wrong is left to the real hello."""
    if here.index == 0 or here.number == 1:
        return
    peer = here.config.shards[0]
    header = Header(Kind.HELLO, run=run_digest(here.run), view=here.view, attempt=here.number, worker=-1 - here.index)
    try:
        for stream in tcp.connect(peer.host, peer.port, SECONDS):
            greet(stream, here, 0, SECONDS)
            stream.send_json(header, hello_body(here.index, here.number, here.view, False, 0, early=True))
            stream.close()
            return
    except (OSError, WireError):
        return
