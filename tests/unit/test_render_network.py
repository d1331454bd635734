"""The NetworkPolicies of a run: whom they select, whom they let in, and when one is to be made anew.

The keys of a process: the Secret of its run, who may read what, and the shell script that derives a key file from it.
"""

from __future__ import annotations

import base64
import copy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psjob_operator import contract, keys, render
from psjob_operator.__main__ import app
from psjob_operator.api.status import Pinned
from psjob_operator.certificates import certificates
from psjob_operator.plan.actions import CreateProcess, EnsurePolicy
from psjob_operator.plan.observed_state import Objects, Refusal, Role
from psjob_operator.plan.plan import plan
from psjob_operator.render.pod import DERIVE
from tests.support.typed import CliRunner
from tests.unit.plan_given import NOW, job, names, running

OPERATOR = {"namespaceSelector": {"matchLabels": {"a": "b"}}, "podSelector": {"matchLabels": {"c": "d"}}}
ADDRESS = {"ipBlock": {"cidr": "192.0.2.0/28"}}


def labels(role: Role, uid: str = "run-1") -> dict[str, str]:
    made: dict[str, str] = render.pod(replace(job(), uid=uid), CreateProcess(role, 0, 1, 1, "name"))["metadata"]["labels"]
    return made


def selects(document: dict[str, Any], pod: dict[str, str]) -> bool:
    return bool(document["spec"]["podSelector"]["matchLabels"].items() <= pod.items())


def test_shards_take_the_run_on_one_port_and_who_asks_on_the_other() -> None:
    made = render.policy(job(), "shard", (OPERATOR, ADDRESS))
    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("job-shards", "ns")
    assert made["metadata"]["ownerReferences"][0]["uid"] == "run-1"
    assert selects(made, labels("shard")) and not selects(made, labels("worker")) and not selects(made, labels("shard", "run-2"))
    data, status = made["spec"]["ingress"]
    assert data["ports"] == [{"protocol": "TCP", "port": 7070}] and status["ports"] == [{"protocol": "TCP", "port": 7071}]
    assert status["from"] == [OPERATOR, ADDRESS]
    (run,) = data["from"]
    assert run["podSelector"]["matchLabels"].items() <= labels("worker").items()
    assert not run["podSelector"]["matchLabels"].items() <= labels("worker", "run-2").items()
    assert list(run) == ["podSelector"], "a selector of namespaces would let in pods of others"


def test_workers_take_their_run_alone_and_what_they_open_is_left_alone() -> None:
    made = render.policy(job(), "worker", (OPERATOR,))
    assert selects(made, labels("worker")) and not selects(made, labels("shard"))
    assert made["spec"]["policyTypes"] == ["Ingress"] and "egress" not in made["spec"]
    (only,) = made["spec"]["ingress"]
    assert list(only) == ["from"] and only["from"] == render.policy(job(), "shard", ())["spec"]["ingress"][0]["from"]


def test_workers_on_their_nodes_networks_are_let_in_whatever_their_address() -> None:
    workers = {"replicas": 3, "template": {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet", "containers": []}}}
    data, status = render.policy(job(workers=workers), "shard", (OPERATOR,))["spec"]["ingress"]
    assert data == {"ports": [{"protocol": "TCP", "port": 7070}]} and status["from"] == [OPERATOR]


def test_a_policy_that_lets_in_something_else_is_told_from_a_harmless_change() -> None:
    spec = render.policy(job(), "shard", (OPERATOR,))["spec"]
    assert render.policy_rules({**spec, "egress": []}) == render.policy_rules(spec)
    for change in ({"ingress": [{}]}, {"podSelector": {}}, {"policyTypes": ["Egress"]}, {"ingress": spec["ingress"][:1]}):
        assert render.policy_rules({**copy.deepcopy(spec), **change}) != render.policy_rules(spec), change


def test_policies_are_made_before_pods_and_a_refused_one_holds_back_none() -> None:
    wanted: tuple[Role, ...] = ("shard", "worker")
    first = plan(job(objects=Objects(unguarded=wanted)), NOW)
    kinds = [type(action) for action in first.actions]
    assert [action.role for action in first.actions if isinstance(action, EnsurePolicy)] == ["shard", "worker"]
    assert kinds.index(EnsurePolicy) < kinds.index(CreateProcess)
    up = running()
    mended = plan(replace(up, objects=replace(up.objects, unguarded=("worker",))), NOW)
    assert mended.actions == (EnsurePolicy("worker"),) and not mended.intent
    refusal = Refusal("job-workers", 403, "NetworkPolicy/job-workers: forbidden", NOW, 1)
    refused = plan(job(objects=Objects(unguarded=wanted), refusals=(refusal,)), NOW)
    assert names(refused) == names(first) and refused.status == first.status


def test_a_peer_is_json_and_comes_as_the_api_server_would_store_it() -> None:
    assert render.peer_of('{"namespaceSelector": {}}') == {"namespaceSelector": {}}
    assert render.peer_of('{"podSelector": {"matchLabels": {}, "matchExpressions": []}}') == {"podSelector": {}}
    assert render.peer_of('{"ipBlock": {"cidr": "192.0.2.0/28", "except": []}}') == ADDRESS


@pytest.mark.parametrize("text", ["192.0.2.7", "{}", "[]", '{"cidr": "192.0.2.0/28"}', '{"ipBlock": "192.0.2.0/28"}', "nonsense"])
def test_another_peer_is_refused_by_the_option(text: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON|must be an object"):
        render.peer_of(text)
    answer = CliRunner().invoke(app, ["run", f"--network-policy={text}"])
    assert answer.exit_code == 2 and f"--network-policy {text}: " in answer.output and "ipBlock" in answer.output


WORKERS, SHARDS, QUESTIONS = bytes(range(32)), bytes(range(32, 64)), bytes(range(200, 232))
RUN = {"workers": WORKERS, "shards": SHARDS, "questions": QUESTIONS}
IMAGE = "registry/psjob-runtime:1"
ROLES: tuple[tuple[Role, int, int], ...] = (("shard", 0, 4), ("shard", 1, 12), ("worker", 3, 7))
TEMPLATE = {
    "spec": {"initContainers": [{"name": "fetch", "image": "x"}],
        "containers": [{"name": "logs", "image": "y"},
        {"name": "worker", "image": "me/digits:1", "imagePullPolicy": "Always", "command": ["uv", "run", "python", "train.py"],
        "env": [{"name": "PATH", "value": "/venv/bin"}, {"name": "TOKEN", "value": "t"}],
        "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 4, "memory": "8Gi"}, "requests": {"cpu": "500m"}},
        "securityContext": {"runAsUser": 7, "capabilities": {"add": ["IPC_LOCK"]}}}]},
}  # fmt: skip


def pod(role: Role, index: int, number: int, **spec: Any) -> dict[str, Any]:
    snapshot = replace(job(workers={"template": TEMPLATE}, **spec), uid="0a1b2c3d-4e5f")
    process = CreateProcess(role, index, number, 5, "the-pod", pinned=Pinned(runtime_image=IMAGE, container="worker", key=3))
    return render.pod(snapshot, process)


def secret(encrypted: bool = False, workers: int = 0) -> dict[str, bytes]:
    made = render.key_secret(job(), 1, RUN, certificates(2, workers) if encrypted else {})
    return {name: base64.b64decode(value) for name, value in made["data"].items()}


def test_the_secret_of_a_run() -> None:
    made = render.key_secret(replace(job(), uid="0a1b2c3d-4e5f"), 2, RUN, {})
    assert (made["kind"], made["type"], made["immutable"]) == ("Secret", "Opaque", True)
    assert made["metadata"]["name"] == "job-key-0a1b2c3d-2"
    assert made["metadata"]["ownerReferences"][0]["uid"] == "0a1b2c3d-4e5f"
    assert made["metadata"]["labels"]["psjob.dev/job-name"] == "job"
    data = secret()
    blocks = {f"{name}.{side}" for name in ("workers", "shards") for side in ("inner", "outer")}
    assert set(data) == {"workers", "shards", "questions"} | blocks
    assert all(name in contract.KEYS for name in data)
    assert {name: bytes.fromhex(data[name].decode()) for name in RUN} == RUN
    assert all(len(data[name]) == keys.BLOCK for name in blocks)


@pytest.mark.parametrize("injection", ["Auto", "None"])
@pytest.mark.parametrize(("role", "index", "number"), ROLES)
def test_only_the_init_container_sees_the_secret(role: Role, index: int, number: int, injection: str) -> None:
    spec = pod(role, index, number, injection=injection)["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["psjob-secret"] == {"name": "psjob-secret", "secret": {"secretName": "job-key-0a1b2c3d-3"}}
    assert volumes["psjob-keys"] == {"name": "psjob-keys", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    first, *others = [*spec["initContainers"], *spec["containers"]]
    mounts = {mount["name"]: mount for mount in first["volumeMounts"]}
    assert mounts["psjob-secret"] == {"name": "psjob-secret", "mountPath": "/psjob-secret", "readOnly": True}
    assert mounts["psjob-keys"] == {"name": "psjob-keys", "mountPath": "/psjob-keys"}
    trained = "shard" if role == "shard" else "worker"
    for container in others:
        names = {mount["name"]: mount for mount in container.get("volumeMounts") or []}
        assert "psjob-secret" not in names, container["name"]
        assert ("psjob-keys" in names) == (container["name"] == trained), container["name"]
        if container["name"] == trained:
            assert names["psjob-keys"] == {"name": "psjob-keys", "mountPath": "/psjob-keys", "readOnly": True}
            assert {"name": contract.ENV_KEYS, "value": "/psjob-keys/keys"} in container["env"]
    told = {item["name"]: item["value"] for item in first["env"] if item["name"].startswith("PSJOB_")}
    counter = contract.ENV_START if role == "worker" else contract.ENV_ATTEMPT
    assert told == {contract.ENV_ROLE: role, contract.ENV_INDEX: str(index), counter: str(number)}


def test_an_image_that_has_psjob_derives_with_its_own_python_and_no_more_rights() -> None:
    (first, *_) = pod("worker", 0, 1, injection="None")["spec"]["initContainers"]
    assert (first["name"], first["image"], first["imagePullPolicy"]) == ("psjob-derive", "me/digits:1", "Always")
    assert first["terminationMessagePolicy"] == "FallbackToLogsOnError", "the status tells why it ended"
    derive = ["-m", "psjob.process.derive", "--from", "/psjob-secret", "--to", "/psjob-keys/keys"]
    assert first["command"] == ["uv", "run", "python", *derive]
    assert {"name": "PATH", "value": "/venv/bin"} in first["env"] and "TOKEN" not in str(first["env"])
    assert first["resources"] == {"limits": {"cpu": 4, "memory": "8Gi"}, "requests": {"cpu": "500m"}}
    assert first["securityContext"] == {
        "runAsUser": 7,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (shard, *_) = pod("shard", 1, 1, injection="None")["spec"]["initContainers"]
    assert shard["command"] == first["command"] and shard["image"] == "me/digits:1"


def busybox() -> str:
    found = shutil.which("busybox")
    assert found is not None, "busybox runs the script here as in a pod: apt-get install busybox"
    return found


def derive(folder: Path, environment: dict[str, str], data: dict[str, bytes], to: str = "keys") -> subprocess.CompletedProcess[str]:
    source = folder / "secret"
    source.mkdir()
    for name, value in data.items():
        (source / name).write_bytes(value)
    script = f"busybox={busybox()} from={source} to={folder / to}\n{DERIVE}"
    # Nothing is on the PATH: the script may call no program except busybox.
    return subprocess.run([busybox(), "sh", "-c", script], env={"PATH": "/none", **environment}, capture_output=True, text=True, timeout=60)
