"""System packages that the clusters need: named where they are missing, and installed on Debian by root who asks for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from hack.cluster.paths import Unavailable

# What must be there -> the Debian package that brings it.
COMMANDS = {
    "openssl": "openssl",
    "ip": "iproute2",
    "nft": "nftables",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "mkfs.ext4": "e2fsprogs",
    "gcc": "gcc",
    "pkg-config": "pkg-config",
    "busybox": "busybox-static",
    "strace": "strace",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
}
BROWSER = {"chromium-headless-shell": "chromium-headless-shell"}
FONTS = {"/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf": "fonts-dejavu-core"}
"""For the tests of the page, beside what clusters need."""
FILES = {"/usr/include/seccomp.h": "libseccomp-dev", "/usr/include/stdlib.h": "libc6-dev"}


COMPILER = ("gcc", "libc6-dev", "libseccomp-dev", "pkg-config")
"""Packages that building runc needs, whose sources are partly C."""


def install(check_only: bool = False) -> int:
    """Install what is missing; the exit status. Only `python -m hack.cluster deps` calls this.

    Raises Unavailable, with the packages' names, where that is not for us to do.
    """
    packages = missing(browser=True)
    if not packages:
        print("everything that clusters and tests need is installed")
        return 0
    if check_only or os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"real nodes and tests need these Debian packages (or their like), which are not installed: {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-q"], ["install", "-qy", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise Unavailable(f"apt-get {command[0]} failed; install by hand: {' '.join(packages)}\n{done.stderr.strip()[-500:]}")
    print(f"installed {' '.join(packages)}")
    return 0


def missing(browser: bool = False) -> list[str]:
    """The packages whose commands or files are not there: those for clusters, and with `browser` those for the tests of the page too."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/bin"
    commands, files = (COMMANDS | BROWSER, FILES | FONTS) if browser else (COMMANDS, FILES)
    lacking = [package for command, package in commands.items() if shutil.which(command, path=path) is None]
    lacking += [package for file, package in files.items() if not Path(file).exists()]
    return sorted(lacking)
