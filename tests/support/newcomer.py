"""A machine on which nothing of psjob is installed, and the packages that psjob needs are."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

from hack import packages
from hack.newcomer import environment

OURS = "psjob"


def third_party(folder: Path) -> Path:
    """A folder for PYTHONPATH with all that this environment has installed, but for psjob: links, so that pip finds torch there already."""
    folder.mkdir()
    for place in Path(sysconfig.get_path("purelib")).iterdir():
        if not place.name.lstrip("_").startswith(OURS) and place.suffix != ".pth" and place.name != "__pycache__":
            (folder / place.name).symlink_to(place)
    for name, version in packages.pinned().items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        # Torch's metadata asks for packages that `make install` leaves out where no GPU is.
        if packages.CUDA.match(name) and not info.exists():
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (info / "RECORD").touch()
    return folder


class Machine:
    """An empty environment and an empty folder; `env` is what commands are started with."""

    def __init__(self, folder: Path, index: str) -> None:
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        self.work = folder / "work"
        self.work.mkdir()
        self.env = environment(folder, index, {"PATH": str(self.bin), "PYTHONPATH": str(third_party(folder / "third-party"))})

    def type(self, *words: str, fails: bool = False) -> str:
        """What a command of the environment prints; the test fails where it does, or does not where it `fails`."""
        done = subprocess.run([self.bin / words[0], *words[1:]], cwd=self.work, env=self.env, capture_output=True, text=True, timeout=300)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr
