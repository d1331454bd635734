"""The default StorageClass: every claim gets a folder that all nodes see, with ReadWriteMany and fsGroup; it goes with its claim."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from hack.cluster.api import Api, ApiError
from hack.cluster.options import Ready

CLASS, PROVISIONER = "standard", "psjob.dev/folder"
CLASS_DOCUMENT = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": PROVISIONER,
    "reclaimPolicy": "Delete",
    "volumeBindingMode": "Immediate",
}
PAUSE = 0.2


def prepare(api: Api) -> None:
    """Make the StorageClass, before anyone can create a claim."""
    api.create("/apis/storage.k8s.io/v1/storageclasses", CLASS_DOCUMENT)


def provision(state: Path) -> None:
    """Serve claims of the class forever; the holder runs this in a process of its own."""
    facts: dict[str, str] = {}
    volumes = state / "volumes"
    volumes.mkdir(parents=True, exist_ok=True)
    api = None
    while True:
        time.sleep(PAUSE)
        try:
            api = api or _connect(state)
            if api is not None:
                _turn(api, volumes, facts)
        except (ApiError, OSError) as error:
            print(f"claims wait: {error}", flush=True)


def _connect(state: Path) -> Api | None:
    ready = Ready.load(state)
    return None if ready is None else ready.api()


def _turn(api: Api, volumes: Path, seen: dict[str, str]) -> None:
    for claim in api.get("/api/v1/persistentvolumeclaims?resourceVersion=0")["items"]:
        wanted = claim["spec"].get("storageClassName") == CLASS and not claim["spec"].get("volumeName")
        if wanted and "deletionTimestamp" not in claim["metadata"] and claim["metadata"]["uid"] not in seen:
            _make(api, volumes, claim)
            seen[claim["metadata"]["uid"]] = claim["metadata"]["name"]
    for volume in api.get("/api/v1/persistentvolumes?resourceVersion=0")["items"]:
        if volume["spec"].get("storageClassName") == CLASS and volume.get("status", {}).get("phase") in ("Released", "Failed"):
            shutil.rmtree(volumes / volume["metadata"]["name"], ignore_errors=True)
            api.delete(f"/api/v1/persistentvolumes/{volume['metadata']['name']}")


def _make(api: Api, volumes: Path, claim: dict[str, Any]) -> None:
    name = f"pvc-{claim['metadata']['uid']}"
    folder = volumes / name
    folder.mkdir(exist_ok=True)
    folder.chmod(0o2777)
    identity = {key: claim["metadata"][key] for key in ("namespace", "name", "uid")}
    anywhere = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "Exists"}]}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "storageClassName": CLASS,
            # Delete would make the controller-manager look for a plugin that it has not; Released is collected above.
            "persistentVolumeReclaimPolicy": "Retain",
            "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
            "accessModes": claim["spec"]["accessModes"],
            "volumeMode": "Filesystem",
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **identity},
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [anywhere]}},
        },
    }
    api.create("/api/v1/persistentvolumes", volume)
