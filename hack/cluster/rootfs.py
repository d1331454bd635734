"""The lowest layer of our images: this machine's Python, the libraries that it and torch load, and a busybox; made in a second."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from hack.cluster.images import Layer
from hack.cluster.paths import REPO, Unavailable

MINOR = f"python{sys.version_info.major}.{sys.version_info.minor}"
UNUSED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"})
APPLETS = (
    "sh",
    "ls",
    "cat",
    "sleep",
    "env",
    "id",
    "ps",
    "kill",
    "nslookup",
    "wget",
    "nc",
    "df",
    "mount",
    "touch",
    "rm",
    "echo",
    "head",
    "tail",
)


def python_layer() -> Layer:
    """Python at /usr/local/bin (as python, python3, python3.11), its standard library, /bin/sh, an empty /tmp."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    binary = Path(sys.base_prefix) / "bin" / MINOR
    static = frozenset(entry.name for entry in stdlib.glob("config-*"))
    libraries = _libraries([binary, *sorted((stdlib / "lib-dynload").glob("*.so")), *_torch_libraries()])
    home = next(path for path in libraries if path.name == "libc.so.6").parent
    trees: list[tuple[Path, str]] = [(binary.resolve(), f"usr/local/bin/{MINOR}"), (stdlib, f"usr/local/lib/{MINOR}")]
    for library in libraries:
        # What lies elsewhere, such as a libpython of pyenv, goes where the loader looks without a cache file.
        folder = library.parent if library.is_relative_to("/lib") or library.is_relative_to("/lib64") else home
        trees.append((library.resolve(), str(folder / library.name)))
    trees.append((busybox(), "bin/busybox"))
    return Layer(
        trees=tuple(trees),
        files={
            "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\nnonroot:x:65532:65532::/tmp:/bin/sh\n",
            "etc/group": b"root:x:0:\nuser:x:1000:\nnonroot:x:65532:\n",
            "etc/nsswitch.conf": b"hosts: files dns\n",
        },
        links={
            **{f"bin/{applet}": "busybox" for applet in APPLETS},
            **{f"{folder}/{name}": f"/usr/local/bin/{MINOR}" for folder in ("usr/local/bin", "usr/bin") for name in ("python", "python3")},
        },
        folders=(("tmp", 0o1777), ("root", 0o700)),
        skip=UNUSED | static,
    )


def busybox() -> Path:
    """A busybox that needs no library. Raises Unavailable if there is none."""
    found = shutil.which("busybox", path=f"{os.environ.get('PATH', '')}:/bin:/usr/bin")
    if found is None or "statically" not in _describe(Path(found)):
        raise Unavailable("our images need a static busybox; install Debian's busybox-static with: python -m hack.cluster deps")
    return Path(found).resolve()


def site_packages() -> Path:
    """The checkout's virtual environment, where torch and the operator's needs come from."""
    folder = REPO / ".venv" / "lib" / MINOR / "site-packages"
    if not folder.is_dir():
        raise Unavailable(f"{folder.relative_to(REPO)} is not there: run `make install`, and this tool with .venv/bin/python")
    return folder


def _describe(file: Path) -> str:
    answer = subprocess.run(["ldd", str(file)], capture_output=True, text=True)
    return "statically" if "not a dynamic executable" in answer.stdout + answer.stderr else "dynamically"


def _torch_libraries() -> list[Path]:
    folder = site_packages() / "torch" / "lib"
    return [folder / name for name in ("libc10.so", "libtorch_cpu.so", "libtorch_python.so") if (folder / name).exists()]


def _libraries(files: list[Path]) -> list[Path]:
    """The shared libraries those files load from outside the virtual environment, and the loader itself."""
    answer = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True)
    found = {Path(match) for match in re.findall(r"(/\S+) \(0x", answer.stdout)}
    inside = site_packages()
    return sorted(path for path in found if not path.is_relative_to(inside))
