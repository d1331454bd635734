"""Builds wheel and source archive of the three distributions into dist/, and checks that they hold what the checkout holds.

`python -m hack.wheels [FOLDER]` prints what was built. Where a file is missing or too much it removes that archive and exits 1.
The same commit and the same hatchling give the same bytes in any checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from hack.epoch import epoch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"runtime": "psjob", "operator": "psjob_operator", "client": "psjob_client"}
"""Folder of a distribution, and the one package in it."""


def main(arguments: list[str]) -> int:
    target = Path(arguments[0] if arguments else ROOT / "dist").resolve()
    wrong = []
    for folder, package in PACKAGES.items():
        for archive in build(ROOT / folder, package, target):
            problems = compare(held(archive), wanted(ROOT / folder, package, archive))
            wrong += [f"{archive.name}: {problem}" for problem in problems]
            if problems:
                archive.unlink()
            else:
                print(archive)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


def build(folder: Path, package: str, target: Path) -> list[Path]:
    """The source archive and the wheel of that distribution, in place of older ones in `target`."""
    for old in [*target.glob(f"{package}-*.whl"), *target.glob(f"{package}-*.tar.gz")]:
        old.unlink()
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch(folder))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder.name} was not built: {done.stderr.strip()[-2000:]}")
    return [*target.glob(f"{package}-*.tar.gz"), *target.glob(f"{package}-*.whl")]


def wanted(folder: Path, package: str, archive: Path) -> set[str]:
    """The files of the checkout that an archive is to hold, by the names that they have in it."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=folder, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    there = {name for name in names if name and (folder / name).is_file()}
    if archive.suffix == ".whl":
        there = {name.removeprefix("src/") for name in there if name.startswith(f"src/{package}/")}
    return there | {"LICENSE"}


def held(archive: Path) -> set[str]:
    """The names of the files in an archive, without those that the build makes. The licence of a wheel is called as in the checkout."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = {name for name in wheel.namelist() if not name.endswith("/")}
        made = archive.name.partition("-py3")[0] + ".dist-info/"
        return {name for name in names if not name.startswith(made)} | {
            name.removeprefix(f"{made}licenses/") for name in names if name.startswith(f"{made}licenses/")
        }
    with tarfile.open(archive) as source:
        files = {member.name.partition("/")[2] for member in source if member.isfile()}
    return files - {"PKG-INFO", ".gitignore"}


def compare(found: set[str], wished: set[str]) -> list[str]:
    """A sentence for each file that is missing or too much."""
    return [f"{name} is missing" for name in sorted(wished - found)] + [f"{name} is too much" for name in sorted(found - wished)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
