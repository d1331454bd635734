"""The chart on a real API server: install, upgrade, uninstall, install again; what its rights allow and what they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.kube import CHART, Kube, restricted_namespace, wait_for
from tests.integration.chart_plane import job, plane

__all__ = ["plane"]

pytestmark = pytest.mark.cluster
CRD = "pstrainingjobs.psjob.dev"
OPERATOR = "system:serviceaccount:home:x-psjob"


@pytest.fixture(scope="module")
def home(plane: str) -> Kube:
    """The restricted namespace that the chart is installed in."""
    kube = Kube(plane, "home")
    restricted_namespace(kube)
    return kube


@pytest.fixture(scope="module")
def installed(home: Kube) -> Kube:
    """The chart as it is; a test that changes it puts it back."""
    home.helm("install", "x", str(CHART))
    wait_for("the CRD to be served", lambda: "psj" in home.kubectl("api-resources", "--api-group=psjob.dev", check=False), 30)
    return home


def versions(kube: Kube) -> dict[str, str]:
    """resourceVersion of every object of the release."""
    found = json.loads(kube.kubectl("get", "-f", "-", "-o", "json", stdin=kube.helm("get", "manifest", "x")))["items"]
    return {f"{live['kind']}/{live['metadata']['name']}": live["metadata"]["resourceVersion"] for live in found}


def may(kube: Kube, who: str, *rights: str, namespace: str = "elsewhere") -> dict[str, bool]:
    """Whether `who` may do each of `verb resource[.group][/subresource]` in that namespace."""
    reviews = []
    for right in rights:
        verb, what = right.split()
        path, _, sub = what.partition("/")
        resource, _, group = path.partition(".")
        asked = {"verb": verb, "group": group, "resource": resource, "subresource": sub, "namespace": namespace}
        spec = {"user": who, "groups": ["system:authenticated"], "resourceAttributes": asked}
        reviews.append({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec})
    text = "\n---\n".join(json.dumps(review) for review in reviews)
    out = kube.kubectl("create", "-f", "-", "-o", 'jsonpath={.status.allowed}{"\\n"}', stdin=text)
    return dict(zip(rights, (word == "true" for word in out.split()), strict=True))


def can(kube: Kube, who: str, right: str, namespace: str) -> bool:
    return may(kube, who, right, namespace=namespace)[right]


def test_the_operator_pod_is_admitted_under_restricted(installed: Kube) -> None:
    pods = wait_for("the operator's pod to be made", lambda: installed.list("pods", "app.kubernetes.io/component=operator"), 30)
    assert pods[0]["spec"]["serviceAccountName"] == "x-psjob"
    assert "Warning" not in installed.kubectl("get", "events", "--field-selector=reason=FailedCreate")


def test_an_upgrade_with_equal_values_changes_nothing(installed: Kube) -> None:
    # The statuses of these are written by controllers meanwhile: the Deployment's generation is compared.
    moving = ("Deployment/", "CustomResourceDefinition/", "ValidatingAdmissionPolicy/")
    before = {name: version for name, version in versions(installed).items() if not name.startswith(moving)}
    generation = (installed.get("deployment", "x-psjob") or {})["metadata"]["generation"]
    installed.helm("upgrade", "x", str(CHART))
    after = versions(installed)
    assert {name: after[name] for name in before} == before
    assert (installed.get("deployment", "x-psjob") or {})["metadata"]["generation"] == generation


def test_an_upgrade_brings_the_new_crd(installed: Kube, tmp_path: Path) -> None:
    newer = tmp_path / "psjob"
    shutil.copytree(CHART, newer)
    file = newer / "templates" / "crds" / "psjob.dev_pstrainingjobs.yaml"
    text = file.read_text()
    assert "shortNames: [psj]" in text or "- psj" in text
    file.write_text(text.replace("shortNames: [psj]", "shortNames: [psj, psjs]").replace("    - psj\n", "    - psj\n    - psjs\n"))
    installed.helm("upgrade", "x", str(newer))
    try:
        assert (installed.get("crd", CRD) or {})["spec"]["names"]["shortNames"] == ["psj", "psjs"]
    finally:
        installed.helm("upgrade", "x", str(CHART))
    assert (installed.get("crd", CRD) or {})["spec"]["names"]["shortNames"] == ["psj"]


def test_uninstall_leaves_the_crd_and_the_jobs_and_nothing_else(installed: Kube) -> None:
    installed.apply(job("stays"))
    uid = (installed.get("psj", "stays") or {})["metadata"]["uid"]
    said = installed.helm("uninstall", "x", "--wait")
    assert CRD in said or "kept due to the resource policy" in said
    kinds = "deployments,replicasets,pods,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,configmaps,secrets,services"
    kinds += ",validatingadmissionpolicies,validatingadmissionpolicybindings"
    labels = "app.kubernetes.io/instance=x"
    wait_for("the release's objects to go", lambda: not installed.kubectl("get", kinds, "-A", "-l", labels, "-o", "name").strip(), 60)
    assert (installed.get("psj", "stays") or {})["metadata"]["uid"] == uid
    installed.helm("install", "x", str(CHART))
    assert (installed.get("psj", "stays") or {})["metadata"]["uid"] == uid
    installed.kubectl("delete", "psj", "stays")


ALLOWED = (
    *(f"{verb} pstrainingjobs.psjob.dev" for verb in ("get", "list", "watch", "delete")),
    "patch pstrainingjobs.psjob.dev/status",
    "update pstrainingjobs.psjob.dev/finalizers",
    *(f"{verb} pods" for verb in ("create", "delete", "get", "list", "watch")),
    *(f"{verb} {kind}" for verb in ("create", "get", "list", "watch", "patch") for kind in ("services", "configmaps")),
    *(f"{verb} persistentvolumeclaims" for verb in ("create", "get", "list", "watch")),
    "create secrets",
    "list events",
    "create events.events.k8s.io",
    "get nodes",
)
REFUSED = (
    *(f"{verb} pstrainingjobs.psjob.dev" for verb in ("create", "patch", "update", "deletecollection")),
    *(f"{verb} secrets" for verb in ("get", "list", "watch", "patch", "update", "delete")),
    *(f"{verb} pods" for verb in ("patch", "update", "deletecollection")),
    *("create pods/exec", "get pods/log", "create pods/eviction", "patch pods/status"),
    *(f"delete {kind}" for kind in ("persistentvolumeclaims", "services", "configmaps", "nodes", "namespaces")),
    *("patch persistentvolumeclaims", "list nodes", "patch nodes"),
    *("create roles.rbac.authorization.k8s.io", "create serviceaccounts/token", "impersonate users"),
    "patch customresourcedefinitions.apiextensions.k8s.io",
)


def test_the_operator_may_do_this_and_no_more(installed: Kube) -> None:
    answers = may(installed, OPERATOR, *ALLOWED, *REFUSED)
    assert [right for right in ALLOWED if not answers[right]] == []
    assert [right for right in REFUSED if answers[right]] == []


def test_built_in_roles_reach_jobs(installed: Kube) -> None:
    for user, role in (("vera", "view"), ("ed", "edit")):
        installed.kubectl("create", "rolebinding", f"{user}-{role}", f"--clusterrole={role}", f"--user={user}")
    writes = [f"{verb} pstrainingjobs.psjob.dev" for verb in ("create", "patch", "update", "delete")]
    reads = [f"{verb} pstrainingjobs.psjob.dev" for verb in ("get", "list", "watch")]
    wait_for("the roles to be aggregated", lambda: all(may(installed, "ed", *writes, *reads, namespace="home").values()), 30)
    wait_for("the roles to be aggregated", lambda: all(may(installed, "vera", *reads, namespace="home").values()), 30)
    assert not any(may(installed, "vera", *writes, namespace="home").values())
    assert not can(installed, "ed", "patch pstrainingjobs.psjob.dev/status", "home")


def test_the_job_policy_is_in_force_and_goes_by_value(installed: Kube) -> None:
    """Who may make jobs and no pods is refused; the editor of the test before is not."""

    def told(user: str) -> str:
        answer = installed.run("kubectl", "create", "--dry-run=server", "--as", user, "-f", "-", stdin=json.dumps(job("asks")), check=False)
        return answer.stdout + answer.stderr

    installed.kubectl("create", "role", "jobs-alone", "--verb=*", "--resource=pstrainingjobs.psjob.dev")
    installed.kubectl("create", "rolebinding", "jobs-alone", "--role=jobs-alone", "--user=joe")
    wait_for("the policy to hold", lambda: "user joe may not create pods in namespace home" in told("joe"), 30)
    wait_for("an editor to be let in", lambda: "asks created" in told("ed"), 30)
    installed.helm("upgrade", "x", str(CHART), "--set", "jobPolicy=none")
    wait_for("the policy to go", lambda: "asks created" in told("joe"), 30)
    assert installed.names("validatingadmissionpolicies", "app.kubernetes.io/instance=x") == {"home.x-psjob.namespaces"}
    there = ("kubectl", "create", "--dry-run=server", "-f", "-")
    refused = installed.run(*there, stdin=json.dumps(job("asks")), check=False, namespace="kube-system").stderr
    assert "kube-system takes no PSTrainingJob, as excludeNamespaces of the chart says" in refused
    installed.helm("upgrade", "x", str(CHART), "--reset-values")


def test_without_cluster_rights_it_serves_named_namespaces(installed: Kube) -> None:
    """Someone who is admin of two namespaces, and nothing more, installs the chart there."""
    for name in ("team-a", "team-b", "other"):
        restricted_namespace(Kube(installed.kubeconfig, name))
        if name != "other":
            installed.kubectl("create", "rolebinding", "lead", "--clusterrole=admin", "--user=lead", "-n", name, check=False)
            # An admin grants only what he holds, and these are not in the built-in role (the first one is by Kubernetes 1.37).
            rules = [
                {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
                {"apiGroups": ["psjob.dev"], "resources": ["pstrainingjobs/finalizers"], "verbs": ["update"]},
                {"apiGroups": ["psjob.dev"], "resources": ["pstrainingjobs/status"], "verbs": ["patch"]},
            ]
            metadata = {"name": "lead", "namespace": name}
            role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules}
            installed.apply(role, namespace=name)
            installed.kubectl("create", "rolebinding", "lead-2", "--role=lead", "--user=lead", "-n", name)
    team = Kube(installed.kubeconfig, "team-a")
    settings = ("--set-json", 'watchNamespaces=["team-a","team-b"]', "--set", "crds.enabled=false")
    answer = team.run("helm", "install", "own", str(CHART), *settings, "--kube-as-user", "lead", check=False)
    assert answer.returncode == 0, answer.stderr
    who = "system:serviceaccount:team-a:own-psjob"
    assert can(team, who, "create pods", "team-a") and can(team, who, "create pods", "team-b")
    assert not can(team, who, "create pods", "other")
    assert not can(team, who, "get nodes", "team-a")
    team.helm("uninstall", "own", "--wait")
