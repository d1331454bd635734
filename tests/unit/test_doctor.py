"""What the doctor says of a machine and of a cluster: each line from both sides."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from psjob_client.cli.manifest_commands import documents
from psjob_client.doctor.findings import (
    GIB,
    MIB,
    ClaimFacts,
    ClusterFacts,
    Disk,
    Finding,
    Limit,
    MachineFacts,
    NodeFacts,
    Operator,
    Quota,
    StorageClass,
    judge_cluster,
    judge_machine,
)
from psjob_client.doctor.fitting import judge_fit, pod_groups
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.validate import validate_job
from tests.unit.api_manifest import GOOD, MANY_NODES, MY_CLAIM, changed

WELL = MachineFacts(
    python=(3, 11, 7), client="0.1.0", runtime="0.1.0", torch="2.15.0", cores=8, memory=16 * GIB, shm=8 * GIB, files=20_000, ports=28_000,
    loopback="", runs=Disk("/home/me", 50 * GIB, True), cache=Disk("/home/me/.cache", 50 * GIB, True),
)  # fmt: skip
WORKER = "spec.workers.template.spec.containers.0"
SIZES = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"nvidia.com/gpu": 1}}
RIGHTS = {("pstrainingjobs", "create"): True, ("pstrainingjobs", "get"): True, ("pods/log", "get"): True}
FINE = ClusterFacts(
    server="https://example.com",
    namespace="team-a",
    client="0.1.0",
    version="v1.37.2",
    namespace_there=True,
    served=True,
    operators=(Operator("psjob-system", "psjob", 1, "0.1.0"),),
    rights=RIGHTS,
    classes=(StorageClass("standard", "nfs.example.com", True),),
    quotas=(),
    limits=(),
    nodes=tuple(NodeFacts(f"n{i}", True, {"cpu": "8", "memory": "32Gi", "pods": "110", "nvidia.com/gpu": "4"}) for i in range(2)),
    pull_secrets=("regcred",),
    claims={},
)


POD = "spec.workers.template.spec"
DATA = {f"{POD}.volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]}
_OWN = {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "resources": {"requests": {"storage": "1Gi"}}}
FAST = {"name": "own", "ephemeral": {"volumeClaimTemplate": {"spec": _OWN}}}


def job(**change: Any) -> PSTrainingJob:
    made, problems = validate_job(
        changed(GOOD, {f"{WORKER}.resources": SIZES, **{key.replace("__", "."): value for key, value in change.items()}})
    )
    assert made is not None, problems
    return made


def line(findings: list[Finding], about: str) -> Finding:
    """The worst of the lines about it."""
    there = [finding for finding in findings if finding.about == about]
    assert there, [finding.about for finding in findings]
    return max(there, key=lambda finding: ("ok", "warning", "problem").index(finding.level))


def test_a_good_machine_and_a_good_cluster_have_nothing_but_ok() -> None:
    small = changed(GOOD, {})
    made, _ = validate_job(small)
    assert {finding.level for finding in judge_machine(WELL, made)} == {"ok"}
    assert {finding.level for finding in judge_cluster(FINE)} == {"ok"}
    wanted = job()
    assert {finding.level for finding in judge_fit(FINE, wanted, pod_groups(wanted, documents(wanted)))} == {"ok"}


@pytest.mark.parametrize(
    ("change", "about", "level", "words"),
    [
        ({"python": (3, 9, 1)}, "python", "problem", "3.9.1 3.11"),
        ({"runtime": None}, "psjob", "problem", "in a checkout of psjob: pip install './runtime[client]'"),
        ({"runtime": "0.0.9"}, "psjob", "problem", "0.0.9 both anew"),
        ({"torch": None}, "torch", "problem", "pip install torch"),
        ({"memory": 300 * MIB}, "memory", "problem", "300 MiB 700 MiB"),
        ({"memory": None}, "memory", "warning", "unknown"),
        ({"shm": 1 * MIB}, "/dev/shm", "warning", "1 MiB 64 MiB --shm-size"),
        ({"shm": None}, "/dev/shm", "warning", "transport: tcp"),
        ({"files": 256}, "open files", "warning", "256 1024 ulimit"),
        ({"loopback": "Cannot assign requested address"}, "ports", "problem", "lo up"),
        ({"runs": Disk("/x", 5 * MIB, True)}, "run folder", "problem", "5 MiB /x 100 MiB"),
        ({"runs": Disk("/x", 1 * GIB, True)}, "run folder", "warning", "1 GiB 2 GiB"),
        ({"runs": Disk("/x", 9 * GIB, False)}, "run folder", "problem", "cannot be written"),
        ({"cache": Disk("/x", 5 * MIB, True)}, "cache", "warning", "XDG_CACHE_HOME"),
        ({"gpus": (), "driver": "does not answer"}, "GPU", "warning", "nvidia-smi"),
        ({"gpus": ("H200",), "driver": "580", "cuda_usable": False, "torch_cuda": None}, "torch on GPU", "warning", "without CUDA"),
        ({"gpus": ("H200",), "driver": "580", "cuda_usable": False, "torch_cuda": "13.0"}, "torch on GPU", "warning", "13.0 driver"),
        ({"gpus": ("H200",), "driver": "580", "cuda_usable": True, "torch_cuda": "13.0"}, "torch on GPU", "ok", "13.0"),
        ({"cores": 0.25}, "job: cores", "warning", "5 processes 0.25 replicas=2"),
        ({"memory": 1 * GIB}, "job: memory", "problem", "1.71 GiB 1 GiB"),
        ({"files": 130}, "job: open files", "problem", "133 130"),
        ({"ports": 3}, "job: ports", "problem", "4 3"),
        ({}, "job: GPU", "warning", "none here"),
    ],
)
def test_machine(change: dict[str, Any], about: str, level: str, words: str) -> None:
    found = line(judge_machine(dataclasses.replace(WELL, **change), job(spec__workers__replicas=3)), about)
    text = f"{found.figure} {found.limit} {found.remedy}"
    assert found.level == level and all(word in text for word in words.split()), found
    assert level == "ok" or found.remedy


@pytest.mark.parametrize(
    ("change", "about", "level", "words"),
    [
        ({"unreachable": "no answer in 10 s"}, "API server", "problem", "no answer kubeconfig"),
        ({"namespace_there": False}, "namespace", "problem", "team-a create"),
        ({"served": False}, "CRD", "problem", "psjob crd"),
        ({"absent_fields": tuple(f"spec.f{i}" for i in range(9))}, "CRD", "warning", "spec.f0 3 more upgrade"),
        ({"operators": None}, "operator", "warning", "seen"),
        ({"operators": ()}, "operator", "problem", "docs/install.md"),
        ({"operators": (Operator("ns", "op", 0, "0.1.0"),)}, "operator", "problem", "ns/op describe"),
        ({"operators": (Operator("ns", "op", 1, "0.0.9"),)}, "operator", "warning", "0.0.9 0.1.0"),
        ({"rights": {**RIGHTS, ("pstrainingjobs", "create"): False}}, "rights: pstrainingjobs", "problem", "create Role"),
        ({"rights": {**RIGHTS, ("pods/log", "get"): False}}, "rights: pods/log", "warning", "get Role"),
        ({"classes": None}, "storage", "warning", "seen"),
        ({"classes": (StorageClass("a", "b", False),)}, "storage", "warning", "a claim"),
        ({"nodes": None}, "nodes", "warning", "seen"),
        ({"nodes": (NodeFacts("a", False, {}),)}, "nodes", "problem", "none is ready"),
        ({"pull_secrets": ()}, "image pull", "ok", "imagePullSecrets"),
    ],
)
def test_cluster(change: dict[str, Any], about: str, level: str, words: str) -> None:
    found = line(judge_cluster(dataclasses.replace(FINE, **change)), about)
    text = f"{found.figure} {found.limit} {found.remedy}"
    assert found.level == level and all(word in text for word in words.split()), found
    assert level == "ok" or found.remedy


def test_claims_that_psjob_makes_for_pairs_are_nobodys_to_make() -> None:
    shards = {"replicas": 1, "placement": "Colocated", "pairStorageClassName": "standard"}
    wanted = job(spec__shards=shards)
    pods = pod_groups(wanted, documents(wanted))
    assert any("-pair-" in name for one in pods for name in one.claims)
    assert not [finding for finding in judge_fit(FINE, wanted, pods) if "pair" in finding.about or "standard" in finding.about]


def quota(resource: str, hard: str, used: str = "0") -> dict[str, Any]:
    return {"quotas": (Quota("q", resource, hard, used),)}


def test_what_psjob_asks_for_by_itself_gives_way_to_a_limit_range() -> None:
    wanted, small = job(), dataclasses.replace(FINE, limits=(Limit("l", "max", "memory", "512Mi"),))
    asking, given = (pod_groups(wanted, documents(wanted, asks_nothing=bare)) for bare in (False, True))
    minded = [finding.figure for finding in judge_fit(small, wanted, asking, given) if finding.about == "job: limit range l"]
    assert minded == ["a worker asks for 4Gi memory"]
    assert any("shard" in finding.figure for finding in judge_fit(small, wanted, asking) if finding.about == "job: limit range l")


@pytest.mark.parametrize(
    ("change", "spec", "about", "level", "words"),
    [
        ({"nodes": (NodeFacts("a", True, {"cpu": "1", "memory": "64Gi"}),)}, {}, "job: worker pods", "problem", "2 cpu 1"),
        ({"nodes": (NodeFacts("a", True, {"cpu": "9", "memory": "64Gi"}),)}, {}, "job: worker pods", "problem", "nvidia.com/gpu 0"),
        ({"nodes": FINE.nodes[:1]}, {"spec__workers__replicas": 5}, "job: worker pods", "problem", "5 4 nodes"),
        ({"nodes": FINE.nodes[:1]}, {"spec__workers__replicas": 4}, "job: worker pods", "ok", "4"),
        (quota("requests.cpu", "4"), {"spec__workers__replicas": 2}, "job: quota q", "problem", "5 4"),
        (quota("requests.cpu", "5"), {"spec__workers__replicas": 2}, "job: quota q", "ok", "5"),
        (quota("requests.cpu", "5", "500m"), {"spec__workers__replicas": 2}, "job: quota q", "problem", "4.5"),
        (quota("pods", "3"), {"spec__workers__replicas": 2}, "job: quota q", "problem", "pods 4 3"),
        (quota("count/pods", "4"), {"spec__workers__replicas": 2}, "job: quota q", "ok", "4"),
        (quota("requests.nvidia.com/gpu", "1"), {"spec__workers__replicas": 2}, "job: quota q", "problem", "2 1"),
        (quota("limits.memory", "99Gi"), {}, "job: quota q", "problem", "limits.memory add"),
        ({"limits": (Limit("l", "max", "memory", "2Gi"),)}, {}, "job: limit range l", "problem", "worker 4Gi max"),
        ({"limits": (Limit("l", "min", "cpu", "3"),)}, {}, "job: limit range l", "problem", "0.5 min 3"),
        ({"classes": ()}, {}, "job: checkpoints", "problem", "wait claim"),
        (
            {"classes": (StorageClass("gp3", "ebs.csi.aws.com", True),)}, {"spec__checkpoint": MANY_NODES},
            "job: checkpoints", "problem", "ebs.csi.aws.com ReadWriteMany",
        ),
        ({"classes": (StorageClass("gp3", "ebs.csi.aws.com", True),)}, {}, "job: checkpoints", "ok", "10Gi gp3"),
        (
            {"classes": (StorageClass("nfs", "nfs.csi.k8s.io", False),)},
            {"spec__checkpoint": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "nfs"}}}},
            "job: checkpoints", "ok", "10Gi nfs ReadWriteMany",
        ),
        (
            {"classes": (StorageClass("gp3", "ebs.csi.aws.com", True),)},
            {"spec__checkpoint": {"volumeClaimTemplate": {"spec": {"storageClassName": "fast"}}}},
            "job: checkpoints", "problem", "wait fast storageclass",
        ),
        (
            {"classes": ()}, {"spec__checkpoint": {"volumeClaimTemplate": {"spec": {"storageClassName": ""}}}},
            "job: checkpoints", "ok", "binds there",
        ),
        (
            {"classes": (StorageClass("gp3", "ebs.csi.aws.com", True),)},
            {"spec__shards": {"replicas": 1, "placement": "Colocated", "pairStorageClassName": "local-path"}},
            "job: storage class local-path", "problem", "not there storageclass",
        ),
        ({}, {"spec__checkpoint": MY_CLAIM}, "job: checkpoints", "problem", "mine not there"),
        (
            {"claims": {"mine": ClaimFacts(("ReadWriteOnce",), "Bound", False)}}, {"spec__checkpoint": MY_CLAIM},
            "job: checkpoints", "ok", "mine Bound",
        ),
        (
            {"claims": {"digits-checkpoints": ClaimFacts(("ReadWriteOnce",), "Bound", False)}}, {},
            "job: checkpoints", "problem", "not psjob's",
        ),
        ({"claims": {"digits-checkpoints": ClaimFacts(("ReadWriteOnce",), "Lost", True)}}, {}, "job: checkpoints", "problem", "Lost"),
        (
            {"claims": {"digits-checkpoints": ClaimFacts(("ReadWriteOnce",), "Bound", True)}},
            {"spec__checkpoint": MANY_NODES}, "job: checkpoints", "problem", "ReadWriteOnce ReadWriteMany",
        ),
        ({}, {"spec__checkpoint": {"disabled": True}}, "job: checkpoints", "warning", "lost shard"),
        ({"pull_secrets": ()}, {f"{WORKER}.image": "registry.example.com/a:1"}, "job: image", "warning", "docker-registry"),
        ({}, DATA, "job: claim data", "problem", "not there team-a"),
        ({"claims": {"data": ClaimFacts(("ReadWriteOnce",), "Bound", False, True)}}, DATA, "job: claim data", "problem", "being deleted"),
        (
            {"claims": {"digits-checkpoints": ClaimFacts(("ReadWriteOnce",), "Bound", True, True)}}, {},
            "job: claim digits-checkpoints", "problem", "being deleted",
        ),
        ({"priorities": ("high",)}, {f"{POD}.priorityClassName": "higher"}, "job: priority class higher", "problem", "not there"),
        ({}, {f"{POD}.volumes": [FAST]}, "job: storage class fast", "problem", "not there"),
        ({"untried": True}, {}, "job: admission", "warning", "Pod Security"),
        ({"refused": (("manifest", "denied by policy x"),)}, {}, "job: manifest", "problem", "policy x"),
    ],
)  # fmt: skip
def test_whether_a_job_fits(change: dict[str, Any], spec: dict[str, Any], about: str, level: str, words: str) -> None:
    wanted = job(**spec)
    found = line(judge_fit(dataclasses.replace(FINE, **change), wanted, pod_groups(wanted, documents(wanted))), about)
    text = f"{found.figure} {found.limit} {found.remedy}"
    assert found.level == level and all(word in text for word in words.split()), found
