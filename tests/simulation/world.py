"""A small world below the plan: an API server's rules, a kubelet and a training run, all on a virtual clock and without chance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from psjob_operator.api.spec import JobSpec
from psjob_operator.api.status import JobStatus, stamp, starts_text
from psjob_operator.contract import EXIT_RETRY
from psjob_operator.plan import objects
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.objects import ConfigSource, cluster_config, config_digest
from psjob_operator.plan.observed_state import Claim, Exit, Process


def make_spec(**overrides: Any) -> JobSpec:
    """Two shards, three workers; camelCase keys laid over it."""
    container = {"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"]}
    base: dict[str, Any] = {"shards": {"replicas": 2}, "workers": {"replicas": 3, "template": {"spec": {"containers": [container]}}}}
    for key, value in overrides.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return JobSpec.model_validate(base)


CONNECT_SECONDS = 600.0


class Conflict(Exception):
    """409."""


@dataclass
class World:
    spec: JobSpec
    uid: str = "run-1"
    name: str = "job"
    namespace: str = "ns"
    now: float = 1_000_000.0
    generation: int = 1
    version: int = 1
    status: JobStatus | None = None
    gone: bool = False
    pods: dict[str, Process] = field(default_factory=dict)
    service: bool = False
    config: str = ""
    claim: Claim | None = None
    pair_claims: list[str] = field(default_factory=list)
    keys: set[int] = field(default_factory=set)
    """Numbers of the run's keys whose Secret was made."""
    steps: int = 40
    step: float = 0.0
    committed: int | None = None
    final: bool = False
    met: dict[int, int] = field(default_factory=dict)
    """Start of the newest process of each worker that shard 0 has met."""
    goes_at: dict[str, float] = field(default_factory=dict)
    """When a shard that has the last manifest ends."""
    created: Counter[str] = field(default_factory=Counter)
    history: list[JobStatus] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    terms: dict[str, int] = field(default_factory=dict)

    # ---- the API server ---------------------------------------------------------------------------------------------------------

    def write_status(self, status: JobStatus, version: int) -> None:
        self.requests["status"] += 1
        if version != self.version:
            raise Conflict
        check_transition(self.status, status)
        if status != self.status:
            self.version += 1
            self.status = status
            self.history.append(status)

    def create(self, action: CreateProcess) -> None:
        self.requests["create"] += 1
        if action.name in self.pods:
            raise Conflict
        assert action.pinned.key in self.keys, f"{action.name} would wait for a Secret that nobody has made"
        self.created[action.name] += 1
        self.terms[action.name] = action.term
        self.pods[action.name] = Process(
            name=action.name, uid=f"{action.name}-{sum(self.created.values())}", role=action.role, index=action.index,
            number=action.number, run=self.uid, phase="Pending", created=self.now,
        )  # fmt: skip

    def delete(self, name: str, uid: str, grace: int | None) -> None:
        self.requests["delete"] += 1
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid:
            return
        if pod.phase in ("Succeeded", "Failed") or pod.started is None or grace == 0:
            del self.pods[name]
        elif pod.deleting is None:
            self.pods[name] = replace(pod, deleting=self.now + (30 if grace is None else grace))

    # ---- the kubelet and training -------------------------------------------------------------------------------------------------

    def tick(self, seconds: float = 1.0) -> None:
        """Pods start, become ready, leave; training continues while everything is up; commits follow."""
        self.now += seconds
        for name, pod in list(self.pods.items()):
            if pod.node_lost:
                continue
            if pod.deleting is not None:
                del self.pods[name]
            elif pod.phase in ("Succeeded", "Failed"):
                continue
            elif pod.started is None:
                self.pods[name] = replace(pod, phase="Running", scheduled=self.now, started=self.now)
            elif not pod.ready:
                self.pods[name] = replace(pod, ready=True)
        self._train(seconds)

    def _train(self, seconds: float) -> None:
        if self.final:
            self._finish()
            return
        shards = [self.current("shard", index) for index in range(self.spec.shards.replicas)]
        workers = [self.current("worker", index) for index in range(self.spec.workers.replicas)]
        if not all(pod is not None and pod.ready for pod in [*shards, *workers]):
            return
        self.met |= {pod.index: pod.number for pod in workers if pod is not None}
        self.step = min(self.step + seconds, self.steps)
        if int(self.step) // 5 * 5 > (self.committed or 0) or self.committed is None:
            self.committed = int(self.step) // 5 * 5
        if self.step >= self.steps:
            self.final = True
            self.goes_at = {pod.name: self.now + 2 for pod in shards if pod is not None}
            self.committed = self.steps

    def _finish(self) -> None:
        """Shards that have the last manifest tell whoever comes, and go after a while: soon at the end, later where they came back."""
        for pod in list(self.pods.values()):
            if not (self.alive(pod) and pod.ready):
                continue
            first = self.current("shard", 0)
            if pod.role == "worker" and first is not None and first.ready:
                self.met[pod.index] = pod.number
                self.end(pod.name, 0)
            elif pod.role == "worker" and self.now >= pod.created + CONNECT_SECONDS:
                self.end(pod.name, EXIT_RETRY)
            elif pod.role == "shard" and self.now >= self.goes_at.setdefault(pod.name, self.now + 60):
                self.end(pod.name, 0, message=f'{{"met": "{starts_text(self.met)}"}}')

    def alive(self, pod: Process) -> bool:
        return pod.started is not None and pod.exit is None and not pod.node_lost and pod.phase == "Running"

    def current(self, role: str, index: int) -> Process | None:
        there = [pod for pod in self.pods.values() if (pod.role, pod.index) == (role, index) and self.alive(pod)]
        return max(there, key=lambda pod: pod.number, default=None)

    def end(self, name: str, code: int, reason: str = "", message: str = "") -> None:
        """The trained container of that pod ends."""
        pod = self.pods[name]
        if code == EXIT_RETRY and not message:
            message = '{"ending": ""}'
        word = reason or ("Completed" if code == 0 else "Error")
        ended = Exit(code=code, reason=word, message=message, log_tail="" if code == 0 else "Traceback: boom")
        self.pods[name] = replace(
            pod, phase="Succeeded" if code == 0 else "Failed", exit=ended, ready=False, started=pod.started or self.now
        )
        if code != 0 and pod.role == "shard" and self.committed is not None and not self.final:
            self.step = float(self.committed)

    def progress(self) -> dict[str, Any] | None:
        """What shard 0 tells."""
        first = self.current("shard", 0)
        if first is None or not first.ready:
            return None
        checkpoint = None
        if self.committed is not None:
            checkpoint = {"step": self.committed, "term": 1, "time": self.now, "bytes": 10, "path": "run-1", "final": self.final}
        return {"run": self.uid, "coordinator": {"step": int(self.step), "loss": 0.5, "rate": 1.0, "eta": None, "checkpoint": checkpoint}}

    @property
    def digest(self) -> str:
        job: ConfigSource = self
        return config_digest(cluster_config(job))

    def pods_of(self, role: str, index: int) -> list[Process]:
        return [pod for pod in self.pods.values() if (pod.role, pod.index) == (role, index)]

    def shard(self, index: int) -> Process:
        """The shard's present pod."""
        assert self.status is not None
        return self.pods[objects.process_name(self.name, "shard", index, self.status.shards[index].attempt)]


def check_transition(old: JobStatus | None, new: JobStatus) -> None:
    """The CRD's transition rules, and what must hold of every status."""
    assert len(str(new.to_manifest())) < 32_768
    seen = {condition.type: condition for condition in new.conditions}
    assert not {"Reconciling", "Stalled"} <= seen.keys()
    assert all(len(condition.message) <= 256 and condition.reason for condition in new.conditions)
    assert [shard.index for shard in new.shards] == list(range(len(new.shards)))
    assert all(shard.attempt >= 1 for shard in new.shards)
    if old is None:
        return
    same_run = old.run == new.run
    if old.end is not None:
        assert (new.end, new.phase) == (old.end, old.phase) or not same_run
        if same_run:
            assert new.completion_time == old.completion_time
    assert (new.internal.term or 0) >= (old.internal.term or 0)
    assert same_run or old.internal.term is None or (new.internal.term or 0) > old.internal.term
    assert new.internal.worker_start >= old.internal.worker_start
    assert len(new.shards) >= len(old.shards)
    assert all(after.attempt >= before.attempt for before, after in zip(old.shards, new.shards, strict=False))
    raised = [shard for before, shard in zip(old.shards, new.shards, strict=False) if shard.attempt > before.attempt]
    assert not raised or (new.internal.term or 0) > (old.internal.term or 0)
    if same_run:
        assert new.restarts.total >= old.restarts.total


def describe(status: JobStatus | None) -> dict[str, Any]:
    """What two lives of a job must agree on, but for numbers that were raised again."""
    assert status is not None
    return {
        "phase": status.phase,
        "conditions": [(it.type, it.status, it.reason) for it in status.conditions],
        "shards": [shard.state for shard in status.shards],
        "workers": (status.workers.desired, status.workers.succeeded_indexes, status.workers.failed_indexes),
        "checkpoint": status.checkpoint.step if status.checkpoint else None,
    }


def moment(world: World) -> str:
    return stamp(world.now)
