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
class Layer:
    """Files of an image: `trees` (folder or file here, path there), `files` made up, `links` (path to goal), `folders` with modes."""

    trees: tuple[tuple[Path, str], ...] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: tuple[tuple[str, int], ...] = ()
    skip: frozenset[str] = frozenset({"__pycache__"})


@dataclass(frozen=True)
class Image:
    """A name, its layers from the lowest to the highest, and what a container of it starts (Entrypoint, Cmd, Env, User, WorkingDir)."""

    name: str
    layers: tuple[Layer, ...]
    config: dict[str, Any] = field(default_factory=dict)


def write(archive: Path, *images: Image) -> Path:
    """Write all images into one archive, a layer that several share once; its path. Raises ClusterError for a tree that is not there."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    scratch = archive.with_suffix(f".{os.getpid()}.partial")
    layers: list[tuple[Layer, str]] = []
    entries = []
    with tarfile.open(scratch, "w") as tar:
        for image in images:
            digests = [_digest(tar, layer, layers, scratch, image.name) for layer in image.layers]
            text = json.dumps(_config(image, digests), sort_keys=True).encode()
            name = f"{hashlib.sha256(text).hexdigest()}.json"
            _bytes(tar, name, text, 0o644)
            entries.append({"Config": name, "RepoTags": [image.name], "Layers": [f"{digest}.tar" for digest in digests]})
        _bytes(tar, "manifest.json", json.dumps(entries).encode(), 0o644)
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
    layer = Layer(trees=((program("pause"), "pause"),))
    return write(archive, Image(PAUSE, (layer,), {"Entrypoint": ["/pause"], "User": "65535:65535"}))


def _config(image: Image, digests: list[str]) -> dict[str, Any]:
    return {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": image.config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{"created_by": "hack/cluster"} for _ in digests],
    }


def _digest(tar: tarfile.TarFile, layer: Layer, known: list[tuple[Layer, str]], scratch: Path, name: str) -> str:
    """Put a layer into the archive, unless it is there; the sha256 of its tar, which says times of files but no owners."""
    for seen, digest in known:
        if seen is layer:
            return digest
    file = scratch.with_suffix(".layer")
    _write_layer(layer, file, name)
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest not in {digest for _, digest in known}:
        tar.add(file, f"{digest}.tar")
    file.unlink()
    known.append((layer, digest))
    return digest


def _write_layer(layer: Layer, file: Path, name: str) -> None:
    made: set[str] = set()
    with tarfile.open(file, "w") as tar:
        for folder, mode in layer.folders:
            _parents(tar, f"{folder.strip('/')}/x", made, mode)
        for source, target in layer.trees:
            if not source.exists():
                raise ClusterError(f"image {name}: {source} is not there")
            for found, path in _walk(source, target.strip("/"), layer.skip):
                _parents(tar, path, made)
                _add(tar, found, path, made)
        for path, text in layer.files.items():
            _parents(tar, path.strip("/"), made)
            _bytes(tar, path.strip("/"), text, 0o755 if text.startswith(b"#!") else 0o644)
        for path, goal in layer.links.items():
            _parents(tar, path.strip("/"), made)
            entry = tarfile.TarInfo(path.strip("/"))
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
    # Compiled Python files name their source's time; with another one they are of no use.
    entry.size, entry.mode, entry.mtime = info.st_size, 0o755 if info.st_mode & 0o100 else 0o644, int(info.st_mtime)
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
