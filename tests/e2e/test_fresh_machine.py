"""A machine that has Python, its venv module, make and git alone, and a user without root: `make run` and `make test` work there.

The machine is a root made of Debian's packages. Debian 12 has Python 3.11, the oldest that we support, and Debian 13 has 3.13 and no other.
Python 3.12, which Ubuntu 24.04 has, cannot be had from Debian's packages; its pins and wheels are those of 3.13.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hack.cluster import pipsettings
from hack.cluster.paths import REPO, cache

pytestmark = [pytest.mark.nodes, pytest.mark.soak, pytest.mark.serial, pytest.mark.timeout(10_800)]
INCLUDED = ("python3", "python3-venv", "make", "git", "ca-certificates")
USER = 1000
HOME = "home/dev"
ENTER = f"""
set -e
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot --userspec={USER}:{USER} "$1" env -i HOME=/{HOME} PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 bash -c "cd && $2"
"""


@dataclass(frozen=True)
class Fresh:
    """A root with that Python, and what each command took there."""

    root: Path
    seconds: dict[str, float]

    def run(self, command: str, limit: float) -> subprocess.CompletedProcess[str]:
        """What the user's shell says to a command, in a mount and process namespace that ends with it."""
        began = time.monotonic()
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", ENTER, "enter", str(self.root), command]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit)
        self.seconds[command.rpartition("&& ")[2]] = time.monotonic() - began
        return done


@pytest.fixture(params=[("bookworm", "3.11"), ("trixie", "3.13")], ids=["python3.11", "python3.13"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fresh]:
    """The machine, with a clone of this checkout's last commit in the home of its user."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a root of another system is made and entered by root on Linux")
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not there; run: make deps")
    suite, version = request.param
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "--extract", "--numeric-owner", f"--file={debian(suite)}", f"--directory={root}"], check=True)
    try:
        give_network(root)
        give_user(root)
        machine = Fresh(root, {})
        assert machine.run("python3 --version", 60).stdout.startswith(f"Python {version}.")
        yield machine
    finally:
        shutil.rmtree(root, ignore_errors=True)


def debian(suite: str) -> Path:
    """That suite with INCLUDED as an archive in the cache. Skips where it does not come from its mirror."""
    made = cache() / f"fresh-{suite}.tar"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        scratch = made.with_suffix(".partial.tar")
        words = [
            "mmdebstrap",
            "--quiet",
            "--mode=root",
            "--variant=minbase",
            "--dpkgopt=force-unsafe-io",
            f"--include={','.join(INCLUDED)}",
            suite,
            str(scratch),
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=3000)
        if done.returncode != 0:
            pytest.skip(f"mmdebstrap could not make Debian {suite}: {done.stderr.strip()[-500:]}")
        scratch.rename(made)
    return made


def give_network(root: Path) -> None:
    """This machine's way to package indexes: names, certificates and pip's settings."""
    for file in ("/etc/resolv.conf", "/etc/hosts", pipsettings.CERTIFICATES):
        if Path(file).exists():
            shutil.copyfile(file, root / file.lstrip("/"))
    kept = {name: value for name, value in pipsettings.settings().items() if name != "find-links"}
    kept |= {"cert": pipsettings.CERTIFICATES} if "cert" in kept else {}
    (root / "etc" / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in kept.items()))


def give_user(root: Path) -> None:
    """A user without rights, with a clone of this checkout."""
    with (root / "etc" / "passwd").open("a") as passwd:
        passwd.write(f"dev:x:{USER}:{USER}::/{HOME}:/bin/bash\n")
    with (root / "etc" / "group").open("a") as group:
        group.write(f"dev:x:{USER}:\n")
    (root / HOME).mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(REPO), str(root / HOME / "psjob")], check=True)
    subprocess.run(["chown", "-R", f"{USER}:{USER}", str(root / HOME)], check=True)


def test_run_and_test_work_without_root_and_without_go(fresh: Fresh, capsys: pytest.CaptureFixture[str]) -> None:
    for target, limit in (("install", 3000.0), ("run", 900.0), ("test-unit", 1800.0), ("test", 3600.0)):
        done = fresh.run(f"cd psjob && make {target}", limit)
        assert done.returncode == 0, f"make {target}:\n{done.stdout[-6000:]}"
    size = fresh.run("du -sm psjob/.venv", 300).stdout.split()[0]
    with capsys.disabled():
        print("\n" + "".join(f"{name:16} {seconds:7.1f} s\n" for name, seconds in fresh.seconds.items()) + f".venv {int(size):>15} MB")
