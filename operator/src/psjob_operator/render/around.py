"""What stands around the pods: the headless Service, the config and the checkpoint claim."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from psjob_operator.api.claim_template import claim_metadata, claim_spec, retained
from psjob_operator.contract import CONFIG_FORMAT, DATA_PORT, GROUP, STATUS_PORT
from psjob_operator.plan import naming
from psjob_operator.plan.config import ConfigSource, cluster_config, config_text, digest
from psjob_operator.render.names import LABEL_DIGEST, Document, labels, metadata, pods_of

CONFIG_FILE = "config.json"


def service(job: ConfigSource) -> Document:
    """The headless Service under which shards are found, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, naming.service(job.name), labels(job, "shard")),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": pods_of(job, "shard"),
            "ports": [
                {"name": "data", "port": DATA_PORT, "targetPort": DATA_PORT, "protocol": "TCP"},
                {"name": "status", "port": STATUS_PORT, "targetPort": STATUS_PORT, "protocol": "TCP"},
            ],
        },
    }


def resolves(spec: Mapping[str, Any]) -> str:
    """Short name of what a Service's spec makes of its name. Fields that the API server adds do not count."""
    ports = [{key: port.get(key) for key in ("name", "port", "targetPort", "protocol")} for port in spec.get("ports") or ()]
    decides = {key: spec.get(key) for key in ("type", "clusterIP", "publishNotReadyAddresses", "selector")} | {"ports": ports}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def config(job: ConfigSource, config_format: int = CONFIG_FORMAT, encryption: str = "auto", resumed_from: str | None = None) -> Document:
    """The ConfigMap that every process of the job mounts."""
    content = cluster_config(job, config_format, encryption, resumed_from)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, naming.config(job.name), {**labels(job, "config"), LABEL_DIGEST: digest(content)}),
        "data": {CONFIG_FILE: config_text(content)},
    }


def claim(job: ConfigSource) -> Document:
    """The claim for checkpoints, of `checkpoint.volumeClaimTemplate`. One that outlives the job has no owner."""
    template = job.spec.checkpoint.volume_claim_template
    given, annotations = claim_metadata(template)
    own = labels(job, "checkpoints")
    # The names by which people group objects are the template's to give, as in a pod's; psjob finds the claim by its own.
    shared = {**own, **given, **{key: value for key, value in own.items() if key.startswith(f"{GROUP}/")}}
    made = metadata(job, naming.claim(job.name), shared, owned=not retained(job.spec.checkpoint))
    if annotations:
        made["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": made, "spec": claim_spec(template)}
