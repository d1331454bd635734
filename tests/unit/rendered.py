"""A job whose pods use what a manifest may have, and what is rendered for a shard of it."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from psjob_operator import render
from psjob_operator.api.status import Pinned
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.placement import shares_volume
from tests.unit.plan_given import job

IMAGE = "registry/psjob-runtime:1"
PINNED = Pinned(runtime_image=IMAGE, container="worker", key=2)
RICH = yaml.safe_load("""
metadata:
  labels: {team: ads, psjob: "no"}
  annotations: {note: "two\\nlines"}
spec:
  nodeSelector: {gpu: a100}
  priorityClassName: high
  serviceAccountName: trainer
  runtimeClassName: nvidia
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  affinity:
    nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}]}}
  securityContext: {runAsUser: 1000, fsGroup: 2000, supplementalGroups: [7]}
  imagePullSecrets: [{name: pull}]
  resourceClaims: [{name: gpu, resourceClaimTemplateName: one}]
  somethingNewer: {deep: [1, 2.5, null, "0.1"]}
  initContainers:
  - {name: fetch, image: busybox, command: [sh, -c, "echo ${HOME} $(X)"]}
  - {name: logs, image: fluent, restartPolicy: Always}
  containers:
  - name: metrics
    image: exporter
  - name: worker
    image: me/gpu:1
    imagePullPolicy: Always
    command: [/opt/conda/bin/python3.11, -u, train.py]
    args: ["--lr", "0.1", "$(PSJOB_INDEX)"]
    env: [{name: A, value: "1"}, {name: TOKEN, valueFrom: {secretKeyRef: {name: s, key: k}}}]
    envFrom: [{configMapRef: {name: c}}]
    resources: {limits: {nvidia.com/gpu: 1, cpu: 4}, requests: {cpu: 500m}}
    securityContext: {capabilities: {add: [IPC_LOCK]}, privileged: false, runAsGroup: 3000}
    volumeMounts: [{name: data, mountPath: /data, readOnly: true}]
    ports: [{containerPort: 9000}]
    lifecycle: {preStop: {exec: {command: [sleep, "1"]}}}
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}, {name: shm, emptyDir: {medium: Memory}}]
""")


def rich(**overrides: Any) -> ObservedState:
    return job(workers={"template": copy.deepcopy(RICH)}, **overrides)


def shard(snapshot: ObservedState, known: bool = False, user: int | None = render.NOBODY) -> dict[str, Any]:
    place = 0 if shares_volume(snapshot) else None
    return render.pod(snapshot, CreateProcess("shard", 1, 4, 5, "job-shard-1-a4", known, volume_group=place, pinned=PINNED), user)
