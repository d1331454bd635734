"""The folder that pods mount at /torch: torch, numpy and scikit-learn and their needs, by hard links from .venv, and nothing else.

Never .venv itself: psjob is installed there and would hide a broken injection.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from hack.cluster.paths import Unavailable, cache
from hack.cluster.rootfs import site_packages

ROOTS = ("torch", "numpy", "scikit-learn")
TARGET = "/torch"
WARM = "import torch, torch.utils.data, torch.optim, numpy, sklearn.datasets, sklearn.model_selection, sklearn.preprocessing"


def torch_site() -> Path:
    """Make the folder, or find it, and return it. Raises Unavailable while .venv has no torch."""
    chosen = _closure(site_packages())
    key = hashlib.sha256(
        repr((sys.version_info[:2], [(name, dist.version) for name, dist in sorted(chosen.items())])).encode()
    ).hexdigest()[:12]
    folder = cache() / f"torch-site-{key}"
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        for dist in chosen.values():
            _link(dist, site_packages(), scratch)
        _compile(scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(scratch)
    return folder


def _closure(site: Path) -> dict[str, importlib.metadata.Distribution]:
    installed = {plain(dist.metadata["Name"]): dist for dist in importlib.metadata.distributions(path=[str(site)])}
    lacking = [name for name in ROOTS if name not in installed]
    if lacking:
        raise Unavailable(f"{', '.join(lacking)} are not installed in .venv; run `make install`")
    chosen: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "") for name in ROOTS]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen or name not in installed:
            continue
        seen.add((name, extra))
        chosen[name] = installed[name]
        for requirement in installed[name].requires or []:
            words, _, marker = requirement.partition(";")
            asked_by = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker)
            match = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", words)
            if match and (asked_by[1] if asked_by else "") == extra:
                # The CUDA libraries of torch are extras of a package that holds nothing itself.
                waiting += [(plain(match[1]), wanted.strip()) for wanted in ["", *(match[2] or "").split(",")]]
    return chosen


def _link(dist: importlib.metadata.Distribution, site: Path, target: Path) -> None:
    for file in dist.files or []:
        source = site / file
        if ".." in file.parts or not source.is_file():
            continue
        place = target / file
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            continue
        try:
            os.link(source, place)
        except OSError:  # another file system
            shutil.copy2(source, place)


def _compile(folder: Path) -> None:
    """Import once, so that the compiled files of what is imported lie there for pods, which cannot write."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([str(Path(sys.base_prefix) / "bin" / "python3"), "-c", WARM], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"torch does not import from a folder of its own: {done.stderr.strip()[-500:]}")
    for path in folder.rglob("__pycache__"):
        path.chmod(0o755)


def plain(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
