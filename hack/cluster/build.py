"""Builds the pinned Go programs into the cache, once, whoever asks and however many ask at the same time."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hack.cluster import deps
from hack.cluster.paths import ASSETS, MODULES, NEWEST, REPO, ClusterError, Part, Unavailable, assets, cache, kubernetes, parts

GO_CACHE_LIMIT = 500 * 2**20
NETWORK_WORDS = ("dial tcp", "timeout", "unexpected EOF", "connection reset", "TLS handshake", "502 ", "503 ", "504 ")


def build(only: str | None = None, *, quiet: bool = False) -> None:
    """Build every part that is not there yet and return when all are. A part that another process builds is waited for, and that is said.

    Raises Unavailable, before anything is built, where Go or C's compiler is missing; ClusterError with the compiler's last words.
    """
    missing = [part for part in parts(only) if not part.folder.exists()]
    if not missing:
        return
    go = find_go(missing)
    check_compiler(missing, deps.missing())
    (cache() / "bin").mkdir(parents=True, exist_ok=True)
    for part in missing:
        with _lock(part):
            if not part.folder.exists():
                _build_part(part, go, quiet)
    if kubernetes() != NEWEST or all(part.folder.exists() for part in parts()):
        _drop_go_cache()


def build_in_background(only: str | None = None) -> int | None:
    """Start the same build detached, with low priority; the process id, or None when nothing is missing."""
    if all(part.folder.exists() for part in parts(only)):
        return None
    find_go()
    cache().mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "hack.cluster", "build", "--wait"] + (["--only", only] if only else [])
    with (cache() / "build.log").open("ab") as log:
        return subprocess.Popen(command, cwd=REPO, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True).pid


def find_go(wanted: list[Part] | None = None) -> str:
    """The go command; raises Unavailable if there is none, with the programs that are `wanted` beside those of KUBEBUILDER_ASSETS."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists():
            return candidate
    what = "the test cluster"
    if wanted and assets() is not None:
        what = f"KUBEBUILDER_ASSETS brings {', '.join(ASSETS)}; what the test cluster needs beside them"
        what += f" ({', '.join(name for part in wanted for name in part.programs)})"
    raise Unavailable(
        f"{what} is built from pinned Go modules and no go command was found on PATH or in /usr/local/go; "
        "install Go 1.26 or newer (https://go.dev/dl) and run this again"
    )


def check_compiler(wanted: list[Part], lacking: list[str]) -> None:
    """Raise Unavailable if a wanted part is compiled from C and packages for that are `lacking`."""
    packages = [package for package in lacking if package in deps.COMPILER]
    names = [part.name for part in wanted if part.cgo]
    if names and packages:
        raise Unavailable(
            f"{', '.join(names)} is compiled from Go and C, and these Debian packages (or their like) are not installed: "
            f"{' '.join(packages)}; install them with: python -m hack.cluster deps (root); "
            "what needs no C is built by: python -m hack.cluster build --only integration"
        )


def missing(only: str | None = None) -> list[str]:
    """The names of the parts that are still to be built."""
    return [part.name for part in parts(only) if not part.folder.exists()]


def _build_part(part: Part, go: str, quiet: bool) -> None:
    started = time.monotonic()
    scratch = part.folder.with_name(part.folder.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, package in part.programs.items():
        if not quiet:
            print(f"building {name} …", flush=True)
        command = [go, "build", "-trimpath", "-ldflags", part.ldflags, "-o", str(scratch / name)]
        command += (["-tags", part.tags] if part.tags else []) + [package]
        _go(name, package, command, part)
    if part.name == "kwok":
        (scratch / "stages.yaml").write_text(_stages(go, part))
    scratch.rename(part.folder)
    if not quiet:
        print(f"{part.name}: {time.monotonic() - started:.0f} s", flush=True)


def _go(name: str, package: str, command: list[str], part: Part) -> None:
    """Run the compiler; again, twice, when it was the way to a module that failed."""
    for pause in (2, 10, None):
        done = subprocess.run(_nice(command), cwd=MODULES / part.module, env=_environment(part), capture_output=True, text=True)
        if done.returncode == 0:
            return
        if pause is None or not any(word in done.stderr for word in NETWORK_WORDS):
            raise ClusterError(f"go could not build {name} ({package}); its last words:\n{done.stderr[-2000:]}")
        time.sleep(pause)


def _stages(go: str, part: Part) -> str:
    """kwok embeds no stages and ends with "no stages found" without them; they lie in its module."""
    listed = subprocess.run(
        [go, "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kwok"],
        cwd=MODULES / part.module,
        env=_environment(part),
        capture_output=True,
        text=True,
        check=True,
    )
    stages = Path(listed.stdout.strip()) / "kustomize" / "stage"
    files = [*sorted((stages / "node" / "fast").glob("*.yaml")), *sorted((stages / "pod" / "fast").glob("*.yaml"))]
    files += sorted((stages / "node" / "heartbeat-with-lease").glob("*.yaml"))
    return "\n---\n".join(file.read_text() for file in files if file.name != "kustomization.yaml")


def _environment(part: Part) -> dict[str, str]:
    return {
        **os.environ,
        "GOCACHE": str(cache() / "go-build"),
        "GOFLAGS": "-buildvcs=false -mod=readonly",
        "GOWORK": "off",
        "CGO_ENABLED": "1" if part.cgo else "0",
    }


def _nice(command: list[str]) -> list[str]:
    nice = shutil.which("nice")
    return [nice, "-n", "10", *command] if nice else command


@contextmanager
def _lock(part: Part) -> Iterator[None]:
    """One builder of a part at a time; the others wait and then find it built."""
    with (cache() / "bin" / f"{part.folder.name}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process builds {part.name}; waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _drop_go_cache() -> None:
    """The compiler's cache is 6 GB after a whole build and serves nobody once the programs are there."""
    folder = cache() / "go-build"
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0
    if size > GO_CACHE_LIMIT:
        shutil.rmtree(folder, ignore_errors=True)
