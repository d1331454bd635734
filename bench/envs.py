"""Environments of the peers: each one its own, made from `bench/requirements-<name>.txt`, kept beside the other caches."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALL_SECONDS = 900


class Missing(Exception):
    """A peer that this machine could not install; the text says why."""


def python_of(name: str) -> str:
    """Interpreter that has the peer `name`; ours where it has no requirements of its own. Raises Missing."""
    pins = HERE / f"requirements-{name}.txt"
    if not pins.exists():
        return sys.executable
    home = _cache() / f"bench-{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        shutil.rmtree(home, ignore_errors=True)
        uv = shutil.which("uv") or str(_cache() / "uv-0.11" / "bin" / "uv")
        print(f"installing {name} into an environment of its own", file=sys.stderr, flush=True)
        _run([uv, "venv", "-q", "--python", sys.executable, str(home)], name)
        _run([uv, "pip", "install", "-q", "--python", str(python), "-r", str(pins)], name)
        (home / "installed").touch()
    return str(python)


def _run(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{name} was not installed: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word why"]
        raise Missing(f"{name} was not installed: {lines[-1][:200]}")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("PSJOB_CACHE") or f"{base}/psjob-dev")
