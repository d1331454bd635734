"""A real OCI registry on this machine, and a release's images in it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from hack.cluster.paths import program

START_SECONDS = 30.0


@contextlib.contextmanager
def serving(folder: Path, host: str) -> Iterator[str]:
    """HOST:PORT of a registry without TLS that keeps its blobs in `folder`, while this is entered."""
    with socket.create_server((host, 0)) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
    folder.mkdir(parents=True)
    config = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "blobs")}},
        "http": {"addr": address, "secret": "of only this registry"},
    }
    (folder / "config.yml").write_text(json.dumps(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program("registry"), "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        _wait(process, address, folder / "log")
        yield address
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/v2/", timeout=2) as answer:
            if answer.status == 200:
                return
        assert process.poll() is None and time.monotonic() < deadline, f"the registry does not answer: {log.read_text()}"
        time.sleep(0.1)


def push_image(archive: Path, name: str, address: str, scratch: Path) -> str:
    """Push the image `name` of a docker-archive by buildah; its digest in the registry."""
    told = scratch / "digest"
    store = ["buildah", f"--root={scratch / 'store'}", f"--runroot={scratch / 'run'}", "--storage-driver=vfs"]
    for words in (["pull", "--quiet", f"docker-archive:{archive}"],
                  ["push", "--quiet", "--tls-verify=false", f"--digestfile={told}", name, f"docker://{address}/{name}"]):  # fmt: skip
        done = subprocess.run([*store, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"buildah {words[0]}: {done.stderr[-1500:]}"
    return told.read_text().strip()


def tags(address: str, repository: str) -> list[str]:
    """The tags of a repository."""
    with urllib.request.urlopen(f"http://{address}/v2/{repository}/tags/list", timeout=10) as answer:
        return sorted(json.load(answer)["tags"])
