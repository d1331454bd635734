"""The chart's job policy on a real API server: who may ask for what, in which template, by which way, as docs/security.md says.

The policies are the chart's, bound to namespaces of only this module, since others share the API server.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.proc import wait_for
from psjob_client.local.status import part
from psjob_operator.contract import MOST_NUMBER
from tests.e2e.kube import CHART, Kube
from tests.integration.api_client import JOBS, Api
from tests.integration.job_asks import (
    BEYOND_BASELINE,
    BEYOND_RESTRICTED,
    HARMLESS,
    JOBS_ASKING,
    MAIN,
    SINCE_34,
    UNMASKED,
    WITHIN_RESTRICTED,
    Ask,
    manifest,
    safe,
    secure,
    table,
    volume,
)
from tests.integration.operator_harness import NAMESPACED_RULES, allow, bind, world
from tests.support.cluster_fixtures import Cluster
from tests.unit.api_manifest import GOOD, REMOVED, changed

pytestmark = pytest.mark.cluster
REGISTRATION = "/apis/admissionregistration.k8s.io/v1"
ENFORCE = "pod-security.kubernetes.io/enforce"


def right(group: str, resource: str, verb: str, name: str = "") -> dict[str, Any]:
    """The rule of a role, about one object if that is named."""
    return {"apiGroups": [group], "resources": [resource], "verbs": [verb], **({"resourceNames": [name]} if name else {})}


JOB_RIGHTS = right("psjob.dev", "pstrainingjobs", "*")
MAKE_PODS = right("", "pods", "create")
CLUSTER_ADMIN = "cluster-admin"
OF_THE_TABLE = ("jobs only", "and create pods", "edit", "admin", CLUSTER_ADMIN)
USERS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "jobs only": ("", [JOB_RIGHTS]),
    "and create pods": ("", [JOB_RIGHTS, MAKE_PODS]),
    "edit": ("edit", [JOB_RIGHTS]),
    "admin": ("admin", [JOB_RIGHTS]),
    "granted": (
        "",
        [
            *(JOB_RIGHTS, MAKE_PODS, right("", "serviceaccounts", "impersonate", "trainer")),
            *(right("", "persistentvolumeclaims", "update", "data"), right("policy.psjob.dev", "jobpolicies", "use", "baseline")),
        ],
    ),
    "all of psjob.dev": ("", [right("psjob.dev", "*", "*"), MAKE_PODS]),
    "the operator": ("", NAMESPACED_RULES),
    "status alone": ("", [right("psjob.dev", f"pstrainingjobs{part}", verb) for part in ("", "/status") for verb in ("get", "patch")]),
    "privileged": ("", [JOB_RIGHTS, MAKE_PODS, right("policy.psjob.dev", "jobpolicies", "use", "privileged")]),
}
"""Each user: a built-in role of the namespace and rules beside it, as the chart's own roles and an administrator would give them."""


# ---- a place with both policies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Two namespaces under the two policies, and an API client a user."""

    cluster: Cluster
    baseline: str
    restricted: str
    users: dict[str, Api]

    def ask(self, who: str, method: str, path: str, body: Any, content: str = "application/json") -> tuple[int, str]:
        code, answer = self.users[who].call(method, path, body, content)
        return code, answer.get("message", "")

    def path(self, name: str = "", *options: str, namespace: str = "") -> str:
        query = "&".join(("fieldValidation=Strict", *options))
        return f"{JOBS.format(namespace=namespace or self.baseline)}{f'/{name}' if name else ''}?{query}"

    def dry(self, who: str, body: dict[str, Any], namespace: str = "") -> tuple[int, str]:
        return self.ask(who, "POST", self.path("", "dryRun=All", namespace=namespace), {**body, "metadata": {"name": "dry"}})

    def patch(self, who: str, name: str, body: dict[str, Any], *options: str) -> tuple[int, str]:
        return self.ask(who, "PATCH", self.path(name, *options), body, "application/merge-patch+json")


@pytest.fixture(scope="module")
def place(control_plane: Cluster, job_api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    names = {level: control_plane.create_namespace(level, {ENFORCE: level}) for level in ("baseline", "restricted")}
    made = [path for level, namespace in names.items() for path in _install(control_plane, level, namespace)]
    folder = tmp_path_factory.mktemp("users")
    users = {who: _user(control_plane, folder, f"{names['baseline']}-{who}".replace(" ", "-"), list(names.values()), who) for who in USERS}
    found = Place(control_plane, names["baseline"], names["restricted"], {**users, CLUSTER_ADMIN: job_api})
    for namespace in names.values():
        wait_for("the policy to be in force", lambda it=namespace: found.dry("jobs only", GOOD, it)[0] == 403, 30)
        wait_for("the roles to be in force", lambda it=namespace: found.dry("edit", safe(), it)[0] == 201, 30)
    yield found
    for path in [*made, *(f"/api/v1/namespaces/{namespace}" for namespace in names.values())]:
        control_plane.api.delete(path)


def _install(cluster: Cluster, level: str, namespace: str) -> list[str]:
    """The chart's policy of that level, for that namespace alone; the paths of what was made."""
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    return _make(cluster, namespace, here, "--set", f"jobPolicy={level}", "-s", "templates/jobpolicy.yaml")


def _make(cluster: Cluster, namespace: str, here: dict[str, Any] | None, *values: str) -> list[str]:
    """Policies of the chart; the paths of what was made. `here`: what their bindings match, in place of what the chart says."""
    made = []
    for document in yaml.safe_load_all(Kube(str(cluster.kubeconfig), namespace).helm("template", "x", str(CHART), *values)):
        if here is not None and document["kind"] == "ValidatingAdmissionPolicyBinding":
            document["spec"]["matchResources"] = here
        plural = {"ValidatingAdmissionPolicy": "validatingadmissionpolicies"}.get(document["kind"], "validatingadmissionpolicybindings")
        cluster.api.create(f"{REGISTRATION}/{plural}", document)
        made.append(f"{REGISTRATION}/{plural}/{document['metadata']['name']}")
    return made


def _user(cluster: Cluster, folder: Path, name: str, namespaces: list[str], who: str) -> Api:
    builtin, rules = USERS[who]
    for namespace in namespaces:
        allow(cluster.api, name, "Role", rules, namespace)
        if builtin:
            bind(cluster.api, name, "ClusterRole", builtin, namespace)
    return Api(cluster.user_kubeconfig(name, folder=folder))


@pytest.fixture(scope="module")
def suspended(place: Place) -> dict[str, str]:
    """Each job, as a cluster administrator made it, suspended: name of the row -> name of the job."""
    for body in (changed(job.body, {"spec.suspend": True}) for job in JOBS_ASKING.values()):
        code, message = place.ask(CLUSTER_ADMIN, "POST", place.path(), body)
        assert code == 201, message
    return {name: job.body["metadata"]["name"] for name, job in JOBS_ASKING.items()}


# ---- the table ---------------------------------------------------------------------------------------------------------------------


def test_there_are_thirty_templates_and_more_and_the_table_has_them_all() -> None:
    asking = [job for job in JOBS_ASKING.values() if job.row != "nothing"]
    places = {"spec.workers.template", "spec.shards.template", "spec.checkpoint.volume", "spec.checkpoint.volumeClaimTemplate"}
    assert len(asking) >= 30 and {job.path for job in asking} == places
    assert {job.row for job in JOBS_ASKING.values()} == set(table())
    assert all(set(row) == set(OF_THE_TABLE) for row in table().values())


@pytest.mark.parametrize("who", OF_THE_TABLE)
def test_who_may_ask_for_what(place: Place, suspended: dict[str, str], who: str) -> None:
    """By create, dry-run, server-side apply, update of a job, and resuming one that another made."""
    rows = table()
    wrong = []
    for number, (name, job) in enumerate(JOBS_ASKING.items()):
        created, applied = (changed(job.body, {"metadata.name": f"{way}{number}-{who.replace(' ', '-')}"}) for way in ("c", "a"))
        apply = place.path(applied["metadata"]["name"], "fieldManager=test")
        answers = {
            "create": place.ask(who, "POST", place.path(), created),
            "dry-run": place.dry(who, job.body),
            "apply": place.ask(who, "PATCH", apply, applied, "application/apply-patch+yaml"),
            "resume": place.patch(who, suspended[name], {"spec": {"suspend": False}}, "dryRun=All"),
        }
        passes = rows[job.row][who]
        for way, (code, message) in answers.items():
            told = "may not create pods in namespace" in message if who == "jobs only" else message.count(job.path) >= 1
            good = code in (200, 201) if passes else code == 403 and told and f"namespace {place.baseline}" in message
            if not good:
                wrong.append((name, way, code, message))
    assert not wrong, "\n".join(map(str, wrong))


def staged(pod: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    """A job whose second stage has the template of all workers, with `pod` and `container` laid over it."""
    template = copy.deepcopy(safe()["spec"]["workers"]["template"])
    template["spec"] |= pod
    template["spec"]["containers"][0] |= container
    return changed(
        safe(), {"spec.workers.replicas": REMOVED, "spec.stages": [{"name": "a", "replicas": 2}, {"name": "b", "template": template}]}
    )


def test_a_stage_runs_and_is_scheduled_as_it_likes(place: Place) -> None:
    """In both namespaces, of a user who may make pods and nothing else."""
    own = {"image": "me/stage:2", "command": ["python", "stage.py"], "env": [{"name": "A", "value": "1"}]}
    limits = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
    for body in (staged({}, {}), staged({"nodeSelector": {"gpu": "a100"}, "tolerations": [{"operator": "Exists"}]}, {**own, **limits})):
        for namespace in (place.baseline, place.restricted):
            assert place.dry("and create pods", body, namespace)[0] == 201


def test_a_stage_asks_for_nothing_that_the_workers_template_does_not_ask_for(place: Place) -> None:
    asks = {
        **{name: (ask.pod, ask.container) for name, ask in {**MAIN, **BEYOND_BASELINE}.items()},
        "account": ({"serviceAccountName": "trainer"}, {}),
        "node": ({"nodeName": "n1"}, {}),
        "claim": (volume(persistentVolumeClaim={"claimName": "data"}), {}),
        "no context": ({"securityContext": {}}, {}),
        "no context of the container": ({}, {"securityContext": {}}),
    }
    wrong = []
    for name, (pod, container) in asks.items():
        body = staged(pod, container)
        for who in ("and create pods", "granted", "privileged"):
            code, message = place.dry(who, body)
            if "hostNetwork" in pod:  # whoever asks: all stages, or none
                told = code == 422 and "must all have hostNetwork: true in their template" in message
            else:
                told = code == 403 and "spec.stages: the template of b is unlike spec.workers.template" in message
            if not told:
                wrong.append((name, who, code, message))
        code, message = place.dry(CLUSTER_ADMIN, body)
        if code != 201 and "hostNetwork" not in pod:
            wrong.append((name, CLUSTER_ADMIN, code, message))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("who", OF_THE_TABLE)
def test_an_update_brings_no_template_that_a_new_job_may_not_have(place: Place, suspended: dict[str, str], who: str) -> None:
    """Templates of a suspended job may change; its volume may not."""
    for name, job in JOBS_ASKING.items():
        other = {"spec": {part: job.body["spec"][part] for part in ("workers", "shards", "checkpoint") if part in job.body["spec"]}}
        if job.row == "nothing":
            continue
        code, message = place.patch(who, suspended["workers-plain"], other, "dryRun=All")
        if job.path.startswith("spec.checkpoint."):
            assert code == 403 or (code == 422 and "is fixed" in message), f"{name}: {code} {message}"
        else:
            assert code == (200 if table()[job.row][who] else 403), f"{name}: {code} {message}"


@pytest.mark.parametrize(
    ("who", "passes"),
    [
        ("granted", {"nothing", "serviceAccountName", "claim", "restricted"}),
        ("privileged", {"nothing", "baseline", "restricted"}),
        ("all of psjob.dev", {"nothing"}),
    ],
)
def test_a_right_on_one_name_is_that_and_all_of_the_crds_group_is_none(place: Place, who: str, passes: set[str]) -> None:
    """A role with `*` of psjob.dev is what people write for a CRD."""
    for name, job in JOBS_ASKING.items():
        code, message = place.dry(who, job.body)
        assert (code == 201) == (job.row in passes), f"{name}: {code} {message}"


def test_a_right_on_one_name_is_none_on_another(place: Place) -> None:
    other = {"account": {"serviceAccountName": "root"}, "claim": volume(persistentVolumeClaim={"claimName": "theirs"})}
    for name, pod in other.items():
        code, message = place.dry("granted", manifest("other", "workers", Ask(name, pod)))
        assert code == 403 and ("root" in message or "theirs" in message), message
    many = {"volumes": [{"name": f"v{i}", "persistentVolumeClaim": {"claimName": "data"}} for i in range(5)]}
    code, message = place.dry("granted", manifest("many", "workers", Ask("claim", many)))
    assert code == 403 and "5 claims are more than the 4 that are looked up by name" in message
    assert place.dry("edit", manifest("many", "workers", Ask("claim", many)))[0] == 201


EVIL = {"status": {"internal": {"pinned": {"runtimeImage": "evil.example/own:1"}}}}


def test_what_a_run_is_pinned_to_is_for_those_who_may_make_pods(place: Place) -> None:
    """The init container with all keys of the run is of the image that the status says."""
    body = changed(GOOD, {"metadata.name": "pinned"})
    assert place.ask(CLUSTER_ADMIN, "POST", place.path(), body)[0] == 201

    def change(who: str, status: dict[str, Any] | None) -> tuple[int, str]:
        return place.ask(who, "PATCH", place.path("pinned/status"), {"status": status}, "application/merge-patch+json")

    pinned = {"runtimeImage": "registry/psjob-runtime:1", "wire": 2, "configFormat": 1, "key": 1}
    code, message = change("status alone", {"internal": {"pinned": pinned}})
    assert code == 403 and "status.internal.pinned: user " in message and "may not create pods" in message
    assert change("status alone", {"phase": "Pending"})[0] == 200, "the rest of the status is judged only by its role"
    assert change("the operator", {"internal": {"pinned": pinned}})[0] == 200, "with the chart's own rights"
    for other in ({"runtimeImage": "evil.example/own:1"}, {"encryption": "none"}, {"key": 7}):
        assert change("status alone", {"internal": {"pinned": other}})[0] == 403, other
    assert change("status alone", {"internal": {"pinned": None}})[0] == 403
    assert change("status alone", None)[0] == 403, "the whole status"
    forced = {key: GOOD[key] for key in ("apiVersion", "kind")} | EVIL
    path = place.path("pinned/status", "fieldManager=test", "force=true")
    assert place.ask("status alone", "PATCH", path, forced, "application/apply-patch+yaml")[0] == 403
    one = [{"op": "replace", "path": "/status/internal/pinned/runtimeImage", "value": "evil.example/own:1"}]
    assert place.ask("status alone", "PATCH", place.path("pinned/status"), one, "application/json-patch+json")[0] == 403
    assert change("status alone", {"internal": {"pinned": pinned}, "phase": "Running"})[0] == 200, "nothing pinned was changed"
    assert change("the operator", {"internal": {"pinned": {"key": 2}, "term": MOST_NUMBER}})[0] == 200
    for numbers in ({"term": 1 << 62}, {"pinned": {"key": MOST_NUMBER + 1}}, {"workerStart": 1 << 62}):
        code, message = change("the operator", {"internal": numbers})
        assert code == 422 and f"should be less than or equal to {MOST_NUMBER}" in message, message


def test_an_operator_pins_runs_under_the_policy(control_plane: Cluster, namespace: str, tmp_path: Path) -> None:
    made = _install(control_plane, "baseline", namespace)
    stranger = _user(control_plane, tmp_path, f"{namespace}-status", [namespace], "status alone")
    path = f"{JOBS.format(namespace=namespace)}/digits/status?dryRun=All"
    with world(control_plane, namespace, tmp_path) as here:
        here.create(GOOD)
        wait_for("the policy", lambda: stranger.call("PATCH", path, EVIL, "application/merge-patch+json")[0] == 403, 30)
        here.operator()
        for number, suspend in ((1, None), (1, True), (2, False)):
            here.edit("digits", suspend=suspend)
            here.until(f"key {number}", lambda n=number: part(here.status("digits"), "internal", "pinned").get("key") == n)
            here.until("pods, or none", lambda none=suspend: bool(here.pods("digits")) != bool(none))
        assert stranger.merge(namespace, "digits", EVIL, status=True)[0] == 403
        assert here.status("digits")["internal"]["pinned"]["runtimeImage"] != "evil.example/own:1"
    for policy in made:
        control_plane.api.delete(policy)


# ---- updates that are nobody's to refuse -------------------------------------------------------------------------------------------


def test_what_makes_no_pods_is_not_judged(place: Place) -> None:
    body = changed(JOBS_ASKING["workers-hostpath"].body, {"metadata.name": "theirs"})
    assert place.ask(CLUSTER_ADMIN, "POST", place.path(), body)[0] == 201
    for change in (
        {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}},
        {"metadata": {"finalizers": ["example.com/wait"]}},
        {"metadata": {"finalizers": None}},
        {"spec": {"suspend": True}},
    ):
        assert place.patch("jobs only", "theirs", change)[0] == 200, change
    for change in ({"suspend": False}, {"suspend": None}, {"runPolicy": {"backoffLimit": 9}}, {"checkpoint": {"request": 5}}):
        code, message = place.patch("jobs only", "theirs", {"spec": change})
        assert code == 403 and "may not create pods" in message, change
    # The template is another's and was judged in his name; what is changed beside it does not bring it back.
    assert place.patch("edit", "theirs", {"spec": {"runPolicy": {"backoffLimit": 9}, "checkpoint": {"request": 5}}})[0] == 200
    code, message = place.patch("edit", "theirs", {"spec": {"suspend": False}})
    assert code == 403 and "spec.workers.template.spec.volumes[0].hostPath: /etc exceeds" in message
    assert place.patch(CLUSTER_ADMIN, "theirs", {"spec": {"suspend": False}})[0] == 200


def test_a_refusal_names_field_value_limit_and_next_step(place: Place) -> None:
    two = Ask("baseline", {"hostPID": True}, secure(privileged=True))
    code, message = place.dry("edit", manifest("two", "workers", two))
    assert code == 403
    assert message.partition("denied request: ")[2] == (
        "spec.workers.template.spec.hostPID: true; spec.workers.template.spec.containers[0].securityContext.privileged: true"
        " exceeds the Pod Security Standard baseline; leave it out, or ask a cluster administrator to grant"
        f" {place.baseline}-edit the verb use on jobpolicies.policy.psjob.dev/privileged in namespace {place.baseline}"
    )


# ---- the words of the Pod Security Standards ---------------------------------------------------------------------------------------


def pod_is_taken(place: Place, namespace: str, job: dict[str, Any]) -> bool:
    """Whether Kubernetes' own Pod Security admission takes a pod of the workers' template there."""
    spec = job["spec"]["workers"]["template"]["spec"]
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    code, message = place.ask(CLUSTER_ADMIN, "POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", body)
    assert code == 201 or "violates PodSecurity" in message, message
    return code == 201


def test_baseline_refuses_what_pod_security_refuses(place: Place) -> None:
    older = int(place.cluster.api.get("/version")["minor"].rstrip("+")) < 34
    for name, ask in (BEYOND_BASELINE | HARMLESS).items():
        taken = name in HARMLESS or (older and name in SINCE_34)
        assert pod_is_taken(place, place.baseline, manifest(name, "workers", ask)) == taken, name
    for name, ask in (BEYOND_BASELINE | HARMLESS | {"unmasked": UNMASKED}).items():
        for where in ("workers", "shards"):
            code, message = place.dry("edit", manifest(name, where, ask))
            assert code == (201 if name in HARMLESS else 403), f"{where} {name}: {message}"
            assert name in HARMLESS or (f"spec.{where}.template" in message and "Standard baseline" in message), message
    for name, job in (BEYOND_RESTRICTED | WITHIN_RESTRICTED).items():
        assert pod_is_taken(place, place.baseline, job) and place.dry("edit", job)[0] == 201, name


def test_restricted_refuses_what_pod_security_refuses(place: Place) -> None:
    for name, job in (BEYOND_RESTRICTED | WITHIN_RESTRICTED).items():
        taken = name in WITHIN_RESTRICTED
        assert pod_is_taken(place, place.restricted, job) == taken, name
        code, message = place.dry("edit", job, place.restricted)
        assert code == (201 if taken else 403), f"{name}: {message}"
        assert taken or "exceeds the Pod Security Standard restricted" in message, f"{name}: {message}"
        assert place.dry("granted", job, place.restricted)[0] == 201, f"{name}: may use jobpolicies/baseline"
    for name, ask in BEYOND_BASELINE.items():
        assert place.dry("granted", manifest(name, "workers", ask), place.restricted)[0] == 403, name
    nfs = changed(safe(), {"spec.checkpoint.volume": {"nfs": {"server": "s", "path": "/"}}})
    assert "spec.checkpoint.volume: nfs exceeds" in place.dry("edit", nfs, place.restricted)[1]


# ---- cost --------------------------------------------------------------------------------------------------------------------------


def test_the_api_server_has_nothing_to_say_about_the_expressions(place: Place) -> None:
    for name in (f"{namespace}.x-psjob{which}" for namespace in (place.baseline, place.restricted) for which in ("", ".status")):
        path = f"{REGISTRATION}/validatingadmissionpolicies/{name}"

        def status(at: str = path) -> dict[str, Any]:
            found: dict[str, Any] = place.cluster.api.get(at).get("status") or {}
            return found

        wait_for("the expressions to be type-checked", lambda: "typeChecking" in status(), 30)
        assert not status()["typeChecking"].get("expressionWarnings"), status()


@pytest.mark.parametrize("asks", [False, True])
def test_the_largest_manifest_is_within_the_cost(place: Place, asks: bool) -> None:
    context = secure(privileged=True, capabilities={"add": [f"C{i}" for i in range(20)], "drop": ["ALL"]}) if asks else {}
    env = [{"name": f"VARIABLE_{k}", "value": "x"} for k in range(100)]
    many: list[dict[str, Any]] = [{"name": f"c{i}", "image": "i", "env": env, **context} for i in range(15)]
    worker = {"name": "worker", "image": "i", "command": ["python", "-c", "x" * 8000], **context}
    both = {
        "volumes": [{"name": f"v{i}", "persistentVolumeClaim": {"claimName": f"claim-{i}"}} for i in range(200)],
        "initContainers": [{"name": f"i{i}", "image": "i", **context} for i in range(16)],
    }
    workers = {**both, "containers": [*many, worker], "serviceAccountName": "trainer"}
    shards = {**both, "containers": [{"name": "shard", **context}, *many[:5]], **({"nodeName": "n"} if asks else {})}
    body = changed(GOOD, {"metadata.name": "large", "spec.workers.template.spec": workers, "spec.shards.template": {"spec": shards}})
    assert len(json.dumps(body)) > 90_000
    for who, code in ((CLUSTER_ADMIN, 201), ("edit", 403 if asks else 201), ("granted", 403)):
        begun = time.monotonic()
        answer = place.dry(who, body)
        assert answer[0] == code, f"{who}: {answer}"
        assert "cost" not in answer[1] and "resulted in error" not in answer[1], answer[1]
        assert time.monotonic() - begun < 10
    code, message = place.dry("granted", body, place.restricted)
    assert code == 403 and "cost" not in message and "resulted in error" not in message, message
    if asks:
        assert place.ask(CLUSTER_ADMIN, "POST", place.path(), body)[0] == 201
        assert place.patch("jobs only", "large", {"spec": {"suspend": True}})[0] == 200


# ---- namespaces without jobs -------------------------------------------------------------------------------------------------------


def test_an_excluded_namespace_takes_no_job_from_anybody(control_plane: Cluster, job_api: Api) -> None:
    """The two below are excluded; kube-system itself is others' too here, and what is there before stays in its owner's hands."""
    closed, shut, free = (control_plane.create_namespace(prefix) for prefix in ("closed", "shut", "free"))
    assert job_api.create(shut, GOOD)[0] == 201
    excluded = f'excludeNamespaces=["{closed}","{shut}"]'
    made = _make(control_plane, closed, None, "--set-json", excluded, "--set", "jobPolicy=none", "-s", "templates/excludednamespaces.yaml")
    try:
        wait_for("the policy to be in force", lambda: job_api.create(closed, GOOD, dry=True)[0] == 403, 30)
        code, answer = job_api.create(closed, GOOD)
        said = f"metadata.namespace: {closed} takes no PSTrainingJob, as excludeNamespaces of the chart says"
        assert code == 403 and said in answer["message"]
        assert job_api.create(free, GOOD)[0] == 201
        assert job_api.merge(shut, "digits", {"spec": {"suspend": True}})[0] == 200
    finally:
        for path in [*made, *(f"/api/v1/namespaces/{namespace}" for namespace in (closed, shut, free))]:
            control_plane.api.delete(path)
