"""`python -m hack.site [FOLDER]`: build the site of the documentation into FOLDER (by default dist/site).

A dead link or anchor is an error, of pages and of the generator alike. The folder works from the file system: open index.html.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hack.environment import ROOT, programs
from hack.site.links import broken
from hack.site.stage import pages, stage

HERE = Path(__file__).resolve().parent
SECONDS = 300


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0] if arguments else ROOT / "dist" / "site").resolve()
    if folder.exists() and not (folder / "search").is_dir():
        print(f"{folder} exists and is no site that was built before; name another folder", file=sys.stderr)
        return 2
    if wrong := broken(pages(ROOT), existing(ROOT)):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    problem = build(folder)
    print(problem or f"the site is in {folder}: open index.html", file=sys.stderr if problem else sys.stdout)
    return 1 if problem else 0


def existing(root: Path) -> set[str]:
    """Every file and folder that git knows or would add, as paths below `root`."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    files = {Path(line) for line in done.stdout.splitlines() if (root / line).exists()}
    return {path.as_posix() for file in files for path in (file, *file.parents)}


def build(folder: Path) -> str:
    """Put the site into that folder. Returns what the generator complains of, empty where it does not."""
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch) / "pages", Path(scratch) / "site"
        stage(ROOT, source)
        shutil.copytree(HERE / "assets", source / "assets")
        env = {**os.environ, "PSJOB_SITE_PAGES": str(source), "PSJOB_SITE_FOLDER": str(made), "NO_MKDOCS_2_WARNING": "1"}
        command = [str(programs("site") / "mkdocs"), "build", "--strict", "--config-file", str(HERE / "mkdocs.yml")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode != 0:
            said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("INFO")]
            return "\n".join(said)[-8000:]
        if folder.exists():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, folder)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
