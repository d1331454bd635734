"""Nonces of the status port: each is good for one question, and for a short time. None is kept until it has been used."""

from __future__ import annotations

import secrets
import threading

from psjob.contract import keys

SAID = 32
"""Digits of a nonce before its seal: when it was made, in microseconds, and half of them random."""


class Nonces:
    """Hex digits. Times are those of one clock, in seconds; a nonce is good for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._key = secrets.token_bytes(keys.SIZE)
        self._used: dict[str, float] = {}
        """By nonce, until when it would have been good; oldest first."""
        self._lock = threading.Lock()

    def make(self, now: float) -> str:
        """A fresh one."""
        said = f"{int(now * 1e6):016x}{secrets.token_hex(8)}"
        return said + keys.mac(self._key, said).hex()

    def spend(self, nonce: str, now: float) -> bool:
        """Use it up; False where it was not made here, is too old, or was used before."""
        said, seal = nonce[:SAID], nonce[SAID:]
        if not keys.same(seal, keys.mac(self._key, said).hex()):
            return False
        until = int(said[:16], 16) / 1e6 + self._seconds
        with self._lock:
            while self._used and (oldest := next(iter(self._used.items())))[1] < now:
                del self._used[oldest[0]]
            if now > until or nonce in self._used:
                return False
            self._used[nonce] = until
            return True
