"""What hack/release.py decides and packs without images: whether a checkout is ready, the chart's archive, plain manifests, sums;
and what no file of the repository may hold."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from hack import release
from hack.cluster.pack import version
from hack.cluster.paths import Unavailable
from tests.support import older
from tests.support.sources import ROOT, holding

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-11-26\n"
READY = ("1.2.0", CHANGELOG, "", ["v1.2.0"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (READY, []),
        (("1.2.0", CHANGELOG, "", ["v1.1.0", "v1.2.0"]), []),
        (("1.2.0", CHANGELOG, " M Makefile\n?? new.py\n", ["v1.2.0"]), ["2 files are not committed (Makefile, new.py)"]),
        (("1.2.0", CHANGELOG, "".join(f"?? {name}\n" for name in "abcdefg"), ["v1.2.0"]), ["(a, b, c, d, e and 2 more)"]),
        (("1.2.0", CHANGELOG, "", []), ["no tag v1.2.0"]),
        (("1.2.0", CHANGELOG, "", ["v1.2.0-rc1"]), ["no tag v1.2.0"]),
        (("1.3.0", CHANGELOG, "", ["v1.3.0"]), ["no section `## [1.3.0]`"]),
        (("102.0", CHANGELOG.replace("1.2.0", "1x2.0"), "", ["v102.0"]), ["no section"]),
        (("2.0.0", CHANGELOG, "?? a\n", []), ["1 files", "no tag v2.0.0", "no section"]),
    ],
)
def test_what_is_not_ready_is_said(asked: tuple[str, str, str, list[str]], said: list[str]) -> None:
    problems = release.unready(*asked)
    assert len(problems) == len(said)
    for problem, words in zip(problems, said, strict=True):
        assert words in problem and ";" in problem, "what is missing; the next step"


def test_a_checkout_that_is_not_ready_is_refused_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "version", lambda: "9999.0.0")
    assert release.main(["-o", str(tmp_path / "made")]) == 1
    told = capsys.readouterr().err
    assert "no tag v9999.0.0" in told and "make rehearsal" in told
    assert not list(tmp_path.iterdir())


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    release.check_replaceable(folder)
    folder.mkdir()
    release.check_replaceable(folder)
    (folder / "a.whl").write_bytes(b"1")
    (folder / release.SUMS).write_text(release.sums(folder))
    release.check_replaceable(folder)
    (folder / "SHA256SUMS.bundle").write_bytes(b"a signature")
    with pytest.raises(release.NotReleasable, match=r"made has SHA256SUMS\.bundle, which no build has put there"):
        release.make(folder, rehearse=True)
    with pytest.raises(release.NotReleasable, match="is a file; name a folder"):
        release.check_replaceable(folder / "a.whl")
    assert {path.name for path in folder.iterdir()} == {"a.whl", "SHA256SUMS", "SHA256SUMS.bundle"}


def test_without_root_it_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="need root"):
        release.make(tmp_path / "made", rehearse=True)
    assert not list(tmp_path.iterdir())


def test_equal_charts_are_equal_archives_that_helm_reads(tmp_path: Path) -> None:
    for name in ("one", "two"):
        copy = shutil.copytree(release.CHART, tmp_path / name / "psjob")
        if name == "two":
            for file in copy.rglob("*"):
                os.utime(file, (1, 1))
                file.chmod(0o700)
        release.pack_chart(copy, tmp_path / f"{name}.tgz", 1_700_000_000)
    assert filecmp.cmp(tmp_path / "one.tgz", tmp_path / "two.tgz", shallow=False)
    with tarfile.open(tmp_path / "one.tgz") as archive:
        found = {member.name: archive.extractfile(member) for member in archive}
        assert {member.mtime for member in archive.getmembers()} == {1_700_000_000}
        there = {f"psjob/{file.relative_to(release.CHART)}" for file in release.CHART.rglob("*") if file.is_file()}
        assert found.keys() == there
        handle = found["psjob/templates/deployment.yaml"]
        assert handle is not None and handle.read() == (release.CHART / "templates" / "deployment.yaml").read_bytes()
    assert f"version: {version()}" in release._helm("show", "chart", str(tmp_path / "one.tgz"))


def test_plain_manifests_are_the_charts_without_its_test() -> None:
    found = [document for document in yaml.safe_load_all(release.manifests(release.CHART)) if document]
    assert (found[0]["kind"], found[0]["metadata"]["name"]) == ("Namespace", release.NAMESPACE)
    kinds = [document["kind"] for document in found]
    assert {"CustomResourceDefinition", "Deployment", "ClusterRole", "ServiceAccount"} <= set(kinds) and "Pod" not in kinds
    homes = {document["metadata"].get("namespace") for document in found if document["kind"] in ("Deployment", "ServiceAccount", "Role")}
    assert homes == {release.NAMESPACE}


def test_sums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"2")
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / release.SUMS).write_text(release.sums(tmp_path))
    assert re.findall(r"^[0-9a-f]{64}  (.+)$", (tmp_path / release.SUMS).read_text(), re.MULTILINE) == ["a", "b"]
    assert subprocess.run(["sha256sum", "--check", "--quiet", release.SUMS], cwd=tmp_path).returncode == 0
    (tmp_path / "a").write_bytes(b"3")
    assert subprocess.run(["sha256sum", "--check", "--quiet", release.SUMS], cwd=tmp_path, capture_output=True).returncode == 1


def test_the_release_before_is_the_newest_tag_behind_this_commit(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=any", "-c", "user.email=any@example.com", "-c", "commit.gpgSign=false", "-c", "tag.gpgSign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init")
    found = []
    for tag in (None, "v0.1.0", "nightly", "v0.2.0"):
        git("commit", "--allow-empty", "--message=any")
        if tag:
            git("tag", tag)
        found.append(older.release_before(tmp_path))
    assert found == [older.BEFORE, older.BEFORE, "v0.1.0", "v0.1.0"]


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry_host() -> None:
    names = ["files.python+hosted.org", "pypi+.org", "registry.npm+js.org", "proxy.golang+.org", "deb.debian+.org", "static.crates+.io"]
    hosts = [name.replace("+", "") for name in names]  # split here, so that this file does not name them
    places = [re.escape(host) for host in hosts] + [r"(?<![\w.~])/" + "root/", r"(?<![\w.~-])/" + r"work/(main|shared)"]
    assert not holding("|".join(places), tracked())
