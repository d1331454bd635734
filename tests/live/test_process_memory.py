"""The memory of a process is what the system says of it."""

from __future__ import annotations

import subprocess
import sys

MIB = 1 << 20


ALONE = """
from psjob.process import limits
before = limits.resident()
held = bytearray(b"x") * (64 << 20)
now, peak = limits.resident(), limits.peak()
del held
print(before, now, peak, limits.resident(), limits.peak())
"""


def test_memory_is_what_the_system_says() -> None:
    """Memory that is written to counts at once, and in the peak after it has gone. In a process without other threads."""
    told = subprocess.run([sys.executable, "-c", ALONE], check=True, capture_output=True, text=True, timeout=60).stdout
    before, now, peak, after, still = (int(number) for number in told.split())
    assert now >= before + 60 * MIB and peak >= now - MIB
    assert after < now - 56 * MIB and still >= peak - 4 * MIB  # kernels count in lots
