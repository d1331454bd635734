"""`python -m hack.release` makes all that a release publishes, in one folder: dist/release-VERSION.

Wheels and source archives, the chart, the chart as plain manifests, both images, a CycloneDX list of each wheel and image, and SHA256SUMS.
It refuses what is not ready for a release: `--rehearse` builds it and says what is missing. Images need root on Linux.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from hack import wheels
from hack.cluster import dockerfile
from hack.cluster.pack import version
from hack.cluster.paths import ClusterError
from hack.epoch import ROOT, epoch
from hack.sbom.__main__ import Unowned, bills

CHART = ROOT / "charts" / "psjob"
NAMESPACE = "psjob-system"
TARGETS = ("operator", "runtime")
SUMS = "SHA256SUMS"


class NotReleasable(Exception):
    """What is missing, a sentence a line."""


def main(words: list[str]) -> int:
    """Build the folder; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hack.release", description="Everything that a release publishes, in one folder.")
    parser.add_argument("--rehearse", action="store_true", help="build what is not ready for a release too, and say why it is not")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help="a new or empty folder, or an earlier build of a release, which is replaced (default: dist/release-VERSION)",
    )
    asked = parser.parse_args(words)
    folder = (asked.output or ROOT / "dist" / f"release-{version()}").resolve()
    try:
        make(folder, rehearse=asked.rehearse)
    except (NotReleasable, ClusterError, Unowned) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def make(folder: Path, *, rehearse: bool = False) -> None:
    """Fill `folder`, which is whole or is not there: a failed build leaves nothing. Raises NotReleasable, ClusterError or Unowned."""
    problems = unready(
        version(), (ROOT / "CHANGELOG.md").read_text(), _git("status", "--porcelain"), _git("tag", "--points-at", "HEAD").split()
    )
    if problems and not rehearse:
        raise NotReleasable("\n".join([*problems, "to build it all the same, for a look or a test: make rehearsal"]))
    for problem in problems:
        print(f"rehearsal, not a release: {problem}", file=sys.stderr)
    check_replaceable(folder)
    dockerfile.check()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".release-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        _fill(made)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)


def check_replaceable(folder: Path) -> None:
    """Raises NotReleasable if something lies in `folder` that no earlier build of a release has put there, such as a signature."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise NotReleasable(f"{folder} is a file; name a folder")
    listed = (folder / SUMS).read_text().splitlines() if (folder / SUMS).is_file() else []
    built = {SUMS, *(line.partition("  ")[2] for line in listed)}
    if others := sorted({path.name for path in folder.iterdir()} - built):
        more = f" and {len(others) - 1} more files" if len(others) > 1 else ""
        raise NotReleasable(f"{folder} has {others[0]}{more}, which no build has put there; name a new folder with -o, or move them away")


def unready(release: str, changelog: str, status: str, tags: list[str]) -> list[str]:
    """Why a checkout is no release: uncommitted files, no tag on the commit, no section of the changelog. `status` is git's, porcelain."""
    problems = []
    if changed := [line[3:] for line in status.splitlines()]:
        named = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        problems.append(f"{len(changed)} files are not committed ({named}); commit or remove them")
    if f"v{release}" not in tags:
        problems.append(f'this commit has no tag v{release}; make it with: git tag --sign v{release} -m "psjob {release}"')
    if not re.search(rf"^## \[{re.escape(release)}\]", changelog, re.MULTILINE):
        problems.append(f"CHANGELOG.md has no section `## [{release}]`; give the entries of [Unreleased] that heading and a date")
    return problems


def _fill(folder: Path) -> None:
    if wheels.main([str(folder)]):
        raise NotReleasable("the wheels do not hold what the checkout holds; the lines above name the files")
    names = {target: f"psjob-{target}:{version()}" for target in TARGETS}
    images = dockerfile.build(names, folder, seconds=epoch(), anew=True)
    images = [image.rename(folder / f"psjob-{image.stem}-{version()}.tar") for image in images]
    for archive in (*sorted(folder.glob("*.whl")), *images):
        for document in bills(archive):
            archive.with_name(f"{archive.name}.cdx.json").write_text(json.dumps(document, indent=1) + "\n")
    pack_chart(CHART, folder / f"psjob-{version()}.tgz", epoch())
    (folder / "install.yaml").write_text(manifests(CHART))
    (folder / ".gitignore").unlink(missing_ok=True)  # the builder of wheels leaves one
    (folder / SUMS).write_text(sums(folder))


def pack_chart(chart: Path, archive: Path, seconds: int) -> None:
    """The chart as `helm package` packs it, with one time and no owner for all files, so that equal charts are equal archives.

    Raises NotReleasable with helm's words where it refuses the chart.
    """
    with tempfile.TemporaryDirectory() as scratch:
        _helm("package", str(chart), f"--destination={scratch}")
        (packed,) = Path(scratch).glob("*.tgz")
        with tarfile.open(packed) as source:
            files = {member.name: source.extractfile(member) for member in source if member.isfile()}
            plain = io.BytesIO()
            with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as target:
                for name, handle in sorted(files.items()):
                    assert handle is not None
                    text = handle.read()
                    entry = tarfile.TarInfo(name)
                    entry.size, entry.mtime, entry.mode = len(text), seconds, 0o644
                    target.addfile(entry, io.BytesIO(text))
    archive.write_bytes(gzip.compress(plain.getvalue(), mtime=seconds))


def manifests(chart: Path) -> str:
    """What the chart installs into the namespace psjob-system with its own values, for `kubectl apply` and kustomize."""
    namespace = f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n"
    return f"{namespace}{_helm('template', 'psjob', str(chart), f'--namespace={NAMESPACE}', '--no-hooks')}"


def sums(folder: Path) -> str:
    """A line for each file, as `sha256sum --check` reads them."""
    lines = []
    for file in sorted(folder.iterdir()):
        if file.name != SUMS:
            with file.open("rb") as handle:
                lines.append(f"{hashlib.file_digest(handle, 'sha256').hexdigest()}  {file.name}\n")
    return "".join(lines)


def _helm(*words: str) -> str:
    helm = shutil.which("helm", path=f"{ROOT / '.venv' / 'bin'}:{'/usr/local/bin:/usr/bin'}") or shutil.which("helm")
    if helm is None:
        raise NotReleasable("helm is neither in .venv/bin nor on PATH; `make install` brings it on Linux")
    done = subprocess.run([helm, *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NotReleasable(f"helm {words[0]} failed: {done.stderr.strip()[-800:]}")
    return done.stdout


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NotReleasable(f"git {words[0]} failed, and a release is built from a git checkout: {done.stderr.strip()[-300:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
