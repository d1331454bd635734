"""What peers run in: environments made from `bench/requirements-<name>.txt`, and trees of earlier commits, kept beside the other caches."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ROOMS = ("runtime", "operator", "client")
"""Folders with sources of psjob."""
INSTALL_SECONDS = 900


class Missing(Exception):
    """A peer that cannot be had on this machine; the text says why."""


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


def tree_of(commit: str) -> Path:
    """The tree of an earlier commit of this repository. Raises Missing where the repository has no history that holds it."""
    home = _cache() / f"bench-commit-{commit}"
    if home.exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as made:
        _run(["git", "-C", str(ROOT), "archive", "--format=tar", "-o", f"{made}/tree.tar", commit], f"commit {commit[:12]}")
        with tarfile.open(f"{made}/tree.tar") as tree:
            tree.extractall(f"{made}/tree", filter="data")
        os.replace(f"{made}/tree", home)
    return home


def environment_of(tree: Path) -> dict[str, str]:
    """What a program has in its environment that is to use psjob as `tree` has it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / room / "src") for room in ROOMS)}


def _run(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{name} is not to be had: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word why"]
        raise Missing(f"{name} is not to be had: {lines[-1][:200]}")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("PSJOB_CACHE") or f"{base}/psjob-dev")
