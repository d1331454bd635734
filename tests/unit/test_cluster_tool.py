"""hack/cluster: which Kubernetes it builds, and what a build elsewhere is told of this machine's pip."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from hack.cluster import build, dockerfile, paths
from hack.cluster.paths import REPO, ClusterError, Unavailable
from hack.cluster.pipsettings import merged


def minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.removeprefix("v").split(".")[:2])


def test_the_chart_allows_what_is_tested_and_no_older() -> None:
    allowed = yaml.safe_load((REPO / "charts" / "psjob" / "Chart.yaml").read_text())["kubeVersion"]
    found = re.fullmatch(r">=(\d+\.\d+)\.0-0", allowed)
    assert found is not None and minor(paths.pinned()[0]) == minor(found[1])
    assert paths.pinned()[-1] == paths.NEWEST


@pytest.mark.parametrize("version", paths.pinned())
def test_a_pinned_version_has_modules_of_that_version_alone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSJOB_KUBERNETES", version.removeprefix("v"))
    (plane,) = (part for part in paths.parts("integration") if part.name == "control-plane")
    assert f"gitVersion={version} " in plane.ldflags
    modules = (paths.MODULES / plane.module / "go.mod").read_text()
    assert f"k8s.io/kubernetes {version}" in modules
    assert set(re.findall(r"=> k8s.io/\S+ (\S+)", modules)) == {f"v0.{version.partition('.')[2]}"}


def test_versions_share_what_is_not_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSJOB_KUBERNETES", raising=False)
    newest = {part.name: part.folder for part in paths.parts()}
    monkeypatch.setenv("PSJOB_KUBERNETES", paths.pinned()[0])
    oldest = {part.name: part.folder for part in paths.parts()}
    assert {name for name in newest if newest[name] != oldest[name]} == {"control-plane", "node"}


def test_a_version_that_is_not_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSJOB_KUBERNETES", "1.30.1")
    with pytest.raises(ClusterError, match=r"v1\.30\.1 is not pinned .* known: v1\.33\.13, "):
        paths.parts()


def test_a_machine_without_buildah_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"need the commands buildah, mmdebstrap; install them with: python -m hack.cluster deps"):
        dockerfile.check()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="need root"):
        dockerfile.check()


def test_pip_is_told_what_this_machine_s_is(tmp_path: Path) -> None:
    site, user = tmp_path / "site.conf", tmp_path / "user.conf"
    site.write_text("[global]\nindex-url = https://a.example/simple\ncert = /ca.pem\n[list]\nformat = json\n")
    user.write_text("[global]\nindex_url = https://b.example/simple\n[install]\nfind-links =\n  /one\n  /two\n")
    environment = {"PIP_TIMEOUT": "9", "PIP_NO_BINARY": "x", "HOME": "/h"}
    assert merged(environment, [site, tmp_path / "absent.conf", user]) == {
        "index-url": "https://b.example/simple",
        "find-links": "/one /two",
        "cert": "/ca.pem",
        "timeout": "9",
    }
    assert merged({"PIP_INDEX_URL": "https://c.example"}, [site])["index-url"] == "https://c.example"


def test_what_is_compiled_from_c_is_refused_before_the_build_with_the_next_step() -> None:
    runc, etcd = (next(part for part in paths.parts() if part.name == name) for name in ("runc", "etcd"))
    with pytest.raises(Unavailable, match=r"runc is compiled .* libseccomp-dev pkg-config; install them with: python -m hack.cluster deps"):
        build.check_compiler([etcd, runc], ["libseccomp-dev", "nftables", "pkg-config"])
    build.check_compiler([etcd], ["libseccomp-dev"])
    build.check_compiler([etcd, runc], ["nftables"])


def test_parts_of_a_release_are_built_on_demand_alone() -> None:
    of_release = {part.name for part in paths.parts("release")}
    assert of_release == {"registry", "helm3"} and not of_release & {part.name for part in paths.parts()}
    with pytest.raises(ClusterError, match=r"known: .*helm3.*registry"):
        paths.program("helm4")
