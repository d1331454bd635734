"""What is derived from a run's keys (see `contract.KEYS`): keys of single processes, and proofs for the status port.

All of it is HMAC with SHA-256 (RFC 2104). This file imports the standard library alone, so that the operator's copy (made by
`make generate`) is the same text.
"""

from __future__ import annotations

import hashlib
import hmac

SIZE = 32
"""Bytes of a key."""
BLOCK = 64
"""Bytes that SHA-256 takes at a time."""


def worker(workers: bytes, index: int, start: int) -> bytes:
    """The key of that start of a worker."""
    return mac(workers, f"worker:{index}:{start}")


def shard(shards: bytes, index: int, attempt: int) -> bytes:
    """The key of that attempt of a shard."""
    return mac(shards, f"shard:{index}:{attempt}")


def question(questions: bytes, nonce: str, path: str) -> str:
    """The proof of who asks for `path`, in hex digits."""
    return mac(questions, f"ask:{nonce}:{path}").hex()


def answer(questions: bytes, nonce: str, path: str, body: bytes) -> str:
    """The proof of who answers, in hex digits."""
    return mac(questions, f"answer:{nonce}:{path}:{hashlib.sha256(body).hexdigest()}").hex()


def mac(key: bytes, message: str) -> bytes:
    """HMAC-SHA256."""
    return hmac.digest(key, message.encode(), "sha256")


def blocks(key: bytes) -> tuple[bytes, bytes]:
    """The inner and the outer block of HMAC: SHA256(outer + SHA256(inner + message)) is the HMAC of a message."""
    padded = key.ljust(BLOCK, b"\0")
    return bytes(byte ^ 0x36 for byte in padded), bytes(byte ^ 0x5C for byte in padded)
