"""This machine's way to packages (index, certificates, folders of wheels) for a build that runs elsewhere; none of it stays in an image."""

from __future__ import annotations

import configparser
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
KEPT = ("index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "timeout", "retries", "proxy")


@contextmanager
def volumes() -> Iterator[list[str]]:
    """buildah's --volume words, which show a build those settings and the files that they name, while the context lasts."""
    found = settings()
    shown = {CERTIFICATES, *found.get("cert", "").split(), *found.get("find-links", "").split()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pip.conf"
        file.touch(mode=0o600)
        file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in found.items()))
        pairs = [(str(file), "/etc/pip.conf"), *((path, path) for path in sorted(shown) if path.startswith("/") and Path(path).exists())]
        yield [f"--volume={source}:{target}:ro" for source, target in pairs]


def settings() -> dict[str, str]:
    """pip's settings on this machine."""
    return merged(os.environ, [Path("/etc/pip.conf"), *_of_the_user()])


def merged(environment: Mapping[str, str], files: list[Path]) -> dict[str, str]:
    """pip's settings of the files, later ones first, and of PIP_… variables before all."""
    found: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        parser.read(file)
        for section in ("global", "install"):
            if parser.has_section(section):
                found |= {name.replace("_", "-"): value.replace("\n", " ").strip() for name, value in parser.items(section)}
    found |= {name.removeprefix("PIP_").lower().replace("_", "-"): value for name, value in environment.items() if name.startswith("PIP_")}
    return {name: found[name] for name in KEPT if found.get(name)}


def _of_the_user() -> list[Path]:
    home = Path.home()
    chosen = os.environ.get("PIP_CONFIG_FILE")
    return [home / ".pip" / "pip.conf", home / ".config" / "pip" / "pip.conf", *([Path(chosen)] if chosen else [])]
