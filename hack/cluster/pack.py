"""Images packed from this machine's Python and .venv: workers always, our own two where their Dockerfile cannot be built."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from hack.cluster import dockerfile
from hack.cluster.images import Image, Layer, write
from hack.cluster.paths import REPO, ClusterError, Unavailable
from hack.cluster.rootfs import busybox, python_layer, site_packages
from hack.cluster.torchsite import TARGET, plain

APP = "/app"


@dataclass(frozen=True)
class Made:
    """Image archives, and why our own images in them are packed (None: they are the Dockerfile's)."""

    archives: tuple[Path, ...]
    packed_because: str | None = None


def make(folder: Path, *, runtime: str, operator: str, workers: dict[str, Path]) -> Made:
    """All images that jobs on real nodes need: our own by the Dockerfile where this machine can build it, packed where it cannot."""
    try:
        built = dockerfile.build({"operator": operator, "runtime": runtime}, folder)
    except Unavailable as error:
        return Made((pack(folder / "images.tar", runtime=runtime, operator=operator, workers=workers),), str(error))
    return Made((*built, pack(folder / "workers.tar", workers=workers)))


def version() -> str:
    """The version that the operator expects its images to have."""
    return str(
        tomllib.loads((REPO / "operator" / "pyproject.toml").read_text())["project"].get("version")
        or importlib.metadata.version("psjob-operator")
    )


def runtime_image(name: str, source: Path = REPO) -> Image:
    """Dockerfile target `runtime` of a checkout: what the init container copies into the pod. No torch, no Python."""
    layer = Layer(
        trees=((source / "runtime" / "src" / "psjob", "psjob-runtime/lib/psjob"), (busybox(), "psjob-runtime/bin/busybox")),
        links={"psjob-runtime/bin/sh": "busybox"},
    )
    return Image(name, (layer,), {"User": "65532:65532", "Entrypoint": ["/psjob-runtime/bin/busybox"]})


def operator_image(name: str, base: Layer | None = None, source: Path = REPO) -> Image:
    """Dockerfile target `operator` of a checkout: psjob_operator and its pinned needs, as they are installed here, at /operator."""
    site = site_packages()
    trees = [(source / "operator" / "src" / "psjob_operator", "operator/psjob_operator")]
    trees += [(site / top, f"operator/{top}") for top in _tops(site)]
    environment = ["PYTHONPATH=/operator", "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1", *_path()]
    config = {
        "User": "65532:65532",
        "WorkingDir": "/tmp",  # noqa: S108 - a folder of the image
        "Env": environment,
        "Entrypoint": ["python3", "-m", "psjob_operator"],
        "Cmd": ["run"],
    }
    return Image(name, (base or python_layer(), Layer(trees=tuple(trees), skip=frozenset())), config)


def worker_image(name: str, folder: Path, base: Layer | None = None) -> Image:
    """What a user would build: Python, torch (from the mount at /torch), and the scripts of `folder` in WORKDIR /app."""
    if not folder.is_dir():
        raise ClusterError(f"{folder} is not a folder with scripts for {name}")
    config = {"WorkingDir": APP, "Env": [f"PYTHONPATH={TARGET}", "PYTHONUNBUFFERED=1", *_path()], "Cmd": ["python3"]}
    return Image(name, (base or python_layer(), Layer(trees=((folder, APP),))), config)


def pack(archive: Path, *, runtime: str | None = None, operator: str | None = None, workers: dict[str, Path] | None = None) -> Path:
    """Write the asked-for images into one archive; Python's layer is in it once."""
    base = python_layer()
    images = [worker_image(name, folder, base) for name, folder in (workers or {}).items()]
    if runtime:
        images.append(runtime_image(runtime))
    if operator:
        images.append(operator_image(operator, base))
    if not images:
        raise ClusterError("no image was asked for; name one with --runtime, --operator or --worker NAME=FOLDER")
    return write(archive, *images)


def _tops(site: Path) -> list[str]:
    """The top-level names, in site-packages, of everything that requirements/operator.txt pins."""
    pinned = {
        plain(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", (REPO / "requirements" / "operator.txt").read_text(), re.MULTILINE)
    }
    tops: set[str] = set()
    for dist in importlib.metadata.distributions(path=[str(site)]):
        if plain(dist.metadata["Name"]) in pinned:
            tops |= {file.parts[0] for file in dist.files or [] if file.parts[0] != ".." and (site / file.parts[0]).exists()}
    return sorted(tops - {"__pycache__", "bin"})


def _path() -> list[str]:
    return ["PATH=/usr/local/bin:/usr/bin:/bin"]
