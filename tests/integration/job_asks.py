"""What templates of jobs ask for, each with its line in the table of docs/security.md, and jobs beside the Pod Security Standards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hack.cluster.paths import REPO
from tests.unit.api_manifest import GOOD, changed

CLAIM = {"kind": "PersistentVolumeClaim", "name": "data"}


@dataclass(frozen=True)
class Ask:
    """One thing that a template asks for; `row` is its line of the table."""

    row: str
    pod: Mapping[str, Any] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)


def volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "v", **source}]}


def begun(**source: Any) -> dict[str, Any]:
    """The source of a volume that begins as a copy of another."""
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, **source}
    return {"ephemeral": {"volumeClaimTemplate": {"spec": spec}}}


def secure(**context: Any) -> dict[str, Any]:
    return {"securityContext": context}


MAIN: dict[str, Ask] = {
    "hostpath": Ask("baseline", volume(hostPath={"path": "/etc"})),
    "hostnetwork": Ask("baseline", {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}),
    "hostpid": Ask("baseline", {"hostPID": True}),
    "hostipc": Ask("baseline", {"hostIPC": True}),
    "privileged": Ask("baseline", {}, secure(privileged=True)),
    "init": Ask("baseline", {"initContainers": [{"name": "i", "image": "i", **secure(privileged=True)}]}),
    "capability": Ask("baseline", {}, secure(capabilities={"add": ["CHOWN", "SYS_ADMIN"]})),
    "hostport": Ask("baseline", {}, {"ports": [{"containerPort": 80, "hostPort": 80}]}),
}
"""Beyond the baseline standard; looked at in every template, of every user, by every way."""
BEYOND_BASELINE: dict[str, Ask] = {
    **MAIN,
    "seccomp": Ask("baseline", secure(seccompProfile={"type": "Unconfined"})),
    "apparmor": Ask("baseline", {}, secure(appArmorProfile={"type": "Unconfined"})),
    "selinux": Ask("baseline", secure(seLinuxOptions={"type": "spc_t"})),
    "selinux-user": Ask("baseline", secure(seLinuxOptions={"user": "system_u"})),
    "sysctl": Ask("baseline", secure(sysctls=[{"name": "kernel.msgmax", "value": "65536"}])),
    "probe": Ask("baseline", {}, {"livenessProbe": {"httpGet": {"host": "169.254.169.254", "port": 80}}}),
    "hook": Ask("baseline", {}, {"lifecycle": {"preStop": {"httpGet": {"host": "169.254.169.254", "port": 80}}}}),
    "windows": Ask(
        "baseline",
        {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet", **secure(windowsOptions={"hostProcess": True})},
    ),
}
SINCE_34 = {"probe", "hook"}
"""What Pod Security of Kubernetes 1.33 does not refuse yet."""
UNMASKED = Ask("baseline", {}, secure(procMount="Unmasked"))
"""Not among those above: the API server takes it only in user namespaces."""
OTHER_RIGHTS: dict[str, Ask] = {
    "account": Ask("serviceAccountName", {"serviceAccountName": "trainer"}),
    "account-old": Ask("serviceAccountName", {"serviceAccount": "trainer"}),
    "claim": Ask("claim", volume(persistentVolumeClaim={"claimName": "data"})),
    "claim-copy": Ask("claim", volume(**begun(dataSource=CLAIM))),
    "claim-copy-new": Ask("claim", volume(**begun(dataSourceRef=CLAIM))),
    "nodename": Ask("nodeName", {"nodeName": "n1"}),
}
OF_SHARDS: dict[str, Ask] = {
    "root": Ask("restricted", secure(runAsUser=0)),
    "maybe-root": Ask("restricted", {}, secure(runAsNonRoot=False)),
    "chown": Ask("restricted", {}, secure(capabilities={"add": ["CHOWN"]})),
    "escalation": Ask("restricted", {}, secure(allowPrivilegeEscalation=True)),
    "nfs": Ask("restricted", volume(nfs={"server": "nfs.example.com", "path": "/"})),
    "flex": Ask("restricted", volume(flexVolume={"driver": "example/driver"})),
}
PLAIN: dict[str, Ask] = {"plain": Ask("nothing")}
HARMLESS: dict[str, Ask] = {
    **PLAIN,
    "nulls": Ask(
        "nothing",
        {"hostIPC": None, "nodeName": None, "serviceAccountName": None, "securityContext": None},
        {"ports": None, "livenessProbe": None, **secure(privileged=None, capabilities=None, seccompProfile=None)},
    ),
    "null-volumes": Ask(
        "nothing",
        {
            "volumes": [
                {"name": "a", "ephemeral": None, "persistentVolumeClaim": None, "nfs": None},
                {"name": "b", **begun(dataSource=None, dataSourceRef=None)},
            ]
        },
    ),
    "default-account": Ask("nothing", {"serviceAccountName": "default"}),
    "secret": Ask("nothing", volume(secret={"secretName": "s"})),
    "token": Ask("nothing", volume(projected={"sources": [{"serviceAccountToken": {"path": "token"}}]})),
}


def manifest(name: str, where: str, ask: Ask) -> dict[str, Any]:
    """A job that asks for it in spec.workers.template or spec.shards.template."""
    at = f"spec.{where}.template.spec"
    container: dict[str, Any] = {"name": "shard"} if where == "shards" else GOOD["spec"]["workers"]["template"]["spec"]["containers"][0]
    pod = {**ask.pod, "containers": [{**container, **ask.container}]}
    return changed(GOOD, {"metadata.name": name, "spec.shards.replicas": 1, at: pod})


@dataclass(frozen=True)
class Job:
    """A manifest, its line of the table, and the path that a refusal must name."""

    row: str
    body: dict[str, Any]
    path: str


def _jobs() -> dict[str, Job]:
    found = {}
    for where in ("workers", "shards"):
        asks = {**MAIN, **OTHER_RIGHTS, **PLAIN, **(OF_SHARDS if where == "shards" else {})}
        for name, ask in asks.items():
            found[f"{where}-{name}"] = Job(ask.row, manifest(f"{where}-{name}", where, ask), f"spec.{where}.template")
    for name, row, volume in (
        ("hostpath", "baseline", {"hostPath": {"path": "/data"}}),
        ("source", "claim", {"persistentVolumeClaim": {"claimName": "data"}}),
        ("copy", "claim", begun(dataSourceRef=CLAIM)),
        ("nfs", "nothing", {"nfs": {"server": "nfs.example.com", "path": "/"}}),
    ):
        body = changed(GOOD, {"metadata.name": f"volume-{name}", "spec.checkpoint.volume": volume})
        found[f"volume-{name}"] = Job(row, body, "spec.checkpoint.volume")
    for name, row, source in (
        ("copy", "claim", {"dataSource": CLAIM}),
        ("copy-new", "claim", {"dataSourceRef": CLAIM}),
        ("snapshot", "nothing", {"dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "data"}}),
        ("class", "nothing", {"storageClassName": "fast"}),
    ):
        body = changed(GOOD, {"metadata.name": f"made-{name}", "spec.checkpoint.volumeClaimTemplate.spec": source})
        found[f"made-{name}"] = Job(row, body, "spec.checkpoint.volumeClaimTemplate")
    return found


JOBS_ASKING = _jobs()


# ---- the words of the Pod Security Standards ---------------------------------------------------------------------------------------


def safe(pod: Mapping[str, Any] | None = None, container: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A job whose workers meet the restricted standard, but for `pod` and `container`."""
    context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return manifest("safe", "workers", Ask("nothing", {**secure(**context), **(pod or {})}, {**secure(**own), **(container or {})}))


_OWN = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
BEYOND_RESTRICTED: dict[str, dict[str, Any]] = {
    "no context of the pod": safe({"securityContext": None}),
    "may be root": safe(secure(seccompProfile={"type": "RuntimeDefault"})),
    "says it may be root": safe(None, secure(**_OWN, runAsNonRoot=False)),
    "root": safe(secure(runAsNonRoot=True, runAsUser=0, seccompProfile={"type": "RuntimeDefault"})),
    "no seccomp": safe(secure(runAsNonRoot=True)),
    "no context of the container": safe(None, {"securityContext": None}),
    "may escalate": safe(None, secure(capabilities={"drop": ["ALL"]})),
    "drops nothing": safe(None, secure(allowPrivilegeEscalation=False)),
    "drops by another name": safe(None, secure(allowPrivilegeEscalation=False, capabilities={"drop": ["NET_RAW"]})),
    "adds": safe(None, secure(allowPrivilegeEscalation=False, capabilities={"drop": ["ALL"], "add": ["CHOWN"]})),
    "nfs": safe(volume(nfs={"server": "s", "path": "/"})),
    "init": safe({"initContainers": [{"name": "i", "image": "i"}]}),
}
WITHIN_RESTRICTED: dict[str, dict[str, Any]] = {
    "safe": safe(),
    "binds": safe(None, secure(allowPrivilegeEscalation=False, capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]})),
    "by the container": safe(secure(), secure(**_OWN, runAsNonRoot=True, seccompProfile={"type": "Localhost", "localhostProfile": "p"})),
    "volumes": safe({"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "configMap": {"name": "c"}}, {"name": "c"}]}),
    "sysctl": safe(
        secure(runAsNonRoot=True, seccompProfile={"type": "RuntimeDefault"}, sysctls=[{"name": "net.ipv4.tcp_syncookies", "value": "1"}])
    ),
}


def table() -> dict[str, dict[str, bool]]:
    """The table of docs/security.md: row -> user -> whether it passes."""
    page = (REPO / "docs" / "security.md").read_text()
    head, _, *lines = page[page.index("| asked for |") :].split("\n\n")[0].splitlines()
    users = [cell.strip() for cell in head.split("|")[3:-1]]
    rows: dict[str, dict[str, bool]] = {}
    for line in lines:
        first, _, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        assert set(cells) <= {"passes", "refused"}, line
        names = re.findall(r"`(nothing|serviceAccountName|claim|nodeName|baseline|restricted)`", first)
        rows[names[0]] = dict(zip(users, (cell == "passes" for cell in cells), strict=True))
    return rows
