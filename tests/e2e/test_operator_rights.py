"""After what other tests on real nodes made the operator do: the rights it used, and what is left when it goes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import digits
from tests.e2e.conftest import HOME
from tests.e2e.digits import accuracy, complete, final_weights, pods_of
from tests.e2e.kube import Kube, install, phase, wait_for
from tests.support import rights
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.nodes, pytest.mark.serial]
MINE = "app.kubernetes.io/instance=psjob"
CORE = [
    {"apiGroups": ["psjob.dev"], "resources": ["pstrainingjobs"], "verbs": ["list", "watch"]},
    {"apiGroups": ["psjob.dev"], "resources": ["pstrainingjobs/status"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["services", "configmaps", "persistentvolumeclaims"], "verbs": ["create", "list", "watch"]},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["create", "list", "watch"]},
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "patch", "create"]},
]
"""What any life of a job uses."""


@pytest.mark.soak
def test_the_rights_of_the_chart_are_those_that_were_used(request: pytest.FixtureRequest, home: Kube, node_cluster: Cluster) -> None:
    """Of all that the tests before made the operator do: nothing was refused to it, and each request needed a right that the chart grants.

    That each right is used is shown in tests/integration, where everything that needs one can be brought about.
    """
    user = f"system:serviceaccount:{HOME}:psjob"
    asked = node_cluster.audit(user=user)
    if not any(event["verb"] == "create" and event["objectRef"]["resource"] == "pods" for event in asked):  # no test came before
        kube = request.getfixturevalue("kube")
        kube.apply(digits.job("digits", args=[f"--epochs={digits.SHORT_EPOCHS}"]))
        complete(kube, "digits")
        asked = node_cluster.audit(user=user)
    answers = [(event["verb"], event["requestURI"], event.get("responseStatus", {})) for event in asked]
    # In a namespace that is going, whatever would create something is refused to everybody.
    refused = [answer for answer in answers if answer[2].get("code") == 403 and "being terminated" not in answer[2].get("message", "")]
    assert refused == []
    done = rights.used(event for event in asked if event.get("responseStatus", {}).get("code", 0) < 400)
    roles = [*home.list("clusterroles", MINE), *home.list("roles", MINE)]
    assert done <= rights.granted(rule for role in roles for rule in role["rules"]), "used, and granted by something else than the chart"
    daily = rights.granted(CORE)
    assert daily <= done, f"granted and never used in all those jobs: {sorted(daily - done)}"


@pytest.mark.soak
def test_uninstall_leaves_jobs_running_and_a_new_install_takes_them_up(kube: Kube, home: Kube) -> None:
    name = "digits"
    kube.apply(digits.job(name, args=[f"--epochs={digits.SHORT_EPOCHS}"]))
    wait_for("the job to run", phase(kube, name, "Running"), 120, story=lambda: kube.story(name))
    home.helm("uninstall", "psjob", "--wait")
    assert kube.get("psj", name) is not None and kube.get("crd", "pstrainingjobs.psjob.dev") is not None
    workers = pods_of(kube, name, "worker")
    assert len(workers) == 2
    wait_for("the workers to end without an operator", lambda: all(ended(kube, pod) for pod in workers), 180, every=1)
    assert kube.status(name)["phase"] == "Running", "nobody was there to say otherwise"
    install(home)
    complete(kube, name, 120)
    assert accuracy(final_weights(kube, name)) >= 0.95


def ended(kube: Kube, pod: dict[str, Any]) -> bool:
    now = kube.get("pod", pod["metadata"]["name"])
    return now is not None and now["status"]["phase"] == "Succeeded"
