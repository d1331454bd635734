"""Makes the lowest layer of an image out of the base that this runs in, with no shell and no package manager, and lists what it took.

`python3 root.py python TARGET FOLDER…` takes Python, its standard library, and the libraries that it and the extensions in FOLDER… load.
`python3 root.py file TARGET SOURCE PATH` takes the file SOURCE, as PATH.

Runs while an image is built, only on the standard library. The list is TARGET/usr/share/sbom/base.cdx.json, in CycloneDX.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

BOM = "usr/share/sbom/base.cdx.json"
LEFT_OUT = shutil.ignore_patterns(
    *("__pycache__", "site-packages", "dist-packages", "config-*", "ensurepip", "lib2to3"),
    *("test", "_test*", "idlelib", "turtledemo", "tkinter", "*tkinter*"),
)
SSL = Path("/usr/lib/ssl")
BY_NAME = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/ssl/openssl.cnf"), SSL / "certs", SSL / "cert.pem", SSL / "openssl.cnf")
"""What OpenSSL looks for by name."""
MERGED = ("lib", "lib32", "lib64", "libx32")
"""Folders that are links where a base has all libraries under /usr."""
PYTHONS = "PSF-2.0"
MADE = {
    "etc/passwd": "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532::/tmp:/sbin/nologin\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
"""Files of no package, which the project itself writes."""


def main(words: list[str]) -> None:
    os.umask(0o022)
    kind, target, rest = words[0], Path(words[1]), words[2:]
    taken = take_python(target, [Path(folder) for folder in rest]) if kind == "python" else take_file(target, Path(rest[0]), rest[1])
    Packages().describe(target, taken)
    for made in (target / BOM).parent.rglob("*"):
        made.chmod(0o755 if made.is_dir() else 0o644)


def take_file(target: Path, source: Path, path: str) -> dict[str, Path]:
    """Copy one file; what was taken, as the path in the image and the path here."""
    place = target / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, place)
    place.chmod(0o755)
    return {path.lstrip("/"): source}


def take_python(target: Path, extensions: list[Path]) -> dict[str, Path]:
    """Copy Python and what it loads to where they lie here; what was taken, as the path in the image and the path here."""
    for name in MERGED:
        if os.path.islink(f"/{name}"):
            target.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(os.readlink(f"/{name}"))
    binary, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    loading = [binary, *(library / "lib-dynload").glob("*.so"), *(file for folder in extensions for file in folder.rglob("*.so*"))]
    taken: dict[str, Path] = {}
    for file in (binary, *libraries([file for file in loading if not re.search("tkinter|^_test", file.name)])):
        keep(target, file, taken)
    for path in BY_NAME:
        if os.path.lexists(path):
            keep(target, path, taken, links=True)
    shutil.copytree(library, target / str(library).lstrip("/"), symlinks=True, ignore=LEFT_OUT)
    for copy in sorted((target / str(library).lstrip("/")).rglob("*")):
        if copy.is_symlink() and not Path("/", copy.relative_to(target)).resolve().is_relative_to(library):
            copy.unlink()  # a link out of the library, such as Debian's sitecustomize
        elif not copy.is_dir() or copy.is_symlink():
            taken[str(copy.relative_to(target))] = Path("/", copy.relative_to(target))
            if not copy.is_symlink():
                copy.chmod(0o644)  # modules are read, and one of them is a shell script
    for name in ("python3", "python"):
        link = target / "usr/local/bin" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(binary)
        taken[str(link.relative_to(target))] = binary
    folders = sorted({f"/{Path(path).parent}" for path in taken if ".so" in Path(path).name and "lib-dynload" not in path})
    subprocess.run(["ldconfig", "-r", str(target), *folders], check=True)
    shutil.rmtree(target / "var", ignore_errors=True)  # ldconfig's notes, which name times
    for path, text in MADE.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text)
    (target / "tmp").mkdir()
    (target / "tmp").chmod(0o1777)
    return taken


def libraries(files: list[Path]) -> list[Path]:
    """The shared libraries which those files load, and the loader. Raises SystemExit if one is not there."""
    told = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True).stdout
    missing = set(re.findall(r"^\s*(\S+) => not found", told, re.MULTILINE))
    if missing:
        raise SystemExit(f"not in this base: {', '.join(sorted(missing))}")
    found = {Path(match) for match in re.findall(r"(/\S+) \(0x", told)}
    home = next(path for path in found if path.name == "libc.so.6").resolve().parent
    inside = {file.resolve() for file in files}
    return sorted({path for path in found if path.resolve() not in inside} | {home / "libgcc_s.so.1"})


def keep(target: Path, file: Path, taken: dict[str, Path], links: bool = False) -> None:
    """Copy a file to where it lies here, the folder's links resolved; `links` keeps it a link where it is one."""
    real = file.parent.resolve() / file.name
    place = target / str(real).lstrip("/")
    if not os.path.lexists(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(real, place, follow_symlinks=not links)
    taken[str(real).lstrip("/")] = real


class Packages:
    """What Debian says of the files here: their package, its version, its source and its licences."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        for listed in sorted(Path("/var/lib/dpkg/info").glob("*.list")):
            for line in listed.read_text().splitlines():
                self.of[real(line)] = listed.stem.partition(":")[0]

    def describe(self, target: Path, taken: dict[str, Path]) -> None:
        """Write the list of packages, and each one's copyright file."""
        files: dict[str, set[str]] = {}
        for path, here in taken.items():
            files.setdefault(self.package(here), set()).add(path)
        for package in sorted(files):
            text = Path(f"/usr/share/doc/{package}/copyright")
            if text.exists():
                place = target / str(text).lstrip("/")
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(text, place)
                files[package].add(str(text).lstrip("/"))
        components = [self.component(package, sorted(files[package])) for package in sorted(files)]
        bom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}
        (target / BOM).parent.mkdir(parents=True, exist_ok=True)
        (target / BOM).write_text(json.dumps(bom, indent=1) + "\n")

    def package(self, here: Path) -> str:
        """The package that brought a file; `python` for what the base's maker built from source."""
        for candidate in (here, here.resolve()):
            found = self.of.get(real(str(candidate)))
            if found:
                return found
        if str(here).startswith("/etc/ssl/certs/"):
            return "ca-certificates"  # put together when that package was installed
        if str(here.resolve()).startswith("/usr/local/"):
            return "python"
        raise SystemExit(f"no package has brought {here}")

    def component(self, package: str, files: list[str]) -> dict[str, object]:
        if package == "python":
            version, licences = platform.python_version(), [PYTHONS]
            purl = f"pkg:generic/python@{version}"
        else:
            asked = subprocess.run(
                ["dpkg-query", "-W", "-f=${Version}\t${Architecture}\n", package], capture_output=True, text=True, check=True
            )
            version, architecture = asked.stdout.splitlines()[0].split("\t")
            purl = f"pkg:deb/debian/{package}@{version.replace(':', '%3A').replace('+', '%2B')}?arch={architecture}"
            licences = [PYTHONS] if re.match("(lib)?python3", package) else licenses(Path(f"/usr/share/doc/{package}/copyright"))
        told = {"type": "library", "bom-ref": purl, "name": package, "version": version, "purl": purl}
        told["licenses"] = [{"license": {"name": name}} for name in licences]
        return {**told, "evidence": {"occurrences": [{"location": file} for file in files]}}


def licenses(file: Path) -> list[str]:
    """The names of licences in a Debian copyright file; none where it is not there, or names none in one of the two usual ways."""
    if not file.exists():
        return []
    text = file.read_text(errors="replace")
    lines = re.findall(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE)
    named = {" ".join(line.split()) for line in lines if len(line.split()) <= 6}  # more words are the licence, not its name
    return sorted(named or set(re.findall(r"/usr/share/common-licenses/([A-Za-z0-9.+-]*[A-Za-z0-9])", text)))


def real(path: str) -> str:
    """That path with the links of its folder resolved: packages say /lib where a base has /usr/lib."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


if __name__ == "__main__":
    main(sys.argv[1:])
