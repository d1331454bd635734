"""`python -m hack.sbom ARCHIVE…` writes ARCHIVE.cdx.json, a CycloneDX bill of materials, beside each wheel and each image's archive.

Every file of the archive belongs to one component, else that is the error. Without words it builds wheels and images into dist/ first.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hack import wheels
from hack.cluster import dockerfile
from hack.cluster.pack import version
from hack.cluster.paths import Unavailable
from hack.epoch import epoch
from hack.image.root import BOM, MADE, MERGED
from hack.sbom.archives import Image, images, wheel_files
from hack.sbom.parts import Part, distribution, plain, python_parts, requirements, source

OURS = {"operator/psjob_operator/": ("psjob-operator", "__init__.py"), "psjob-runtime/lib/psjob/": ("psjob", "__init__.py")}
"""If the project's own packages lie in images, and the file that says the version."""
OF_THE_IMAGE = {*MADE, *MERGED, BOM, "etc/ld.so.cache", "psjob-runtime/bin/sh"}
"""Files and links that the Dockerfile makes."""


class Unowned(Exception):
    """Files that no component brought, or more than one."""


def main(words: list[str]) -> int:
    left_out = None
    if not words:
        words, left_out = build(Path("dist"))
    for archive in map(Path, words):
        for document in bills(archive):
            told = archive.with_name(f"{archive.name}.cdx.json")
            told.write_text(json.dumps(document, indent=1) + "\n")
            print(f"{told}: {len(document['components'])} components")
    if left_out:
        print(f"images have no bill of materials: {left_out}", file=sys.stderr)
    return 1 if left_out else 0


def build(folder: Path) -> tuple[list[str], str | None]:
    """Wheels and images of the last commit's time, and why there are no images."""
    if wheels.main([str(folder)]):
        raise SystemExit("the wheels do not hold what the checkout holds")
    names = {target: f"psjob-{target}:{version()}" for target in ("operator", "runtime")}
    try:
        archives = dockerfile.build(names, folder.resolve(), seconds=epoch(), anew=True)
    except Unavailable as error:
        return [*map(str, sorted(folder.glob("*.whl")))], str(error)
    return [*map(str, sorted(folder.glob("*.whl"))), *map(str, archives)], None


def bills(archive: Path) -> list[dict[str, Any]]:
    """A bill of materials for each thing in that archive. Raises Unowned with the files that belong to no component."""
    if archive.suffix == ".whl":
        return [of_wheel(archive)]
    return [of_image(image) for image in images(archive, wanted)]


def of_wheel(archive: Path) -> dict[str, Any]:
    files = wheel_files(archive)
    parts = python_parts(files, files)
    own = plain(archive.name.split("-")[0])
    (whole,) = [part for part in parts if part.of["name"] == own]
    for part in parts:
        if part is not whole:  # what is vendored is listed by the wheel as its own too
            whole.files -= part.files
    strays = {file for file in whole.files if "/_vendor/" in file and not file.endswith("_vendor/__init__.py")}
    if strays:
        raise Unowned(f"{archive.name}: vendored without a .dist-info that lists it: {few(strays)}")
    check(files, parts, archive.name)
    metadata = next(text for name, text in files.items() if name.endswith(".dist-info/METADATA") and "/_vendor/" not in name)
    asked = requirements(metadata)
    hashes = [{"alg": "SHA-256", "content": hashlib.sha256(archive.read_bytes()).hexdigest()}]
    return document(
        {**distribution(metadata), "hashes": hashes}, [*(part.document() for part in parts if part is not whole), *asked], whole
    )


def wanted(name: str) -> bool:
    """The files of an image that say what is in it."""
    return name == BOM or name.endswith((".dist-info/METADATA", ".dist-info/RECORD")) or name in {f + v for f, (_, v) in OURS.items()}


def of_image(image: Image) -> dict[str, Any]:
    if BOM not in image.files:
        raise Unowned(f"{image.name} has no /{BOM}, which the Dockerfile's images have: what its base brought is not known")
    parts = python_parts(image.files, image.read)
    for told in json.loads(image.read[BOM])["components"]:
        listed = {place["location"] for place in told.pop("evidence")["occurrences"]}
        parts.append(Part(told, {name for name in image.files if name in listed or source(name) in listed}))
    for folder, (name, file) in OURS.items():
        if own := {path for path in image.files if path.startswith(folder)}:
            own -= {path for part in parts for path in part.files}  # what is vendored in it
            parts.append(Part(_ours(name, image.read[folder + file].decode()), own))
    whole = Part({}, set(image.files & OF_THE_IMAGE))
    check(image.files, [*parts, whole], image.name)
    name, _, version = image.name.rpartition(":")
    hashes = [{"alg": "SHA-256", "content": image.digest}]
    of = {"type": "container", "bom-ref": image.name, "name": name, "version": version, "hashes": hashes}
    return document(of, [part.document() for part in sorted(parts, key=lambda part: part.of["bom-ref"])], whole)


def check(files: Iterable[str], parts: list[Part], archive: str) -> None:
    """Raise Unowned unless each file belongs to one part."""
    owners = Counter(file for part in parts for file in part.files)
    for count, words in ((0, "belong to no component"), (2, "belong to several components")):
        wrong = {file for file in files if min(owners[file], 2) == count}
        if wrong:
            raise Unowned(f"{archive}: {len(wrong)} files {words}: {few(wrong)}")


def document(of: dict[str, Any], components: list[dict[str, Any]], whole: Part) -> dict[str, Any]:
    """The whole bill; the same for the same archive and commit."""
    text = json.dumps([of, components], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, text)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch(), UTC).isoformat(),
            "component": Part(of, whole.files).document(),
        },
        "components": components,
        "dependencies": [{"ref": of["bom-ref"], "dependsOn": sorted({part["bom-ref"] for part in components})}],
    }


def few(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _ours(name: str, text: str) -> dict[str, Any]:
    found = re.search(r'^__version__.*= "(.+)"$', text, re.MULTILINE)
    assert found is not None
    purl = f"pkg:pypi/{name}@{found[1]}"
    licence = [{"license": {"id": "Apache-2.0"}}]
    return {"type": "library", "bom-ref": purl, "name": name, "version": found[1], "licenses": licence, "purl": purl}


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Unowned as error:
        sys.exit(f"sbom: {error}")
