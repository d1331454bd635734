"""Pods: the user's template comes through untouched, and what psjob adds is exactly what the design says.

- Which Python a shard runs, as whom, and with which of the worker's variables.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from psjob_operator import contract, render
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.render.objects import LABEL_INDEX, LABEL_JOB, LABEL_NUMBER, LABEL_ROLE
from psjob_operator.render.pod import SHELL
from psjob_operator.render.shard import HOME_OF_ROOT, interpreter
from tests.unit.api_manifest import MANY_NODES, MY_CLAIM
from tests.unit.plan_given import job
from tests.unit.rendered import IMAGE, PINNED, RICH, rich, shard


def worker(snapshot: ObservedState, index: int = 1, number: int = 3) -> dict[str, Any]:
    name = f"job-worker-{index}-r{number}"
    return render.pod(snapshot, CreateProcess("worker", index, number, 2, name, pinned=PINNED))


def env(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if entry["name"].startswith("PSJOB_")}


def without_ours(pod: dict[str, Any], name: str) -> dict[str, Any]:
    """The pod with everything that psjob adds taken away."""
    pod = copy.deepcopy(pod)
    spec = pod["spec"]
    for key in ("restartPolicy", "hostname", "subdomain", "automountServiceAccountToken", "enableServiceLinks"):
        spec.pop(key)
    for key in ("initContainers", "volumes"):
        spec[key] = [item for item in spec[key] if not item["name"].startswith("psjob-")]
    container = next(item for item in spec["containers"] if item["name"] == name)
    container.pop("terminationMessagePolicy")
    container["env"] = [item for item in container["env"] if not item["name"].startswith("PSJOB_")]
    container["volumeMounts"] = [item for item in container["volumeMounts"] if not item["name"].startswith("psjob-")]
    assert container["command"][:4] == ["/psjob/bin/sh", "-c", SHELL, "psjob"]
    container["command"] = container["command"][4:]
    labels = {key: value for key, value in pod["metadata"]["labels"].items() if "psjob.dev/" not in key and "kubernetes.io/" not in key}
    annotations = pod["metadata"]["annotations"]
    assert annotations.pop("psjob.dev/container") == annotations.pop("kubectl.kubernetes.io/default-container") == name
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def test_the_template_comes_through_byte_for_byte() -> None:
    snapshot = rich()
    made = worker(snapshot)
    assert json.dumps(without_ours(made, "worker"), sort_keys=True) == json.dumps(RICH, sort_keys=True)
    assert list(made["spec"]["containers"][1])[:4] == ["name", "image", "imagePullPolicy", "command"], "also in its order"
    assert snapshot.spec.workers.template == RICH, "and is not changed in place"


def test_a_worker_is_told_who_it_is() -> None:
    made = worker(rich())
    container = made["spec"]["containers"][1]
    assert env(container) == {
        "PSJOB_ROLE": "worker",
        "PSJOB_INDEX": "1",
        "PSJOB_RUN": "run-1",
        "PSJOB_CONFIG": "/psjob-config/config.json",
        "PSJOB_POD": "job-worker-1-r3",
        "PSJOB_KEYS": "/psjob-keys/keys",
        "PSJOB_START": "3",
    }
    assert container["env"][0]["name"] == "PSJOB_ROLE", "so that the user's variables may refer to ours"
    assert container["args"] == ["--lr", "0.1", "$(PSJOB_INDEX)"]
    labels = made["metadata"]["labels"]
    assert (labels[LABEL_JOB], labels[LABEL_ROLE], labels[LABEL_INDEX], labels[LABEL_NUMBER]) == ("job", "worker", "1", "3")
    assert (labels["psjob.dev/start"], labels["psjob.dev/term"], labels["app.kubernetes.io/component"]) == ("3", "2", "worker")
    assert made["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "psjob.dev/v1alpha1",
            "kind": "PSTrainingJob",
            "name": "job",
            "uid": "run-1",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    assert made["spec"]["restartPolicy"] == "Never" and made["spec"]["hostname"] == "job-worker-1"
    assert made["spec"]["automountServiceAccountToken"] is False and made["spec"]["enableServiceLinks"] is False
    assert "psjob-checkpoints" not in str(made)


@pytest.mark.parametrize(
    ("processes", "limit", "several"), [(None, 8, 1), (1, 8, 1), ("auto", None, 1), ("auto", 1, 1), ("auto", 8, 8), (3, None, 3)]
)
def test_a_worker_of_several_processes_is_started_by_the_agent(processes: int | str | None, limit: int | None, several: int) -> None:
    template = copy.deepcopy(RICH)
    template["spec"]["containers"][1]["resources"] = {} if limit is None else {"limits": {"nvidia.com/gpu": limit}}
    command = list(template["spec"]["containers"][1]["command"])
    laid = {} if processes is None else {"processes": processes}
    plain = worker(job(injection="None", workers={"template": template, **laid}))["spec"]["containers"][1]
    injected = worker(job(workers={"template": template, **laid}))["spec"]["containers"][1]
    agent = ["/opt/conda/bin/python3.11", "-m", "psjob.agent"] if several > 1 else []
    assert plain["command"] == [*agent, *command] and injected["command"][4:] == [*agent, *command]
    assert plain["args"] == template["spec"]["containers"][1]["args"]
    assert env(plain).get("PSJOB_PROCESSES") == (str(several) if several > 1 else None)


def test_what_the_user_says_of_tokens_and_messages_holds() -> None:
    template = copy.deepcopy(RICH)
    template["spec"] |= {"automountServiceAccountToken": True, "enableServiceLinks": True}
    template["spec"]["containers"][1]["terminationMessagePolicy"] = "File"
    made = worker(job(workers={"template": template}))["spec"]
    assert made["automountServiceAccountToken"] and made["enableServiceLinks"]
    assert made["containers"][1]["terminationMessagePolicy"] == "File"


def test_the_library_is_injected_first() -> None:
    spec = worker(rich())["spec"]
    first = spec["initContainers"][0]
    assert first["name"] == "psjob-inject" and first["image"] == IMAGE
    assert first["command"][:3] == ["/psjob-runtime/bin/busybox", "sh", "-c"] and "cp -R /psjob-runtime/. /psjob " in first["command"][3]
    security = first["securityContext"]
    assert security["runAsNonRoot"] and not security["allowPrivilegeEscalation"] and security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"} and "runAsUser" not in security
    mounts = {mount["name"]: mount for mount in spec["containers"][1]["volumeMounts"]}
    assert mounts["psjob-runtime"] == {"name": "psjob-runtime", "mountPath": "/psjob", "readOnly": True}
    assert mounts["psjob-config"] == {"name": "psjob-config", "mountPath": "/psjob-config", "readOnly": True}
    assert "subPath" not in str(mounts), "a file mounted by subPath would not follow changes"
    assert "volumeMounts" not in spec["containers"][0], "sidecars are left alone"


@pytest.mark.parametrize(
    ("resources", "asked"),
    [
        ({}, {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"}}),
        ({"requests": {"memory": "2Gi"}}, {"requests": {"memory": "2Gi"}}),
        ({"limits": {"cpu": 4, "nvidia.com/gpu": 1}, "requests": {"cpu": 2}}, {"requests": {"cpu": 2}, "limits": {"cpu": 4}}),
        ({"limits": {"nvidia.com/gpu": 1}}, {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"}}),
    ],
)
def test_the_init_container_asks_for_what_the_container_asks_for(resources: dict[str, Any], asked: dict[str, Any]) -> None:
    """A limit range's least memory of a container, or a quota of what has none, would refuse the pod for it."""
    template = copy.deepcopy(RICH)
    template["spec"]["containers"][1]["resources"] = resources
    assert worker(job(workers={"template": template}))["spec"]["initContainers"][0]["resources"] == asked


@pytest.mark.parametrize(
    ("security", "non_root", "seccomp"),
    [({}, True, True), ({"runAsUser": 1000, "seccompProfile": {"type": "Localhost"}}, True, False), ({"runAsUser": 0}, False, True)],
)
def test_the_init_container_takes_the_pods_user(security: dict[str, Any], non_root: bool, seccomp: bool) -> None:
    template = copy.deepcopy(RICH)
    template["spec"]["securityContext"] = security
    made = worker(job(workers={"template": template}))["spec"]["initContainers"][0]["securityContext"]
    assert ("runAsNonRoot" in made, "seccompProfile" in made) == (non_root, seccomp)


def test_without_injection_the_command_is_the_users() -> None:
    spec = worker(rich(injection="None"))["spec"]
    assert spec["containers"][1]["command"] == RICH["spec"]["containers"][1]["command"]
    assert [container["name"] for container in spec["initContainers"]] == ["psjob-derive", "fetch", "logs"]
    assert {volume["name"] for volume in spec["volumes"]} == {"data", "shm", "psjob-config", "psjob-secret", "psjob-keys"}
    assert shard(rich(injection="None"))["spec"]["containers"][0]["command"] == ["/opt/conda/bin/python3.11", "-m", "psjob.shard"]


# ---- shards ------------------------------------------------------------------------------------------------------------------------


def test_a_shard_takes_image_and_user_and_no_more() -> None:
    made = shard(rich())
    spec = made["spec"]
    container = spec["containers"][0]
    assert (container["name"], container["image"], container["imagePullPolicy"]) == ("shard", "me/gpu:1", "Always")
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert container["command"][4:] == ["/opt/conda/bin/python3.11", "-m", "psjob.shard"]
    assert container["resources"] == {"requests": {"cpu": "500m", "memory": "1Gi"}}
    assert spec["securityContext"] == {
        "runAsUser": 1000,
        "fsGroup": 2000,
        "supplementalGroups": [7],
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "runAsGroup": 3000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    for foreign in ("nvidia", "serviceAccountName", "trainer", "IPC_LOCK", "TOKEN", "a100", "team"):
        assert foreign not in json.dumps(made).replace("run-1", ""), foreign
    assert env(container) == {
        "PSJOB_ROLE": "shard",
        "PSJOB_INDEX": "1",
        "PSJOB_RUN": "run-1",
        "PSJOB_CONFIG": "/psjob-config/config.json",
        "PSJOB_POD": "job-shard-1-a4",
        "PSJOB_KEYS": "/psjob-keys/keys",
        "PSJOB_ATTEMPT": "4",
        "PSJOB_VIEW": "5",
        "PSJOB_CHECKPOINTS": "/psjob-checkpoints",
    }
    assert env(shard(rich(), known=True)["spec"]["containers"][0])["PSJOB_MIN_STEP"] == "1"
    tls = PINNED.model_copy(update={"encryption": "tls"})
    encrypted = render.pod(rich(), CreateProcess("shard", 1, 4, 5, "job-shard-1-a4", pinned=tls))
    assert env(encrypted["spec"]["containers"][0])["PSJOB_ENCRYPTION"] == "tls"
    assert (spec["hostname"], spec["subdomain"]) == ("job-shard-1", "job-shards")
    labels = made["metadata"]["labels"]
    assert (labels["psjob.dev/attempt"], labels["psjob.dev/term"], labels[LABEL_NUMBER]) == ("4", "5", "4")


SCHEDULED = [("priorityClassName", "high"), ("preemptionPolicy", "Never"), ("schedulerName", "volcano"), ("runtimeClassName", "gvisor")]


@pytest.mark.parametrize(("name", "value"), SCHEDULED)
def test_a_shard_runs_when_its_workers_do(name: str, value: str) -> None:
    container = {"name": "worker", "image": "a", "command": ["python", "a.py"]}
    workers = {"template": {"spec": {name: value, "containers": [container]}}}
    assert shard(job(workers=workers))["spec"][name] == value
    assert name not in shard(job())["spec"]
    own = {"replicas": 2, "template": {"spec": {name: "other"}}}
    assert shard(job(workers=workers, shards=own))["spec"][name] == "other", "the shards' own word holds"
    taken = {"replicas": 2, "template": {"spec": {name: None}}}
    assert name not in shard(job(workers=workers, shards=taken))["spec"]


@pytest.mark.parametrize("asked", [{"limits": {"nvidia.com/gpu": 1}}, {"requests": {"amd.com/gpu": 1}}, {"limits": {"cpu": 1}}])
def test_a_runtime_class_of_workers_with_devices_is_not_the_shards(asked: dict[str, Any]) -> None:
    container = {"name": "worker", "image": "a", "command": ["python", "a.py"], "resources": asked}
    made = shard(
        job(workers={"template": {"spec": {"runtimeClassName": "nvidia", "priorityClassName": "high", "containers": [container]}}})
    )
    assert made["spec"].get("runtimeClassName") == ("nvidia" if "cpu" in asked.get("limits", {}) else None)
    assert made["spec"]["priorityClassName"] == "high"


def test_a_shard_is_guarded() -> None:
    spec = shard(job(shards={"progressDeadlineSeconds": 10}))["spec"]
    container = spec["containers"][0]
    assert container["startupProbe"]["httpGet"] == {"path": contract.STARTED_PATH, "port": contract.STATUS_PORT}
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] > 600
    live = container["livenessProbe"]
    assert live["httpGet"]["path"] == contract.HEALTH_PATH and live["terminationGracePeriodSeconds"] == 1
    assert {(it["key"], it["tolerationSeconds"]) for it in spec["tolerations"]} == {
        ("node.kubernetes.io/not-ready", 30),
        ("node.kubernetes.io/unreachable", 30),
    }
    # Where nothing names a user, a shard is nobody, under the restricted level.
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.parametrize(
    "context",
    [
        {"runAsUser": 0},
        {"runAsNonRoot": False, "runAsUser": 0},
        {"sysctls": [{"name": "net.core.somaxconn", "value": "1"}], "seLinuxOptions": {"type": "spc_t"}, "windowsOptions": {}},
        {"seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"}},
    ],
)
def test_a_shard_takes_no_powers_of_its_workers(context: dict[str, Any]) -> None:
    snapshot = job()
    pod = snapshot.spec.workers.template["spec"]
    pod["securityContext"] = context
    pod["containers"][0]["securityContext"] = {**context, "privileged": True, "procMount": "Unmasked"}
    pod |= {"hostPID": True, "hostNetwork": True, "nodeName": "n", "serviceAccountName": "root"}
    assert shard(snapshot) == shard(job()), "as of workers that ask for nothing"


@pytest.mark.parametrize(
    ("over", "user"),
    [
        ({"securityContext": None}, {"runAsNonRoot": True}),
        ({"securityContext": {"runAsUser": 0, "runAsNonRoot": False}}, {"runAsUser": 0, "runAsNonRoot": False}),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, {"runAsNonRoot": True, "runAsUser": 65532}),
    ],
)
def test_a_shards_template_chooses_the_user_and_no_powers(over: dict[str, Any], user: dict[str, Any]) -> None:
    power = {"privileged": True, "allowPrivilegeEscalation": True, "capabilities": {"add": ["SYS_ADMIN", "NET_BIND_SERVICE"]}}
    containers = [{"name": "shard", "securityContext": None}, {"name": "log", "image": "i", "securityContext": power}]
    spec = shard(job(shards={"template": {"spec": {**over, "containers": containers, "initContainers": [{"name": "a"}]}}}))["spec"]
    assert user.items() <= spec["securityContext"].items() and spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    powerless = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    found = {it["name"]: it["securityContext"] for it in [*spec["containers"], *spec["initContainers"]]}
    bound = {**powerless, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}
    assert (found["shard"], found["a"], found["log"]) == (powerless, powerless, bound)


def test_a_shards_image_is_read_only_but_for_what_is_mounted() -> None:
    spec = shard(job())["spec"]
    container = spec["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    writable = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/psjob-checkpoints": "psjob-checkpoints", "/tmp": "psjob-scratch"}
    assert {"name": "psjob-scratch", "emptyDir": {}} in spec["volumes"]
    assert [it["securityContext"]["readOnlyRootFilesystem"] for it in spec["initContainers"]] == [True]
    for security in ({"readOnlyRootFilesystem": False}, {}):
        snapshot = job()
        snapshot.spec.workers.template["spec"]["containers"][0]["securityContext"] = security
        assert shard(snapshot) == shard(job()), "whatever the workers' is"


def test_a_shards_template_may_have_its_image_written_to_and_a_tmp_of_its_own() -> None:
    own = {"name": "shard", "securityContext": {"readOnlyRootFilesystem": False}, "volumeMounts": [{"name": "big", "mountPath": "/tmp"}]}
    laid = {"spec": {"containers": [own], "volumes": [{"name": "big", "emptyDir": {"sizeLimit": "9Gi"}}]}}
    container = shard(job(shards={"template": laid}))["spec"]["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is False
    assert [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"] == ["big"]


@pytest.mark.parametrize("timeout", [2, 3, 5, 10, 60, 3600])
def test_the_liveness_probe_takes_about_the_progress_deadline(timeout: int) -> None:
    live = shard(job(shards={"progressDeadlineSeconds": timeout}))["spec"]["containers"][0]["livenessProbe"]
    assert timeout / 2 <= live["periodSeconds"] * live["failureThreshold"] <= timeout
    assert 1 <= live["timeoutSeconds"] <= live["periodSeconds"] <= 30


@pytest.mark.parametrize(
    ("checkpoint", "source", "together"),
    [
        ({}, {"persistentVolumeClaim": {"claimName": "job-checkpoints"}}, True),
        (MANY_NODES, {"persistentVolumeClaim": {"claimName": "job-checkpoints"}}, False),
        (MY_CLAIM, {"persistentVolumeClaim": {"claimName": "mine"}}, True),
        ({"volume": {"nfs": {"server": "s", "path": "/p"}}}, {"nfs": {"server": "s", "path": "/p"}}, False),
        ({"disabled": True}, {"emptyDir": {}}, False),
        ({"disabled": True, "volume": {"emptyDir": {"sizeLimit": "1Gi"}}}, {"emptyDir": {"sizeLimit": "1Gi"}}, False),
    ],
)
def test_where_checkpoints_lie(checkpoint: dict[str, Any], source: dict[str, Any], together: bool) -> None:
    spec = shard(job(checkpoint=checkpoint))["spec"]
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "psjob-checkpoints")
    assert volume == {"name": "psjob-checkpoints", **source}
    assert {"name": "psjob-checkpoints", "mountPath": "/psjob-checkpoints"} in spec["containers"][0]["volumeMounts"]
    terms = spec.get("affinity", {}).get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    assert bool(terms) == together
    if together:
        assert terms[0]["topologyKey"] == "kubernetes.io/hostname"
        assert terms[0]["labelSelector"]["matchLabels"] == render.service(job())["spec"]["selector"]


OVER = yaml.safe_load("""
metadata: {labels: {tier: shards}, annotations: {a: b}}
spec:
  nodeSelector: {disk: fast}
  priorityClassName: shards
  tolerations: [{key: spot, operator: Exists}]
  affinity:
    podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: []}
    podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone, labelSelector: {}}]}
  terminationGracePeriodSeconds: 300
  volumes: [{name: scratch, emptyDir: {}}]
  containers:
  - name: shard
    image: me/cpu:1
    env: [{name: MALLOC, value: jemalloc}]
    resources: {requests: {memory: 64Gi}, limits: {memory: 64Gi}}
    volumeMounts: [{name: scratch, mountPath: /scratch}]
    livenessProbe: {periodSeconds: 7}
  - {name: metrics, image: exporter}
""")


def test_the_shards_template_is_laid_over() -> None:
    made = shard(rich(shards={"template": OVER}))
    spec = made["spec"]
    container = spec["containers"][0]
    assert made["metadata"]["labels"]["tier"] == "shards" and made["metadata"]["annotations"]["a"] == "b"
    assert spec["nodeSelector"] == {"disk": "fast"} and spec["priorityClassName"] == "shards"
    assert [it["key"] for it in spec["tolerations"]] == ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "spot"]
    assert len(spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]) == 2, "one node stays one node"
    assert spec["terminationGracePeriodSeconds"] == 300
    assert container["image"] == "me/cpu:1" and container["command"][4:] == ["/opt/conda/bin/python3.11", "-m", "psjob.shard"]
    assert container["resources"] == {"requests": {"cpu": "500m", "memory": "64Gi"}, "limits": {"memory": "64Gi"}}
    assert container["livenessProbe"]["periodSeconds"] == 7 and container["livenessProbe"]["httpGet"]["path"] == contract.HEALTH_PATH
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
        "/psjob-checkpoints",
        "/tmp",
        "/scratch",
        "/psjob-config",
        "/psjob",
        "/psjob-keys",
    }
    assert container["env"][-1] == {"name": "MALLOC", "value": "jemalloc"} and container["env"][0]["name"] == "PSJOB_ROLE"
    powerless = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert spec["containers"][1] == {"name": "metrics", "image": "exporter", "securityContext": powerless}
    renamed = shard(job(shards={"template": {"spec": {"containers": [{"name": "mine", "resources": {}}]}}}))["spec"]["containers"]
    assert [it["name"] for it in renamed] == ["mine"] and renamed[0]["command"]


def test_a_template_that_has_its_last_message_read_elsewhere_is_told_to_the_runtime() -> None:
    snapshot = rich()
    container = next(item for item in snapshot.spec.workers.template["spec"]["containers"] if item["name"] == "worker")
    container["terminationMessagePath"] = "/tmp/last-words"
    made = next(item for item in worker(snapshot)["spec"]["containers"] if item["name"] == "worker")
    told = {item["name"]: item.get("value") for item in made["env"]}
    assert told["PSJOB_TERMINATION_LOG"] == "/tmp/last-words"


HOME = f"{HOME_OF_ROOT}/.venv/bin"


def of(command: list[str], pod: dict[str, Any] | None = None, **container: Any) -> ObservedState:
    """A job whose workers run `command`."""
    trained = {"name": "only", "image": "i", "command": command, **container}
    return job(workers={"template": {"spec": {**(pod or {}), "containers": [trained]}}})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py", "python"),
        ("/usr/bin/python3.12 x", "/usr/bin/python3.12"),
        ("/opt/conda/bin/python -u train.py", "/opt/conda/bin/python"),
        (f"{HOME}/python train.py", f"{HOME}/python"),
        (".venv/bin/python train.py", ".venv/bin/python"),
        ("/usr/bin/env python train.py", "python"),
        ("env -u X A=1 python3.11 train.py", "python3"),
        ("env A=1 python3.11 train.py", "python3.11"),
        ("tini -s -- /opt/venv/bin/python train.py", "/opt/venv/bin/python"),
        ("uv run python train.py", "uv run python"),
        ("uv run train.py --lr 1", "uv run python"),
        ("/usr/local/bin/uv run --frozen --extra gpu -m train.main", "/usr/local/bin/uv run --frozen --extra gpu python"),
        ("uv run --python python3.12 --project /app python -u train.py", "uv run --python python3.12 --project /app python"),
        ("uv run --script train.py", "python3"),
        ("uv run train", "python3"),
        ("conda run -n python3 --no-capture-output python train.py", "conda run -n python3 --no-capture-output python"),
        ("/opt/conda/bin/conda run -p /envs/a torchrun train.py", "/opt/conda/bin/conda run -p /envs/a python"),
        ("micromamba run -n a python3 -m train", "micromamba run -n a python3"),
        ("poetry run python train.py", "poetry run python"),
        ("/opt/conda/bin/torchrun train.py", "/opt/conda/bin/python"),
        ("/opt/conda/envs/a/bin/my-train --fast", "/opt/conda/envs/a/bin/python"),
        ("/srv/app/.venv/bin/accelerate launch train.py", "/srv/app/.venv/bin/python"),
        ("torchrun train.py", "python3"),
        ("/usr/local/bin/torchrun train.py", "python3"),
        ("/app/venv/start.sh", "python3"),
        ("pythonic", "python3"),
        ("/bin/sh -c x", "python3"),
        ("env", "python3"),
    ],
)
def test_a_shard_runs_the_workers_python(command: str, words: str) -> None:
    assert " ".join(interpreter(command.split()).words) == words
    container = shard(of(command.split()))["spec"]["containers"][0]
    assert container["command"][4:] == [*words.split(), "-m", "psjob.shard"]


VARIABLES = [
    {"name": "PATH", "value": "$(TOOLS)/bin:/usr/bin"},
    {"name": "TOOLS", "value": "$(BASE)/tools"},
    {"name": "BASE", "value": "/opt"},
    {"name": "VIRTUAL_ENV", "value": "/opt/venv"},
    {"name": "CONDA_PREFIX", "value": "/opt/conda"},
    {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    {"name": "LD_LIBRARY_PATH", "value": "/opt/lib"},
    {"name": "UV_NO_SYNC", "value": "1"},
    {"name": "UV_INDEX_URL", "value": "https://user:secret@packages.example/simple"},
    {"name": "UV_PUBLISH_TOKEN", "value": "secret"},
    {"name": "UV_INDEX_PRIVATE_PASSWORD", "value": "secret"},
    {"name": "CONDA_TOKEN", "value": "secret"},
    {"name": "CONDA_CHANNEL_ALIAS", "value": "https://conda.example/t/secret/"},
    {"name": "MAMBA_AUTH", "value": "secret"},
    {"name": "PYTHON_KEYRING_PASSWORD", "value": "secret"},
    {"name": "HOME", "value": "/tmp"},
    {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
    {"name": "WANDB_API_KEY", "value": "secret"},
    {"name": "MYPATH", "value": "x"},
]


def test_a_shard_has_the_variables_that_its_python_is_found_by_and_no_others() -> None:
    snapshot = of(["python"], env=VARIABLES, workingDir="/app")
    container = shard(snapshot)["spec"]["containers"][0]
    given = {item["name"]: item["value"] for item in container["env"] if not item["name"].startswith("PSJOB_")}
    assert list(given) == ["PATH", "TOOLS", "BASE", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "UV_NO_SYNC", "HOME"]
    assert given["PATH"] == "$(TOOLS)/bin:/usr/bin" and container["workingDir"] == "/app"
    over = {"spec": {"containers": [{"name": "shard", "env": [{"name": "PATH", "value": "/mine"}]}]}}
    laid = shard(job(workers={"template": snapshot.spec.workers.template}, shards={"template": over}))["spec"]["containers"][0]
    assert [item["value"] for item in laid["env"] if item["name"] == "PATH"] == ["/mine"]


@pytest.mark.parametrize("command", [f"{HOME}/python train.py", "uv run python train.py", f"{HOME_OF_ROOT}/.local/bin/uv run train.py"])
def test_a_python_that_only_the_images_user_can_start_is_started_by_that_user(command: str) -> None:
    security = shard(of(command.split()))["spec"]["securityContext"]
    assert not {"runAsUser", "runAsGroup", "runAsNonRoot"} & security.keys()
    assert security["fsGroup"] == 65532 and security["seccompProfile"] == {"type": "RuntimeDefault"}
    named = shard(of(command.split(), {"securityContext": {"runAsUser": 1000}}))["spec"]["securityContext"]
    assert named["runAsUser"] == 1000, "who is named holds"
    container = shard(of(command.split()))["spec"]["containers"][0]["securityContext"]
    runner = "uv" in command
    assert container.pop("readOnlyRootFilesystem", False) is not runner, "a runner writes into the image"
    assert container == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_a_namespace_that_gives_the_user_is_not_told_one() -> None:
    """OpenShift refuses any number beyond the namespace's range, and gives one of it where none is asked for."""
    security = shard(job(), user=None)["spec"]["securityContext"]
    assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "fsGroup" not in shard(of([f"{HOME}/python"]), user=None)["spec"]["securityContext"]
    assert shard(rich(), user=None)["spec"]["securityContext"]["fsGroup"] == 2000, "what the job names holds"


def test_another_user_may_be_chosen_for_all_shards() -> None:
    security = shard(job(), user=1234)["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (1234, 1234, 1234)


@pytest.mark.parametrize(("mount", "folder"), [("/data", "/app/src"), ("/app", None), ("/app/src", None), ("/app/sr", "/app/src")])
def test_a_shard_starts_where_the_worker_does_unless_that_is_a_volume_of_the_worker(mount: str, folder: str | None) -> None:
    snapshot = of(["python"], workingDir="/app/src", volumeMounts=[{"name": "v", "mountPath": mount}])
    assert shard(snapshot)["spec"]["containers"][0].get("workingDir") == folder
