"""What psjob knows of pods is what an API server serves, and says no where that server's strict decoding does."""

from __future__ import annotations

from typing import Any

import pytest

from hack import podschema as made
from psjob_operator.api.template import definition
from psjob_operator.api.validate import pod_mistakes
from tests.integration.api_client import Api
from tests.support.cluster_fixtures import Cluster

pytestmark = pytest.mark.cluster
PODS = "/api/v1/namespaces/default/pods?dryRun=All&fieldValidation=Strict"
GOOD: dict[str, Any] = {"containers": [{"name": "a", "image": "b"}]}
SPECS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"tolerations": [{"operator": "Exists"}]}, True),
    ({"tolerationz": []}, False),
    ({"Tolerations": []}, False),
    ({"tolerations": {}}, False),
    ({"tolerations": [{"tolerationSeconds": "5"}]}, False),
    ({"nodeSelector": {"a": 1}}, False),
    ({"nodeSelector": {"a": "1"}}, True),
    ({"securityContext": "x"}, False),
    ({"securityContext": {"runAsUser": "0"}}, False),
    ({"securityContext": {"runAsUsr": 0}}, False),
    ({"securityContext": {"seccompProfile": "x"}}, False),
    ({"securityContext": {"sysctls": [{"name": "a", "value": "1"}], "fsGroup": 3}}, True),
    ({"priorityClassName": None}, True),
    ({"terminationGracePeriodSeconds": 1.5}, False),
    ({"terminationGracePeriodSeconds": 9}, True),
    ({"activeDeadlineSeconds": True}, False),
    ({"volumes": [{"name": "v", "nfs": {"server": "a", "path": "/", "readonly": True}}]}, False),
    ({"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}]}, True),
    ({"volumes": [{"name": "v", "emptyDir": {"sizeLimit": 5}}]}, True),
    ({"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1 GB"}}]}, False),
    ({"volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t", "audience": "a"}}]}}]}, True),
    ({"volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t", "audiance": "a"}}]}}]}, False),
    ({"containers": [{"name": "a", "image": "b", "envv": []}]}, False),
    ({"containers": [{"name": "a", "image": "b", "env": [{"name": "A", "value": 1}]}]}, False),
    ({"containers": [{"name": "a", "image": "b", "env": {"A": "1"}}]}, False),
    ({"containers": [{"name": "a", "image": "b", "command": "python"}]}, False),
    ({"containers": [{"name": "a", "image": "b", "ports": [{"containerPort": "80"}]}]}, False),
    ({"containers": [{"name": "a", "image": "b", "livenessProbe": {"httpGet": {"port": "http", "path": "/"}}, "ports": []}]}, True),
    ({"containers": [{"name": "a", "image": "b", "livenessProbe": {"httpGet": {"port": True}}}]}, False),
    *(
        ({"containers": [{"name": "a", "image": "b", "resources": {"requests": {"cpu": number}}}]}, right)
        for number, right in (
            ("500m", True),
            (0.5, True),
            (2, True),
            ("1e3", True),
            ("1.", True),
            (".5", True),
            ("+1", True),
            ("1E", True),
            ("1Ki", True),
            ("3u", True),
            ("half", False),
            ("1GB", False),
            ("1 Gi", False),
            ("1ki", False),
            ("", False),
            ("1e", False),
            ("1e0.5", False),
            (True, False),
            ([], False),
        )
    ),
]


def test_the_file_is_what_the_api_server_serves(control_plane: Cluster) -> None:
    assert made.FILE.read_text() == made.text(control_plane.api), "run: python -m hack.podschema"


@pytest.mark.parametrize(("change", "right"), SPECS, ids=str)
def test_both_say_no_to_the_same(job_api: Api, change: dict[str, Any], right: bool) -> None:
    spec = {**GOOD, **change}
    code, answer = job_api.call("POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec})
    # 400: it cannot be read. What can be, and means nothing (422), or needs an account (403), is of no concern here.
    assert (code != 400) == right, answer
    problems = pod_mistakes(definition("PodTemplateSpec"), {"spec": spec}, "t")
    assert (not problems) == right, [str(problem) for problem in problems]
    assert all(problem.admitted for problem in problems)
