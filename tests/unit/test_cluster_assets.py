"""KUBEBUILDER_ASSETS: what is taken from envtest's folder, what is built beside it, and what is said where it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hack.cluster import build, paths
from hack.cluster.paths import ASSETS, ClusterError, Unavailable


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with envtest's programs, on a machine where nothing is built."""
    folder = tmp_path / "assets"
    folder.mkdir()
    for name in ASSETS:
        (folder / name).touch()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PSJOB_KUBERNETES", raising=False)
    return folder


def test_only_what_envtest_lacks_is_built(assets: Path) -> None:
    wanted = {name for part in paths.parts("integration") for name in part.programs}
    assert wanted == {"kube-controller-manager", "kube-scheduler", "kwok"}
    assert [paths.program(name) for name in ASSETS] == [assets / name for name in ASSETS]
    with pytest.raises(ClusterError, match="kube-scheduler is not built yet"):
        paths.program("kube-scheduler")


def test_a_control_plane_that_is_built_is_not_built_again(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS")
    whole = paths.parts("integration")
    for part in whole:
        part.folder.mkdir(parents=True)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    assert paths.parts("integration") == whole and not build.missing("integration")
    assert paths.program("etcd") == assets / "etcd"


def test_a_named_version_is_built(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSJOB_KUBERNETES", paths.pinned()[0])
    assert set(ASSETS) < {name for part in paths.parts("integration") for name in part.programs}


def test_a_folder_that_lacks_a_program_is_refused(assets: Path) -> None:
    (assets / "etcd").unlink()
    with pytest.raises(ClusterError, match=r"KUBEBUILDER_ASSETS=\S+ lacks etcd; name a folder with kube-apiserver, etcd, kubectl"):
        paths.parts()


def test_without_go_the_programs_that_are_lacking_are_named(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *words, **more: None)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path != Path("/usr/local/go/bin/go") and exists(path))
    with pytest.raises(Unavailable, match=r"beside them \(kube-controller-manager, kube-scheduler, kwok\) is built .* no go command"):
        build.build("integration")
