"""TLS 1.3 (RFC 8446) of a stream, by the standard library: who dials checks the shard's certificate against the authority of the run.

Bytes pass through memory, so that streams wait, count bytes and end as they do without it. Of the two ends only the shard has a
certificate; who dials proves itself within, see `psjob.wire.auth`.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from typing import Final

from psjob.wire.auth import Unproven

RECORD: Final = 0x16
"""The first byte of who dials with TLS: a record of the handshake."""
PIECE: Final = 64 << 10
"""Bytes that are encrypted, or received, at a time."""


class Tls:
    """One encrypted connection. One thread may read while another writes."""

    def __init__(self, context: ssl.SSLContext, shard: str | None) -> None:
        """`shard`: the name of who is dialled; None where this end is the shard."""
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._came, self._goes, server_side=shard is None, server_hostname=shard)
        self._lock = threading.Lock()  # an SSL object serves one thread at a time
        self.behind = False
        """May something that has come be read?"""

    def shake(self, came: bytes | memoryview) -> tuple[bytes, bool]:
        """Go on with the handshake: (what is to be sent, whether it is over). Raises Unproven where the other end is not who it must be."""
        self._came.write(came)
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return self._goes.read(), False
        except ssl.SSLCertVerificationError as error:
            name = self._ssl.server_hostname
            raise Unproven(f"the certificate of the process that answers there is not that of {name}: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise Unproven(f"no TLS 1.3 with the process that is there: {error.reason or error}") from None
        self.behind = True
        return self._goes.read(), True

    def feed(self, came: memoryview) -> None:
        """Take encrypted bytes that have come."""
        with self._lock:
            self._came.write(came)
            self.behind = True

    def read(self, places: Sequence[memoryview]) -> int:
        """Decrypt into `places`; how many bytes, 0 where no record is whole. Raises OSError where one was changed, or TLS was ended."""
        done = 0
        with self._lock:
            for place in places:
                at = 0
                while at < len(place):
                    try:
                        count: int = self._ssl.read(len(place) - at, place[at:])  # type: ignore[assignment]
                    except ssl.SSLWantReadError:
                        self.behind = False
                        return done
                    if not count:
                        raise ConnectionResetError("the peer ended TLS")
                    at += count
                    done += count
        return done

    def encrypt(self, parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
        """What is to be sent for `parts`. Raises ssl.SSLError, an OSError."""
        with self._lock:
            for part in parts:
                if len(part):
                    self._ssl.write(part)
            return self._goes.read()


def pieces(parts: Sequence[bytes | bytearray | memoryview]) -> tuple[list[memoryview], list[memoryview]]:
    """(the first PIECE bytes of `parts`, the rest)."""
    first: list[memoryview] = []
    room = PIECE
    for at, part in enumerate(parts):
        view = memoryview(part)
        if len(view) > room:
            return [*first, view[:room]], [view[room:], *(memoryview(later) for later in parts[at + 1 :])]
        first.append(view)
        room -= len(view)
    return first, []
