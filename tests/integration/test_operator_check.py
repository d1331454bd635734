"""`psjob-operator check`, which `helm test` runs, against a real API server: an operator that works, and each thing that may be wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psjob_operator.cluster.check import holder
from tests.cluster_fixtures import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.cluster]
OPERATOR = [sys.executable, "-m", "psjob_operator"]


def check(kubeconfig: Path, namespace: str, *words: str) -> subprocess.CompletedProcess[str]:
    asked = ["check", f"--kubeconfig={kubeconfig}", f"--namespace={namespace}", "--lease=turns", f"--lease-namespace={namespace}", *words]
    return subprocess.run([*OPERATOR, *asked], capture_output=True, text=True, timeout=120)


@pytest.fixture
def operator(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An operator of the namespace that renews the Lease `turns`."""
    words = ["run", f"--kubeconfig={control_plane.kubeconfig}", f"--namespace={namespace}", "--health-port=0"]
    words += ["--lease=turns", f"--lease-namespace={namespace}", f"--key-file={tmp_path / 'key'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*OPERATOR, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    yield process
    process.kill()
    process.wait()


def test_an_operator_that_renews_passes_and_one_that_stands_still_does_not(
    control_plane: Cluster, namespace: str, operator: subprocess.Popen[bytes]
) -> None:
    found = check(control_plane.kubeconfig, namespace)
    assert found.returncode == 0, found.stderr
    kind, jobs, lease = found.stdout.splitlines()
    assert kind == "PSTrainingJob is served as psjob.dev/v1alpha1" and jobs == f"0 jobs can be read in {namespace}"
    assert lease.startswith(f"Lease {namespace}/turns is renewed by ")
    os.kill(operator.pid, signal.SIGSTOP)
    found = check(control_plane.kubeconfig, namespace, "--seconds=4")
    assert found.returncode == 1
    assert f"Lease {namespace}/turns was not renewed within 4 s, so no operator acts; read: kubectl" in found.stderr


def test_without_an_operator_the_lease_does_not_exist(control_plane: Cluster, namespace: str) -> None:
    found = check(control_plane.kubeconfig, namespace, "--seconds=1")
    assert found.returncode == 1 and "does not exist within 1 s" in found.stderr and "Traceback" not in found.stderr


def test_a_right_that_is_missing_is_told(control_plane: Cluster, namespace: str, tmp_path: Path) -> None:
    found = check(control_plane.user_kubeconfig("mallory", folder=tmp_path), namespace, "--seconds=1")
    assert found.returncode == 1 and "the API server refuses" in found.stderr and "rbac.create" in found.stderr


def test_a_cluster_without_the_crd_is_told(fresh_control_plane: Callable[..., Cluster]) -> None:
    found = check(fresh_control_plane().kubeconfig, "default", "--seconds=1")
    assert found.returncode == 1 and "the CRD pstrainingjobs.psjob.dev is not served; install it" in found.stderr


def lease(holder: str | None, renewed: str | None) -> dict[str, dict[str, str | None]]:
    return {"spec": {"holderIdentity": holder, "renewTime": renewed}}


@pytest.mark.parametrize(
    ("before", "after", "who"),
    [
        (lease("a", "1"), lease("a", "2"), "a"),
        (lease("a", "1"), lease("b", "2"), "b"),
        (lease("a", "1"), lease("a", "1"), None),
        (lease("a", "1"), lease("", "2"), None),
        (lease(None, None), lease("a", "1"), "a"),
        (lease("a", "1"), {}, None),
    ],
)
def test_a_lease_is_held_by_who_renewed_it(before: dict[str, object], after: dict[str, object], who: str | None) -> None:
    assert holder(before, after) == who
