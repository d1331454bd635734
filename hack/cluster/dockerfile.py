"""The project's two images as its Dockerfile says: buildah carries it out, on a base made here from Debian, without a registry.

Layers are kept in the cache by their content, so that a second call does again only what changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hack.cluster import pipsettings
from hack.cluster.build import NETWORK_WORDS
from hack.cluster.paths import REPO, ClusterError, Unavailable, cache

TOOLS = ("buildah", "mmdebstrap")
# What python:3.11-slim holds, and its two names of Python; pip, man pages and all that only Debian's own packages would ask for stay out.
INCLUDED = ("python3", "python3-pip", "ca-certificates")
LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
KEPT = ("/usr/share/doc/*/copyright",)
STAND_IN = """FROM scratch
ADD base.tar /
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && ln -s /usr/bin/python3 /usr/local/bin/python3 && ln -s python3 /usr/local/bin/python
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["python3"]
"""
LAYERS_KEPT = 300
BASE_LIMIT, BUILD_LIMIT = 1200.0, 1200.0
LONG_AGO = 1_580_601_600
"""The time of files and images built for tests: a commit's own would let a layer in the cache differ from the same layer built anew."""


def build(names: Mapping[str, str], folder: Path, *, seconds: int = LONG_AGO, anew: bool = False) -> list[Path]:
    """Build the Dockerfile's targets (`operator`, `runtime`) that `names` gives an image's name; an archive each in `folder`.

    Files and images carry the time `seconds` since 1970. `anew` takes no layer from the cache and leaves none; another time needs it.
    Raises Unavailable if this machine has no buildah or cannot make the base, ClusterError with the last words of a build that fails.
    """
    check()
    if seconds != LONG_AGO and not anew:
        raise ClusterError(f"images of the time {seconds} must be built anew: layers in the cache carry {LONG_AGO}")
    with _store(anew) as store:
        _make_base(store)
        with pipsettings.volumes() as volumes:
            words = [f"--timestamp={seconds}", "--layers", *volumes]
            images = {target: _build_target(store, target, words) for target in names}
        folder.mkdir(parents=True, exist_ok=True)
        return [_archive(store, images[target], name, folder / f"{target}.tar") for target, name in names.items()]


def check() -> None:
    """Raise Unavailable, with the reason, where the Dockerfile cannot be built."""
    if os.geteuid() != 0:
        raise Unavailable("the Dockerfile's images need root here (buildah with an overlay store); they are packed from .venv instead")
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        raise Unavailable(f"the Dockerfile's images need the commands {', '.join(lacking)}; install them with: python -m hack.cluster deps")


@dataclass(frozen=True)
class Store:
    """buildah's images and layers of one base. `run` holds what a restart of the machine ends, so it lies where that is forgotten too."""

    folder: Path
    run: Path
    tree: Path
    python: str

    def buildah(self, *words: str, seconds: float = BUILD_LIMIT) -> str:
        """Run buildah; its output. Raises ClusterError with its last words; what the network broke is tried once more."""
        command = ["buildah", f"--root={self.folder / 'layers'}", f"--runroot={self.run}", "--storage-driver=overlay", *words]
        for last in (False, True):
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
            if done.returncode == 0:
                return done.stdout
            if last or not any(word in done.stderr for word in (*NETWORK_WORDS, "Temporary failure", "Connection", "Could not connect")):
                break
        raise ClusterError(
            f"buildah {words[0]} ended with {done.returncode}; its last words:\n{(done.stdout + done.stderr).strip()[-2500:]}"
        )

    def has_base(self) -> bool:
        return bool(self.buildah("images", "--quiet", "--filter", f"reference={self.python}").strip())


@contextmanager
def _store(anew: bool) -> Iterator[Store]:
    """The store of the base that the Dockerfile names, for one caller at a time; or a new one, which goes afterwards."""
    python = _python()
    recipe = repr((python, INCLUDED, LEFT_OUT, KEPT, STAND_IN))
    folder = cache() / f"images-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder, prefix="anew-") as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _drop_old_layers(folder)
        home = Path(scratch) if anew else folder
        run = Path("/run") / f"psjob-images-{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"
        try:
            yield Store(home, run, folder / "base.tar", f"docker.io/library/{python}")
        finally:
            # An overlay store is bind-mounted on itself and stays so.
            subprocess.run(["umount", str(home / "layers" / "overlay")], capture_output=True)
            if anew:
                shutil.rmtree(run, ignore_errors=True)


def _python() -> str:
    """The image that the Dockerfile starts from, such as python:3.11-slim-bookworm, without its digest."""
    found = re.search(r"^ARG PYTHON=(python:[^\s@]+)@sha256:[0-9a-f]{64}$", (REPO / "Dockerfile").read_text(), re.MULTILINE)
    if found is None:
        raise ClusterError("the Dockerfile has no line `ARG PYTHON=python:VERSION-slim-SUITE@sha256:DIGEST`, which says what base to make")
    return found[1]


def _make_base(store: Store) -> None:
    """Debian of the suite in the base's name, with its Python, under that name; nothing where it is there."""
    if store.has_base():
        return
    asked = re.fullmatch(r"docker\.io/library/python:(\d+\.\d+)-slim-(\w+)", store.python)
    if asked is None:
        raise Unavailable(f"{store.python} is not python:VERSION-slim-SUITE, of which a stand-in can be made from Debian")
    if not store.tree.exists():
        _debian(asked[2], store.tree)
    with tempfile.TemporaryDirectory(dir=store.folder) as context:
        os.link(store.tree, Path(context) / "base.tar")
        (Path(context) / "Dockerfile").write_text(STAND_IN)
        store.buildah("bud", "--isolation=chroot", "--network=host", f"--tag={store.python}", context)
    made = _run(store, store.python, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    if made != asked[1]:
        store.buildah("rmi", store.python)
        raise Unavailable(
            f"Debian {asked[2]} has Python {made} and the Dockerfile starts from {store.python}: no stand-in can be made of it"
        )


def _debian(suite: str, tree: Path) -> None:
    scratch = tree.with_name("base.partial.tar")
    left_out = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT] + [f"--dpkgopt=path-include={pattern}" for pattern in KEPT]
    command = [
        "mmdebstrap",
        "--quiet",
        "--mode=root",
        "--variant=minbase",
        f"--include={','.join(INCLUDED)}",
        *left_out,
        suite,
        str(scratch),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BASE_LIMIT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"Debian {suite} did not come from its mirror within {BASE_LIMIT:.0f} s") from error
    if done.returncode != 0:
        raise Unavailable(f"mmdebstrap could not make Debian {suite}: {done.stderr.strip()[-500:]}")
    scratch.rename(tree)


def _build_target(store: Store, target: str, more: list[str]) -> str:
    """The id of the built image."""
    with tempfile.NamedTemporaryFile("r") as told:
        words = [
            "--isolation=chroot",
            "--network=host",
            "--pull-never",
            f"--build-arg=PYTHON={store.python}",
            *more,
            f"--target={target}",
            f"--iidfile={told.name}",
        ]
        store.buildah("bud", *words, str(REPO))
        return told.read().strip().removeprefix("sha256:")


def _archive(store: Store, image: str, name: str, archive: Path) -> Path:
    archive.unlink(missing_ok=True)
    store.buildah("push", "--quiet", image, f"docker-archive:{archive}:{name}")
    return archive


def _run(store: Store, image: str, *command: str) -> str:
    container = store.buildah("from", "--pull-never", image).strip()
    try:
        return store.buildah("run", "--isolation=chroot", container, "--", *command)
    finally:
        store.buildah("rm", container)


def _drop_old_layers(folder: Path) -> None:
    """Layers of earlier code serve nobody for long; all of them are made again in a minute."""
    layers = folder / "layers" / "overlay"
    if layers.is_dir() and len(os.listdir(layers)) > LAYERS_KEPT:
        shutil.rmtree(folder / "layers", ignore_errors=True)
