"""The packages whose programs are trained: pinned by hash, beside .venv, in the cache. None of their code is in this repository."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache as once
from pathlib import Path

from hack.cluster.paths import cache
from hack.environment import installer, output

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "requirements" / "programs.txt"
APART = ("benchmarks", "docs", "examples", "scripts", "test", "tests")
"""Folders of wheels that are no packages: they would hide others of their names."""


@once
def site() -> Path:
    """The folder that programs find their packages in, by PYTHONPATH. Installs it where it is not there; SystemExit where that fails."""

    def fill(folder: Path) -> None:
        output(installer(), "pip", "install", "-q", "--no-deps", "--require-hashes", "--python", sys.executable,
               "--target", str(folder / "site"), "-r", str(PINS))  # fmt: skip
        (folder / "apart").mkdir()
        for name in APART:
            if (folder / "site" / name).exists():
                (folder / "site" / name).rename(folder / "apart" / name)

    return _made("programs", PINS.read_text(), fill) / "site"


@once
def archive(package: str) -> Path:
    """The unpacked source archive of a pinned package. SystemExit where it cannot be fetched."""
    pin = _pin(package)

    def fill(folder: Path) -> None:
        (folder / "pin.txt").write_text(pin)
        words = [
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--require-hashes",
            "-d",
            str(folder),
            "-r",
            str(folder / "pin.txt"),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "PYTHONPATH": str(site())},
        )
        if done.returncode:
            raise SystemExit(f"{package} was not fetched: {done.stderr.strip()[-2000:]}")
        (packed,) = folder.glob("*.tar.gz")
        with tarfile.open(packed) as tar:
            tar.extractall(folder / "unpacked", filter="data")
        packed.unlink()

    (inner,) = (_made(f"program-{package}", pin, fill) / "unpacked").iterdir()
    return inner


def version(package: str) -> str:
    """The one that is pinned, for .venv or beside it."""
    for pins in (PINS, ROOT / "requirements" / "dev.txt"):
        if found := re.search(rf"^{re.escape(package)}==(\S+)", pins.read_text(), re.MULTILINE):
            return found[1]
    raise KeyError(f"{package} is pinned nowhere")


def beside(package: str) -> bool:
    """Whether it lies beside .venv, and not in it."""
    return re.search(rf"^{re.escape(package)}==", PINS.read_text(), re.MULTILINE) is not None


def _pin(package: str) -> str:
    """Its requirement with hashes."""
    found = re.search(rf"^{re.escape(package)}==(?:[^\n]*\\\n)*[^\n]*$", PINS.read_text(), re.MULTILINE)
    if found is None:
        raise KeyError(f"{package} is not in {PINS}")
    return found[0] + "\n"


def _made(name: str, text: str, fill: Callable[[Path], None]) -> Path:
    """The folder in the cache that `fill` makes for this text, once for all processes."""
    home = cache() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not home.exists():
        cache().mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache(), prefix=f"{name}-"))
        try:
            fill(scratch)
            scratch.rename(home)
        except BaseException as error:  # another process may have been quicker
            shutil.rmtree(scratch, ignore_errors=True)
            if not (isinstance(error, OSError) and home.exists()):
                raise
    return home
