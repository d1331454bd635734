"""Manifests about the claim that is made for checkpoints, to refuse and to take."""

from __future__ import annotations

from typing import Any

from tests.unit.api_manifest import MY_CLAIM, Case, refused

AT = "spec.checkpoint.volumeClaimTemplate"
_POLICY = "spec.checkpoint.persistentVolumeClaimRetentionPolicy"
_NO_CLAIM = "must not be given with spec.checkpoint.volume, nor with spec.checkpoint.disabled: true; no claim is made then; leave one"
_MODES = f"{AT}.spec.accessModes"
_STORAGE = f"{AT}.spec.resources.requests"
_SNAPSHOT = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "last"}


def modes(*names: str) -> dict[str, Any]:
    """A template that asks for these access modes."""
    return {"spec": {"accessModes": list(names)}}


def sized(storage: Any) -> dict[str, Any]:
    """A template that asks for so much."""
    return {"spec": {"resources": {"requests": {"storage": storage}}}}


CLAIMS_REFUSED = [
    *(Case(f"{path.rpartition('.')[2]}-beside-{name}", {"spec.checkpoint": {**beside, path.rpartition(".")[2]: value}}, path, _NO_CLAIM)
        for path, value in ((AT, modes("ReadWriteMany")), (_POLICY, {"whenDeleted": "Retain"}))
        for name, beside in {"a-claim": MY_CLAIM, "a-server": {"volume": {"nfs": {"server": "a", "path": "/b"}}},
            "disabled": {"disabled": True}}.items()),
    *(Case(f"storage-{value!r}", {AT: sized(value)}, f"{_STORAGE}.storage", "must be a quantity above 0; such as 500Mi, 10Gi or 1Ti")
        for value in ("", "0", "0Gi", "-1Gi", "10GB", "10Gi\n", "ten", 0, -1)),
    Case("modes-none", {AT: modes()}, _MODES, "must have 1..4 items; leave it out for ReadWriteOnce"),
    Case("modes-read-only", {AT: modes("ReadOnlyMany")}, f"{_MODES}[0]",
        'Unsupported value: "ReadOnlyMany": supported values: "ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"',
        server_sentence='Unsupported value: "ReadOnlyMany"'),
    Case("modes-pod-and-more", {AT: modes("ReadWriteOncePod", "ReadWriteOnce"), "spec.shards.replicas": 1}, _MODES,
        "must not have ReadWriteOncePod beside others; Kubernetes takes it by itself only; leave one of them out"),
    Case("modes-pod-of-two-shards", {AT: modes("ReadWriteOncePod")}, _MODES,
        "must not have ReadWriteOncePod with two or more spec.shards.replicas; one pod at a time can mount it; take ReadWriteOnce"),
    refused("claim-block", f"{AT}.spec.volumeMode", "Block", 'Unsupported value: "Block": supported values: "Filesystem"',
        server_sentence='Unsupported value: "Block"'),
    *(refused(f"claim-{words}-ours", AT, {"metadata": {words: {"psjob.dev/job-name": "other"}}},
          "must not have keys that begin with psjob.dev/; those are psjob's own; take another prefix", below=f".metadata.{words}")
        for words in ("labels", "annotations")),
    *(refused(f"claim-{name}", AT, {"metadata": {name: value}}, f'unknown field "{AT}.metadata.{name}"; fields here: labels, annotations',
          below=f".metadata.{name}", server_sentence=f'unknown field "{AT}.metadata.{name}"')
        for name, value in (("name", "mine"), ("finalizers", ["a/b"]))),
    refused("claim-text", AT, "10Gi", "must be of type object", server_sentence="must be of type object"),
    refused("claim-class-number", f"{AT}.spec.storageClassName", 1, 'must be of type string; write it in quotes: "1"',
        server_sentence="must be of type string"),
    *(refused(f"gone-{name}", f"spec.checkpoint.{name}", value, f'unknown field "spec.checkpoint.{name}"; write spec.checkpoint.{new}: {{',
          server_sentence=f'unknown field "spec.checkpoint.{name}"')
        for name, value, new in (
            ("size", "20Gi", "volumeClaimTemplate"),
            ("accessMode", "ReadWriteMany", "volumeClaimTemplate"),
            ("retain", False, "persistentVolumeClaimRetentionPolicy"),
        )),
    refused("gone-claim", "spec.checkpoint.volume.claim", "mine",
        "write spec.checkpoint.volume: {persistentVolumeClaim: {claimName: my-claim}}", server=False),
]  # fmt: skip
CLAIMS_PASSED = [
    *(Case(f"storage-{value}", {AT: sized(value)}) for value in ("1Mi", "10Gi", "2T", "1.5Gi", "1e9", 10737418240)),
    *(Case(f"modes-{'-'.join(names)}", {AT: modes(*names)}) for names in (("ReadWriteMany",), ("ReadWriteOnce", "ReadWriteMany"))),
    Case("modes-pod", {AT: modes("ReadWriteOncePod"), "spec.shards.replicas": 1}),
    Case("claim-empty", {AT: {}}),
    Case("claim-nothing-said", {AT: {"metadata": {}, "spec": {}}}),
    Case("claim-whole", {AT: {"metadata": {"labels": {"team": "a"}, "annotations": {"example.com/backup": "daily"}},
        "spec": {"storageClassName": "fast", "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem",
        "resources": {"requests": {"storage": "50Gi"}, "limits": {"storage": "50Gi"}},
        "selector": {"matchLabels": {"disk": "ssd"}, "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]},
        "dataSource": _SNAPSHOT, "dataSourceRef": _SNAPSHOT, "volumeAttributesClassName": "gold"}}, _POLICY: {"whenDeleted": "Delete"}}),
    Case("claim-of-no-class", {AT: {"spec": {"storageClassName": "", "volumeName": "pv-1"}}}),
    Case("one-port-apart", {"spec.shards": {"replicas": 2,
        "template": {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}}, AT: modes("ReadWriteMany")}),
    Case("one-port-on-a-server", {"spec.shards": {"replicas": 2,
        "template": {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}},
        "spec.checkpoint.volume": {"nfs": {"server": "a", "path": "/b"}}}),
]  # fmt: skip
