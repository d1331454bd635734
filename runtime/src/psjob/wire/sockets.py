"""What a socket is told and asked before it carries frames."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
import sys
import termios

SLICE_SECONDS = 1.0
"""Longest wait of one call to the kernel, which does not tell when within the call its last byte moved."""
_LAST_ACK = 56
"""Where tcpi_last_ack_recv (uint32, milliseconds) lies in struct tcp_info of linux/tcp.h."""


def timeval(seconds: float) -> bytes:
    """What SO_RCVTIMEO and SO_SNDTIMEO take."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def peer_name(sock: socket.socket) -> str:
    """The other end's `host:port`; `peer` where there is none."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "peer"
    return f"{host}:{port}"


def one_host(sock: socket.socket) -> bool:
    """Both ends have one address: what is sent never leaves this machine's memory."""
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:
        return False


def unconfirmed(sock: socket.socket) -> int:
    """Bytes that were written and the peer's system has not confirmed; 0 where this system does not tell. Raises OSError."""
    if not sys.platform.startswith("linux"):
        return 0
    count = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    return count[0]


def unpaced(sock: socket.socket) -> None:
    """Nothing can be congested between two ends of one host, where a paced algorithm (BBR) sends at two thirds of what memory gives."""
    with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def unheard(sock: socket.socket) -> float:
    """Seconds since the peer's system last confirmed anything; with `keepalive` it is asked to where nothing is sent.

    A peer that stands still goes on confirming: its system does that. 0 where this system does not tell. Raises OSError.
    """
    if not sys.platform.startswith("linux"):
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
    return float(struct.unpack_from("@I", info, _LAST_ACK)[0]) / 1000 if len(info) >= _LAST_ACK + 4 else 0.0


def keepalive(sock: socket.socket) -> None:
    """Let the kernel ask a silent peer for a confirmation, and end a connection whose other end has gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 8), ("TCP_USER_TIMEOUT", 45_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
