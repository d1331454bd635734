"""`python -m hack.needs TARGET` says what a target of the Makefile needs and whether it is here, before the target starts.

It exits 1 where the target cannot work without what is missing; else the target does what it can, and names the rest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hack.cluster import deps, dockerfile
from hack.cluster.build import find_go
from hack.cluster.paths import Unavailable, assets, parts

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Need:
    """Something a target needs, and the next step of who lacks it."""

    name: str
    there: Callable[[], bool]
    next_step: str


@dataclass(frozen=True)
class Target:
    """The needs without which it cannot work, and those without which it does less."""

    must: tuple[Need, ...] = ()
    may: tuple[Need, ...] = ()


def _go() -> bool:
    try:
        find_go()
    except Unavailable:
        return False
    return True


def _plane() -> bool:
    """Whether an API server is there or can be built."""
    return _go() or assets() is not None or all(part.folder.exists() for part in parts("integration"))


def _compiler() -> bool:
    return any(map(shutil.which, ("cc", "gcc", "clang")))


def _cuda() -> bool:
    """Whether torch sees a GPU; asked in a process of its own, since it takes seconds and this one needs no torch."""
    asked = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def _helm() -> bool:
    return (ROOT / ".venv" / "bin" / "helm").exists() or shutil.which("helm") is not None


LINUX = Need("Linux", lambda: sys.platform.startswith("linux"), "use a Linux machine or a virtual one")
ADMINISTRATOR = Need("root", lambda: os.geteuid() == 0, "run it as root, in a virtual machine where you want this one left alone")
GO = Need("Go 1.26 or newer", _go, "install it from https://go.dev/dl")
PLANE = Need(
    "Go 1.26 or newer, or KUBEBUILDER_ASSETS",
    _plane,
    "install Go from https://go.dev/dl, or set KUBEBUILDER_ASSETS to the folder of envtest's programs",
)
COMPILER = Need("a C compiler", _compiler, "install gcc or clang")
APT = Need("apt-get", lambda: shutil.which("apt-get") is not None, "install the like of the packages that hack/cluster/deps.py names")
PACKAGES = Need("Debian packages for clusters and pages", lambda: not deps.missing(browser=True), "run: make deps")
BUILDER = Need(" and ".join(dockerfile.TOOLS), lambda: all(map(shutil.which, dockerfile.TOOLS)), "run: make deps")
GIT = Need("git", lambda: shutil.which("git") is not None, "install git, and clone the repository with it")
HELM = Need("helm", _helm, "run: make install; on another system than Linux install Helm 4 yourself")
GPU = Need(
    "an NVIDIA GPU that torch can use",
    lambda: Path("/dev/nvidiactl").exists() and _cuda(),
    "use a machine with a GPU and its driver, and run `PSJOB_GPU=1 make install` there; the same scripts run on the CPU in `make test` and "
    "`make soak`",
)
NODES = (LINUX, ADMINISTRATOR, GO, PACKAGES)
TARGETS = {
    "test-unit": Target(),
    "test": Target(),
    "test-cluster": Target((PLANE,)),
    "test-nodes": Target(NODES, (BUILDER,)),
    "test-gpu": Target((GPU,)),
    "soak": Target(may=(*NODES, BUILDER)),
    "test-all": Target(may=(*NODES, BUILDER, GPU)),
    "deps": Target((LINUX, ADMINISTRATOR, APT)),
    "lint": Target(may=(HELM, GO, COMPILER)),
    "wheels": Target((GIT,)),
    "sbom": Target((GIT,), (LINUX, ADMINISTRATOR, BUILDER)),
    "release": Target((GIT, HELM, LINUX, ADMINISTRATOR, BUILDER)),
}


def told(name: str, target: Target) -> tuple[list[str], bool]:
    """Lines for the person who typed `make NAME`, and whether it can work."""
    if not target.must and not target.may:
        return [f"make {name} needs nothing that `make install` does not bring."], True
    lacking_must = [need for need in target.must if not need.there()]
    lacking_may = [need for need in target.may if not need.there()]
    lines = [f"make {name} needs {', '.join(need.name for need in target.must)}"] if target.must else []
    if target.may:
        lines.append(f"make {name} does all of its work with {', '.join(need.name for need in target.may)}")
    lines = [". ".join(lines) + (": all there." if not lacking_must and not lacking_may else ".")]
    lines += [f"missing: {need.name}. Next step: {need.next_step}." for need in lacking_must]
    lines += [
        f"not here: {need.name}; what needs it is left out or skipped, by name. To have it, {need.next_step}." for need in lacking_may
    ]
    return lines, not lacking_must


def main(words: list[str]) -> int:
    """The exit status."""
    if len(words) != 1 or words[0] not in TARGETS:
        print(f"needs: {' '.join(words) or 'no target'}: name one of {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    lines, works = told(words[0], TARGETS[words[0]])
    print("\n".join(lines), file=sys.stdout if works else sys.stderr, flush=True)
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
