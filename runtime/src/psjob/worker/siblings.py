"""The line between two processes of one worker: frames of a few words with what they carry, and a descriptor with the first."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from psjob.process import supervise
from psjob.process.errors import Refused
from psjob.wire.frame import MAX_RECORD

_HEAD: Final = struct.Struct("<IQ")
MOST_WORDS: Final = 64 << 20
"""Bytes of JSON in a frame: the names and shapes of a model fit."""


class Said(NamedTuple):
    """A frame. `fd`: a descriptor that came with it, -1 for none."""

    body: Mapping[str, Any]
    data: bytes
    fd: int


class Sibling:
    """The line to one process. `told` is called with each frame by a thread of this object's, with None once where the line ends."""

    def __init__(self, fd: int, name: str, told: Callable[[Said | None], None]) -> None:
        try:
            self._sock = socket.socket(fileno=fd)
        except OSError as error:
            raise Refused(f"this process has no line to process {name} of its worker: {error}; leave open descriptors alone") from None
        os.set_inheritable(fd, False)
        self._told = told
        self._sending = threading.Lock()
        self._thread = supervise.start(self._read, f"process-{name}")

    def say(self, body: Mapping[str, Any], data: bytes = b"", fd: int = -1) -> None:
        """Send a frame. Nothing where the line has ended: the agent ends this process soon."""
        raw = json.dumps(body).encode()
        head = _HEAD.pack(len(raw), len(data))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        with self._sending:
            try:
                self._sock.sendmsg([head], rights)
                self._sock.sendall(raw + data)
            except OSError:
                pass

    def close(self) -> None:
        """Nothing is said or heard any more."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def forget(self) -> None:
        """In a fork: close the copy."""
        self._sock.close()

    def _read(self) -> None:
        try:
            while (said := self._next()) is not None:
                self._told(said)
        except (OSError, ValueError):
            pass
        self._told(None)

    def _next(self) -> Said | None:
        head, rights, _flags, _address = self._sock.recvmsg(_HEAD.size, socket.CMSG_SPACE(4), socket.MSG_WAITALL)
        if len(head) < _HEAD.size:
            return None
        words, size = _HEAD.unpack(head)
        if words > MOST_WORDS or size > MAX_RECORD:
            raise ValueError(f"a frame of {words} and {size} bytes")
        raw = self._exactly(words)
        data = self._exactly(size)
        given = [data for level, kind, data in rights if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
        fds = [fd for one in given for fd in array.array("i", one)]
        body = json.loads(raw)
        if not isinstance(body, dict):
            raise ValueError("a frame without names")
        return Said(body, data, fds[0] if fds else -1)

    def _exactly(self, size: int) -> bytes:
        found = bytearray(size)
        view, at = memoryview(found), 0
        while at < size:
            got = self._sock.recv_into(view[at:])
            if not got:
                raise ValueError("the line ended in a frame")
            at += got
        return bytes(found)
