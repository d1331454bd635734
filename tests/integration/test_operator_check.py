"""`psjob-operator check`, which `helm test` runs, against a real API server: an operator that works, and each thing that may be wrong.

- Words of the real API server that the operator goes by.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from psjob_operator.cluster.client import OTHER_UID
from psjob_operator.cluster.main import lease_holder
from tests.integration.api_client import Api
from tests.integration.operator_harness import World, psjob_operator
from tests.integration.own_place import place
from tests.support.cluster_fixtures import Cluster

__all__ = ["place"]

pytestmark = pytest.mark.cluster


def check(folder: Path, kubeconfig: Path, namespace: str, *words: str) -> tuple[int, str]:
    """Exit code and words."""
    asked = ["check", f"--kubeconfig={kubeconfig}", f"--namespace={namespace}", "--lease=turns", f"--lease-namespace={namespace}", *words]
    return psjob_operator(folder, *asked)


def test_an_operator_that_renews_passes_and_one_that_stands_still_does_not(place: World, tmp_path: Path) -> None:
    """It renews the Lease `turns`."""
    operator = place.operator("--lease=turns", f"--lease-namespace={place.namespace}", "--lease-seconds=6")
    code, told = check(tmp_path, place.cluster.kubeconfig, place.namespace, "--seconds=30")
    assert code == 0, told
    kind, jobs, lease = told.splitlines()
    assert kind == "PSTrainingJob is served as psjob.dev/v1alpha1" and jobs == f"0 jobs can be read in {place.namespace}"
    assert lease.startswith(f"Lease {place.namespace}/turns is renewed by ")
    operator.freeze()
    code, told = check(tmp_path, place.cluster.kubeconfig, place.namespace, "--seconds=3")
    assert code == 1
    assert f"Lease {place.namespace}/turns was not renewed within 3 s, so no operator acts; read: kubectl" in told


def test_without_an_operator_the_lease_does_not_exist(control_plane: Cluster, bare_namespace: str, tmp_path: Path) -> None:
    code, told = check(tmp_path, control_plane.kubeconfig, bare_namespace, "--seconds=1")
    assert code == 1 and "does not exist within 1 s" in told and "Traceback" not in told


def test_a_right_that_is_missing_is_told(control_plane: Cluster, bare_namespace: str, tmp_path: Path) -> None:
    code, told = check(tmp_path, control_plane.user_kubeconfig("mallory", folder=tmp_path), bare_namespace, "--seconds=1")
    assert code == 1 and "the API server refuses" in told and "rbac.create" in told


def lease(lease_holder: str | None, renewed: str | None) -> dict[str, dict[str, str | None]]:
    return {"spec": {"holderIdentity": lease_holder, "renewTime": renewed}}


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
    assert lease_holder(before, after) == who


@pytest.mark.parametrize("kind", ["pods", "configmaps"])
def test_a_delete_of_another_uid_says_so(control_plane: Cluster, namespace: str, kind: str) -> None:
    api = Api(control_plane.kubeconfig)
    path = f"/api/v1/namespaces/{namespace}/{kind}"
    spec = {"spec": {"containers": [{"name": "it", "image": "it:1"}]}} if kind == "pods" else {}
    code, made = api.call("POST", path, {"metadata": {"name": "it"}, **spec})
    assert code == 201, made
    code, said = api.call("DELETE", f"{path}/it", {"preconditions": {"uid": "another"}})
    assert code == 409 and all(word in said["message"] for word in OTHER_UID), said
    code, said = api.call("DELETE", f"{path}/it", {"preconditions": {"uid": made["metadata"]["uid"]}})
    assert code == 200, said
