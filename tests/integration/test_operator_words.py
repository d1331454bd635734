"""Words of the real API server that the operator goes by."""

from __future__ import annotations

import pytest

from psjob_operator.cluster.client import OTHER_UID
from tests.cluster_fixtures import Cluster
from tests.integration.api_client import Api

pytestmark = pytest.mark.cluster


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
