"""Images that others make are taken by version: the one that the SDK names, and what the Dockerfile installs."""

from __future__ import annotations

import re
from pathlib import Path

from psjob_client.sdk.manifest import IMAGE

ROOT = Path(__file__).resolve().parents[2]


def pinned(name: str) -> str:
    """The version of that package in requirements/runtime.txt."""
    found = re.search(rf"^{name}==([\w.]+)", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE)
    assert found, name
    return found[1]


def test_the_image_of_the_sdk_has_the_torch_that_is_pinned() -> None:
    cuda = ".".join(pinned("cuda-toolkit").split(".")[:2])
    cudnn = pinned(r"nvidia-cudnn-cu\d+").split(".")[0]
    assert f"pytorch/pytorch:{pinned('torch')}-cuda{cuda}-cudnn{cudnn}-runtime" == IMAGE


def test_no_page_and_no_code_takes_whatever_torch_is_the_latest() -> None:
    files = [path for folder in ("docs", "examples", "charts", "client/src") for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_text(errors="ignore") for path in files if path.suffix in (".md", ".py", ".yaml", ".yml", ".ipynb")}
    assert len(texts) > 100 and not [str(path) for path, text in texts.items() if "pytorch/pytorch:latest" in text]


def test_the_dockerfile_installs_no_package_of_debian_without_a_version() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    packages = [word for words in re.findall(r"apt-get install ([^|&;]+)", text) for word in words.split() if not word.startswith("-")]
    assert packages == ['"busybox-static=${BUSYBOX}"']
    (version,) = re.findall(r"^ARG BUSYBOX=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"\d+:\d+\.\d+\.\d+-\w+\+deb12u\d+\*", version), version
    assert re.search(r"^ARG PYTHON=python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.MULTILINE), "Debian 12, as that version is"
