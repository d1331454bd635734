"""Image archives written directly: one layer, a config, a manifest, as `docker save` writes and `ctr images import` reads them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hack.cluster.paths import ClusterError, program

PAUSE = "psjob.local/pause:1"


@dataclass(frozen=True)
class Image:
    """What goes into an image: `trees` are (folder or file on this machine, path in the image), `files` small ones made here."""

    name: str
    trees: tuple[tuple[Path, str], ...] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: tuple[tuple[str, int], ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    skip: frozenset[str] = frozenset({"__pycache__"})


def write(image: Image, archive: Path) -> Path:
    """Write the archive (its layer is deterministic: no times, no owners) and return its path. Raises ClusterError for a missing tree."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    layer = archive.with_suffix(".layer")
    _write_layer(image, layer)
    digest = hashlib.sha256()
    with layer.open("rb") as handle:
        for chunk in iter(lambda: handle.read(1 << 20), b""):
            digest.update(chunk)
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": image.config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest.hexdigest()}"]},
        "history": [{"created_by": "hack/cluster"}],
    }
    text = json.dumps(config, sort_keys=True).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [image.name], "Layers": ["layer.tar"]}]
    scratch = archive.with_suffix(".partial")
    with tarfile.open(scratch, "w") as tar:
        _bytes(tar, "manifest.json", json.dumps(manifest).encode(), 0o644)
        _bytes(tar, config_name, text, 0o644)
        tar.add(layer, "layer.tar")
    layer.unlink()
    scratch.rename(archive)
    return archive


def names(archive: Path) -> list[str]:
    """The image names in an archive."""
    with tarfile.open(archive) as tar:
        handle = tar.extractfile("manifest.json")
        assert handle is not None
        return [name for entry in json.load(handle) for name in entry["RepoTags"]]


def pause(archive: Path) -> Path:
    """The image of the process that holds a pod's namespaces."""
    image = Image(PAUSE, trees=((program("pause"), "pause"),), config={"Entrypoint": ["/pause"], "User": "65535:65535"})
    return write(image, archive)


def _write_layer(image: Image, layer: Path) -> None:
    made: set[str] = set()
    with tarfile.open(layer, "w") as tar:
        for folder, mode in image.folders:
            _parents(tar, f"{folder.strip('/')}/x", made, mode)
        for source, target in image.trees:
            if not source.exists():
                raise ClusterError(f"image {image.name}: {source} is not there")
            for file, name in _walk(source, target.strip("/"), image.skip):
                _parents(tar, name, made)
                _add(tar, file, name, made)
        for name, text in image.files.items():
            _parents(tar, name.strip("/"), made)
            _bytes(tar, name.strip("/"), text, 0o755 if text.startswith(b"#!") else 0o644)
        for name, goal in image.links.items():
            _parents(tar, name.strip("/"), made)
            entry = tarfile.TarInfo(name.strip("/"))
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, goal, 0o777
            tar.addfile(entry)


def _walk(source: Path, target: str, skip: frozenset[str]) -> Iterator[tuple[Path, str]]:
    if not source.is_dir():
        yield source, target
        return
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if entry.name in skip:
            continue
        name = f"{target}/{entry.name}".strip("/")
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), name, skip)
        else:
            yield Path(entry.path), name


def _add(tar: tarfile.TarFile, file: Path, name: str, made: set[str]) -> None:
    """Add a file, or the link it is, readable by every user; what is there already stays."""
    if name in made:
        return
    made.add(name)
    info = file.lstat()
    entry = tarfile.TarInfo(name)
    if stat.S_ISLNK(info.st_mode):
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(file), 0o777
        tar.addfile(entry)
        return
    entry.size, entry.mode = info.st_size, 0o755 if info.st_mode & 0o100 else 0o644
    with file.open("rb") as handle:
        tar.addfile(entry, handle)


def _parents(tar: tarfile.TarFile, name: str, made: set[str], mode: int = 0o755) -> None:
    parts = name.split("/")[:-1]
    for depth in range(1, len(parts) + 1):
        folder = "/".join(parts[:depth])
        if folder not in made:
            made.add(folder)
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode if depth == len(parts) else 0o755
            tar.addfile(entry)


def _bytes(tar: tarfile.TarFile, name: str, text: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text), mode
    tar.addfile(entry, io.BytesIO(text))
