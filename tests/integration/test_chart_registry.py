"""The chart in a real OCI registry, and a release of it that Helm 3 makes and Helm 4 takes over, on a real API server without nodes.

Images, training and kustomize are those of tests/e2e/test_release.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hack import release
from hack.cluster.pack import version
from hack.cluster.paths import REPO
from tests.e2e.kube import Kube, restricted_namespace, wait_for
from tests.e2e.kube import tool as path_of
from tests.integration.chart_plane import job, plane
from tests.support import older, registry
from tests.support.cluster_fixtures import built
from tests.support.helms import CRD, helm3, objects

__all__ = ["plane"]
pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1200)]


def test_helm_4_takes_over_from_a_registry_what_helm_3_installed(plane: str, tmp_path: Path) -> None:
    built("release")
    home = Kube(plane, "registry")
    restricted_namespace(home)
    before = older.unpacked(tmp_path / "before", older.release_before())
    packed = tmp_path / f"psjob-{version()}.tgz"
    release.pack_chart(release.CHART, packed, 1_700_000_000)
    with registry.serving(tmp_path / "registry", "127.0.0.1") as address:
        push = [path_of("helm"), "push", str(packed), f"oci://{address}/charts", "--plain-http"]
        assert subprocess.run(push, timeout=60, cwd=REPO).returncode == 0
        assert registry.tags(address, "charts/psjob") == [version()]
        chart = [f"oci://{address}/charts/psjob", f"--version={version()}", "--plain-http"]

        helm3(home, "install", "psjob", str(before.chart))
        older_objects = objects(home)
        helm3(home, "upgrade", "psjob", *chart)
        by_helm3 = objects(home)
        assert by_helm3 != older_objects
        wait_for("the CRD to be served", lambda: "psj" in home.kubectl("api-resources", "--api-group=psjob.dev", check=False), 30)
        home.apply(job("stays"))
        uid = (home.get("psj", "stays") or {})["metadata"]["uid"]

        generation = (home.get("deployment", "psjob") or {})["metadata"]["generation"]
        home.helm("upgrade", "psjob", *chart)
        assert objects(home) == by_helm3
        assert (home.get("deployment", "psjob") or {})["metadata"]["generation"] == generation
        home.helm("uninstall", "psjob", "--wait")
        assert home.get("deployment", "psjob") is None and home.get("crd", CRD) is not None
        home.helm("install", "psjob", *chart)
        assert objects(home) == by_helm3
        assert (home.get("psj", "stays") or {})["metadata"]["uid"] == uid
