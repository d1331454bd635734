"""What every measured program has in common: its words, its clock, its answer. Imports nothing that must be installed."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

WARM_UP = 3
LEAST = 5
ROUNDS = 12
"""Measured rounds where several processes must make the same number."""
RATE = 1e-3
"""Learning rate of every program; every gradient is ones and weights begin at zero, so that `check` knows what they must be."""
WORDS = (
    ("--megabytes", int, 100, "size of the parameters, 1e6 bytes of float32 each"),
    ("--tensors", int, 25, "number of tensors of equal size"),
    ("--workers", int, 1, "processes that train"),
    ("--shards", int, 1, "processes that hold the parameters"),
    ("--seconds", float, 2.0, "how long is measured"),
    ("--optimizer", str, "sgd", "sgd or adam"),
    ("--factor", float, 1.0, "psjob: what maxGradNorm multiplies the gradient by"),
    ("--what", str, "", "which of several ways, where a program has them"),
    ("--device", str, "cpu", "where the model lies, cpu or cuda, in programs that know of devices"),
)


def asked(about: str | None) -> argparse.Namespace:
    """The words that every program takes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, default, text in WORDS:
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default {default})")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="psjob: a key of the job's config, value in JSON")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def cycles(step: Callable[[], object], seconds: float, more: Callable[[bool], object] = bool) -> list[float]:
    """Warm up, then call `step` for so long; seconds of each call. `more` is told before each, untimed, whether one comes."""
    found: list[float] = []
    end = float("inf")
    while len(found) < WARM_UP + LEAST or time.perf_counter() < end:
        more(True)
        found += once(step)
        if len(found) == WARM_UP:
            end = time.perf_counter() + seconds
    more(False)
    return found[WARM_UP:]


def once(step: Callable[[], object]) -> list[float]:
    """Seconds of one call."""
    start = time.perf_counter()
    step()
    return [time.perf_counter() - start]


def rounds(step: Callable[[], object], warm_up: int = WARM_UP, measured: int = ROUNDS) -> list[float]:
    """Seconds of each of so many calls after the warm-up: for workers that must all make the same number."""
    return [seconds for _ in range(warm_up + measured) for seconds in once(step)][warm_up:]


def check(weights: Iterable[float], wanted: float) -> None:
    """Raise RuntimeError unless these weights of a worker are what the steps must have made of them."""
    for weight in weights:
        if abs(weight - wanted) > 1e-3 * abs(wanted):
            raise RuntimeError(f"a worker's weight is {weight} in the end, expected {wanted}: that is not the same work")


def moved(found: Sequence[float], warm_up: int = WARM_UP) -> float:
    """Where a weight is after the warm-up and these measured steps: each takes RATE off it."""
    return -RATE * (warm_up + len(found))


def answer(found: Sequence[float], **also: float) -> None:
    """Print what was measured, as the last line, for a row that compares two programs; `loss` is compared with the other's."""
    print(json.dumps({"seconds": list(found), **also}), flush=True)


def row(what: str, figure: float, unit: str, most: float | None = None, least: float | None = None, note: str = "") -> dict[str, object]:
    """A finished row: `figure` is to be at `most`, or at `least`, so much (neither: told only)."""
    return {"what": what, "figure": figure, "unit": unit, "most": most, "least": least, "note": note}


def answer_rows(rows: Sequence[dict[str, object]]) -> None:
    """Print finished rows, as the last line, for a measure that is no comparison of two programs."""
    print(json.dumps({"rows": list(rows)}), flush=True)


def spawn(words: argparse.Namespace, part: str, rank: int = 0, port: int = 0, **environment: str) -> subprocess.Popen[str]:
    """Another process of this program, for `part`; its output is kept."""
    given = [word for name, *_ in WORDS for word in (name, str(getattr(words, name[2:])))]
    given += [word for pair in words.set for word in ("--set", pair)]
    command = [sys.executable, os.path.abspath(sys.argv[0]), *given, "--part", part, "--rank", str(rank), "--port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def last_line(process: subprocess.Popen[str], seconds: float = 240.0) -> list[float]:
    """The answer of a spawned process. Raises RuntimeError if it has none."""
    said, _ = process.communicate(timeout=seconds)
    if process.returncode != 0 or not said.strip():
        raise RuntimeError(f"{os.path.basename(sys.argv[0])}: its process ended with {process.returncode} and said {said[-300:]!r}")
    found: list[float] = json.loads(said.strip().splitlines()[-1])["seconds"]
    return found


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in held]
    for sock in held:
        sock.close()
    return ports
