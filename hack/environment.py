"""Python environments of tools that hold others' pins back: one for each file of pins, made once, kept in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hack.cluster.paths import cache

ROOT = Path(__file__).resolve().parents[1]


def programs(name: str) -> Path:
    """The folder of programs that `requirements/NAME.txt` installs. Installs them where they are not there.

    Raises SystemExit with a sentence where uv is missing or an installation fails.
    """
    pins = ROOT / "requirements" / f"{name}.txt"
    home = cache() / f"{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    if not home.exists():
        cache().mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache(), prefix=f"{name}-"))
        uv = installer()
        output(uv, "venv", "-q", "--relocatable", "--python", sys.executable, "--clear", str(scratch))
        output(uv, "pip", "install", "-q", "--python", str(scratch / "bin" / "python"), "--require-hashes", "-r", str(pins))
        try:
            scratch.rename(home)
        except OSError:  # another process was quicker
            shutil.rmtree(scratch)
    return home / "bin"


def installer() -> str:
    """uv, from PATH or where hack/install.sh put it."""
    found = shutil.which("uv", path=os.pathsep.join([os.environ.get("PATH", ""), *(str(path) for path in cache().glob("uv-*/bin"))]))
    if found is None:
        raise SystemExit("uv is neither on PATH nor in the cache; run: make install")
    return found


def output(*command: str) -> str:
    """What the command prints. Raises SystemExit with the end of its errors where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout
