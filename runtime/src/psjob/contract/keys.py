"""What is derived from a run's keys (see `contract.KEYS`): keys of single processes, and proofs for the status port.

All of it is HMAC with SHA-256 (RFC 2104). This file imports only the standard library, so that the operator's copy (made by
`make generate`) is the same text.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

SIZE = 32
"""Bytes of a key."""
BLOCK = 64
"""Bytes that SHA-256 takes at a time."""
NAMES = ("workers", "shards", "questions")
"""Of a run's keys."""


def fresh() -> dict[str, bytes]:
    """Random keys of a run, by name."""
    return {name: secrets.token_bytes(SIZE) for name in NAMES}


def worker_key(workers: bytes, index: int, start: int) -> bytes:
    """The key of that start of a worker."""
    return mac(workers, f"worker:{index}:{start}")


def shard_key(shards: bytes, index: int, attempt: int) -> bytes:
    """The key of that attempt of a shard."""
    return mac(shards, f"shard:{index}:{attempt}")


def link_key(workers: bytes, ends: Mapping[int, int]) -> bytes:
    """The key of the stream between two workers, by the start of each rank."""
    return mac(workers, _ends(ends))


def masked(worker: bytes, link: bytes, ends: Mapping[int, int]) -> bytes:
    """The key of a stream between workers as one of them gets it, and as it is again once it is masked again. `worker`: its own key."""
    return bytes(one ^ other for one, other in zip(link, mac(worker, _ends(ends)), strict=True))


def _ends(ends: Mapping[int, int]) -> str:
    return "link:" + ":".join(f"{rank}:{start}" for rank, start in sorted(ends.items()))


def question(questions: bytes, nonce: str, path: str) -> str:
    """The proof of who asks for `path`, in hex digits."""
    return mac(questions, f"ask:{nonce}:{path}").hex()


def answer(questions: bytes, nonce: str, path: str, body: bytes) -> str:
    """The proof of who answers, in hex digits."""
    return mac(questions, f"answer:{nonce}:{path}:{hashlib.sha256(body).hexdigest()}").hex()


def mac(key: bytes, message: str) -> bytes:
    """HMAC-SHA256."""
    return hmac.digest(key, message.encode(), "sha256")


def same(said: str, expected: str) -> bool:
    """Whether two proofs are the same, in a time that tells nothing of where they differ."""
    return hmac.compare_digest(said.encode(errors="replace"), expected.encode())  # a header may hold what no text can


def blocks(key: bytes) -> tuple[bytes, bytes]:
    """The inner and the outer block of HMAC: SHA256(outer + SHA256(inner + message)) is the HMAC of a message."""
    padded = key.ljust(BLOCK, b"\0")
    return bytes(byte ^ 0x36 for byte in padded), bytes(byte ^ 0x5C for byte in padded)


def process_key_file(run: Mapping[str, bytes], role: str, index: int, number: int) -> str:
    """The file of one process. `run`: its run's keys by name; `number`: a worker's start or a shard's attempt."""
    if role == "worker":
        keys = {"worker": worker_key(run["workers"], index, number)}
    else:
        keys = {"shard": shard_key(run["shards"], index, number), "workers": run["workers"], "questions": run["questions"]}
        if index == 0:
            keys["shards"] = run["shards"]
    return format_keys(keys)


def format_keys(named: Mapping[str, bytes]) -> str:
    """A line of a key file for each key."""
    return "".join(f"{name} {key.hex()}\n" for name, key in named.items())


def parse_keys(text: str) -> dict[str, bytes]:
    """The keys of a key file by name. Raises ValueError if it is none; the text of it holds no key."""
    found: dict[str, bytes] = {}
    for line in text.splitlines():
        name, _, digits = line.partition(" ")
        key = bytes.fromhex(digits) if len(digits) == 2 * SIZE and set(digits) <= set("0123456789abcdef") else b""
        if not name.isalpha() or len(key) != SIZE:
            raise ValueError(f"a line is not a name and {2 * SIZE} hex digits")
        found[name] = key
    return found
