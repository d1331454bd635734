"""What lies in a wheel or in an image's archive: the names of its files, and the contents of those that are asked for."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Image:
    """An image of a docker-archive: its name, the sha256 of its config, its files and links (never folders), contents of some."""

    name: str
    digest: str
    files: frozenset[str]
    read: dict[str, bytes]


def wheel_files(archive: Path) -> dict[str, bytes]:
    """The files of a wheel."""
    with zipfile.ZipFile(archive) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}


def images(archive: Path, wanted: Callable[[str], bool]) -> Iterator[Image]:
    """The images of a docker-archive, with the contents of the files that are `wanted` by name."""
    with tarfile.open(archive) as tar:
        for entry in json.loads(_read(tar, "manifest.json")):
            files: set[str] = set()
            read: dict[str, bytes] = {}
            for layer in entry["Layers"]:
                with tarfile.open(fileobj=io.BytesIO(_read(tar, layer))) as tree:
                    _lay(tree, wanted, files, read)
            digest = PurePosixPath(entry["Config"]).stem
            yield Image(entry["RepoTags"][0] if entry["RepoTags"] else digest, digest, frozenset(files), read)


def _lay(tree: tarfile.TarFile, wanted: Callable[[str], bool], files: set[str], read: dict[str, bytes]) -> None:
    """Lay a layer over the ones below it: what it hides is gone."""
    added: set[str] = set()
    for member in tree:
        name = str(PurePosixPath(member.name)).lstrip("/")
        path = PurePosixPath(name)
        if path.name.startswith(".wh."):
            hidden = str(path.parent if path.name == ".wh..wh..opq" else path.with_name(path.name.removeprefix(".wh.")))
            files -= {file for file in files - added if file == hidden or file.startswith(f"{hidden}/")}
        elif not member.isdir():
            added.add(name)
            files.add(name)
            if member.isreg() and wanted(name):
                handle = tree.extractfile(member)
                assert handle is not None
                read[name] = handle.read()


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    member = tar.getmember(name)
    if member.issym():  # a layer that another image of the archive holds
        name = str(PurePosixPath(name).parent / member.linkname)
    handle = tar.extractfile(name)
    assert handle is not None
    return handle.read()
