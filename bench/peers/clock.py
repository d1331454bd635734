"""What every measured program has in common: its words, its clock, its answer. Imports nothing that must be installed."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

WARM_UP = 3
LEAST = 5
ROUNDS = 12
"""Measured rounds where several processes must make the same number."""


def asked(about: str | None) -> argparse.Namespace:
    """The words that every program takes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the parameters, 1e6 bytes of float32 each (default 100)")
    parser.add_argument("--tensors", type=int, default=25, help="number of tensors of equal size (default 25)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--streams", type=int, default=1, help="psjob: TCP streams a worker and shard")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long is measured")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--what", default="", help="which of several ways, where a program has them")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def cycles(step: Callable[[], object], seconds: float, more: Callable[[bool], object] = bool) -> list[float]:
    """Call `step` for so long; seconds of each call after the warm-up. `more` is told before each, untimed, whether one comes."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < WARM_UP + LEAST or time.perf_counter() < end:
        more(True)
        found += once(step)
    more(False)
    return found[WARM_UP:]


def once(step: Callable[[], object]) -> list[float]:
    """Seconds of one call."""
    start = time.perf_counter()
    step()
    return [time.perf_counter() - start]


def rounds(step: Callable[[], object]) -> list[float]:
    """Seconds of each of ROUNDS calls after the warm-up: for workers that must all make the same number."""
    return [seconds for _ in range(WARM_UP + ROUNDS) for seconds in once(step)][WARM_UP:]


def answer(found: Sequence[float]) -> None:
    """Print what was measured, as the last line."""
    print(json.dumps({"seconds": list(found)}), flush=True)


def spawn(words: argparse.Namespace, part: str, rank: int = 0, port: int = 0, **environment: str) -> subprocess.Popen[str]:
    """Another process of this program, for `part`; its output is kept."""
    options = ["--megabytes", "--tensors", "--workers", "--shards", "--streams", "--seconds", "--optimizer", "--what"]
    given = [word for name in options for word in (name, str(getattr(words, name[2:])))]
    command = [sys.executable, os.path.abspath(sys.argv[0]), *given, "--part", part, "--rank", str(rank), "--port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def last_line(process: subprocess.Popen[str], seconds: float = 240.0) -> list[float]:
    """The answer of a spawned process. Raises RuntimeError where it has none."""
    said, _ = process.communicate(timeout=seconds)
    if process.returncode != 0 or not said.strip():
        raise RuntimeError(f"{process.args!r} ended with {process.returncode} and said {said[-300:]!r}")
    found: list[float] = json.loads(said.strip().splitlines()[-1])["seconds"]
    return found


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in held]
    for sock in held:
        sock.close()
    return ports
