"""A run is made of what it was begun with, whatever operator serves it; one of another version is held, not broken."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import get_args

import pytest

from psjob_operator import contract, render
from psjob_operator.api.status import JobStatus, Phase, Pinned, stamp
from psjob_operator.plan import objects
from psjob_operator.plan import objects as config
from psjob_operator.plan import pods as pins
from psjob_operator.plan.actions import CreateProcess, EnsureConfig, EnsureKey, Plan
from psjob_operator.plan.objects import cluster_config, config_digest
from psjob_operator.plan.observed_state import ObservedState, Process, Refusal
from psjob_operator.plan.plan import plan
from psjob_operator.plan.pods import templates_digest
from tests.unit.plan_given import NOW, after, deleted, ended, job, names, pinned_of, pod, running, said, with_internal

OLD, NEW = "registry/psjob-runtime:1", "registry/psjob-runtime@sha256:2222"


DIGESTED = functools.partial(Pinned, templates=templates_digest(job().spec))


def begun(**changes: Process | None) -> ObservedState:
    """A job in full swing that an operator with the old image began, seen by one with the new image."""
    return replace(running(job(runtime_image=OLD), **changes), runtime_image=NEW)


def images(decided: Plan, snapshot: ObservedState) -> set[str]:
    made = [render.pod(snapshot, action) for action in decided.actions if isinstance(action, CreateProcess)]
    return {container["image"] for body in made for container in body["spec"]["initContainers"] if container["name"] == "psjob-inject"}


def test_the_first_intent_stores_what_the_run_is_made_of() -> None:
    snapshot = job(runtime_image=OLD)
    decided = plan(snapshot, NOW)
    assert decided.intent and pinned_of(decided.status) == DIGESTED(
        runtime_image=OLD, config_format=contract.CONFIG_FORMAT, wire=contract.WIRE, container="worker", encryption="auto", key=1
    )
    assert images(decided, snapshot) == {OLD}


def test_a_newer_operator_makes_the_pods_of_a_run_as_it_was_begun() -> None:
    snapshot = begun(shard_1=pod("shard", 1, **ended(1)), worker_0=pod("worker", 0, **ended(137, "OOMKilled")))
    decided = plan(snapshot, NOW)
    assert names(decided) == ["job-shard-1-a2", "job-worker-0-r2"]
    assert images(decided, snapshot) == {OLD} and pinned_of(decided.status) == pinned_of(snapshot.status)


def test_without_injection_no_image_is_pinned() -> None:
    pinned = plan(job(runtime_image=NEW, injection="None"), NOW).status.internal.pinned
    assert pinned == DIGESTED(config_format=1, wire=contract.WIRE, container="worker", encryption="auto", key=1)


def test_a_suspension_keeps_them_and_a_resumed_run_is_pinned_anew() -> None:
    snapshot = begun()
    stopped = plan(replace(snapshot, spec=snapshot.spec.model_copy(update={"suspend": True})), NOW)
    gone = replace(snapshot, spec=snapshot.spec.model_copy(update={"suspend": True}), status=stopped.status, processes=())
    over = plan(gone, NOW + 60)
    assert over.status.phase == "Suspended" and pinned_of(over.status) == pinned_of(snapshot.status)
    on = replace(gone, spec=snapshot.spec, status=over.status)
    back = (pod("shard", 0),)
    ending = plan(replace(gone, status=over.status, processes=back), NOW + 70)
    lingers = plan(replace(on, status=ending.status, processes=back), NOW + 80)
    assert pinned_of(lingers.status) == pinned_of(over.status), "a pod of before has to end first"
    resumed = plan(on, NOW + 90)
    assert images(resumed, on) == {NEW} and resumed.intent
    assert pinned_of(resumed.status).key == 2 and EnsureKey(2) in resumed.actions
    again = after(on, resumed, NOW + 91)
    assert pinned_of(again.status) == pinned_of(resumed.status) and EnsureKey(2) in again.actions, "not made yet, as far as is known"
    never = plan(job(suspend=True, runtime_image=OLD), NOW)
    assert never.status.phase == "Suspended" and never.status.internal.pinned is None
    later = replace(job(runtime_image=NEW), status=never.status)
    begins = plan(later, NOW + 90)
    assert images(begins, later) == {NEW} and pinned_of(begins.status).key == 1


def test_the_keys_are_made_before_the_first_pod_and_only_for_pods_to_be_made() -> None:
    first = plan(job(), NOW)
    kinds = [type(action) for action in first.actions]
    assert kinds.count(EnsureKey) == 1 and kinds.index(EnsureKey) < kinds.index(CreateProcess)
    assert not [action for action in plan(replace(job(), key_made=1), NOW).actions if isinstance(action, EnsureKey)]
    assert plan(running(), NOW).actions == (), "an operator that restarts asks nothing for a job that runs"
    lost = plan(running(worker_1=pod("worker", 1, **ended(137, "OOMKilled"))), NOW)
    assert names(lost) == ["job-worker-1-r2"] and EnsureKey(1) in lost.actions


def test_the_name_of_the_secret_is_a_label_for_the_longest_job() -> None:
    made = objects.key_secret_name("a" * 40, "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", 123_456_789)
    assert made == "a" * 40 + "-key-0a1b2c3d-123456789" and len(made) <= 63


def test_what_the_api_server_says_of_the_secret_is_told() -> None:
    snapshot = replace(job(), status=plan(job(), NOW).status, refusals=(Refusal("job-key-run-1-1", 403, "no Secrets here", NOW, 1),))
    ready = said(plan(snapshot, NOW).status)["Ready"]
    assert (ready.reason, ready.message) == ("CreateRefused", "job-key-run-1-1: no Secrets here")
    made = said(plan(replace(snapshot, key_made=1), NOW).status)["Ready"]
    assert made.reason != "CreateRefused"


@pytest.mark.parametrize(
    ("word", "auto", "pinned"), [("auto", "auto", "auto"), ("auto", "none", "none"), ("tls", "none", "tls"), ("none", "auto", "none")]
)
def test_a_run_keeps_the_encryption_that_it_began_with(word: str, auto: str, pinned: str) -> None:
    new = replace(job(runtime_image=NEW, training={"mode": "sync", "encryption": word}), auto_encryption=auto)
    begins = plan(new, NOW)
    assert pinned_of(begins.status).encryption == pinned
    assert EnsureKey(1, pinned != "none") in begins.actions
    assert (EnsureConfig(1, pinned) in begins.actions) == (pinned != "auto"), "the one that is there is of auto"
    assert f'"encryption": "{pinned}"' in render.config(new, 1, pinned)["data"]["config.json"]
    meshed = after(replace(new, auto_encryption="none"), begins, NOW + 1)
    assert pinned_of(meshed.status).encryption == pinned, "also when a mesh comes"


def test_a_new_run_takes_new_ones() -> None:
    snapshot = replace(begun(), uid="run-2", processes=())
    assert images(plan(snapshot, NOW), snapshot) == {NEW}


def upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on an operator of the version after this one, whose config has another format and whose frames another version."""
    for name, value in {"CONFIG_FORMAT": 2, "CONFIG_FORMATS": (2, 1), "WIRE": 4, "WIRES": (4, 3)}.items():
        monkeypatch.setattr(pins, name, value)
    monkeypatch.setitem(
        config.WRITERS, 2, lambda job, shards, checkpoints, resumed_from: {"job": job.name, "ranks": job.spec.workers.replicas}
    )  # type: ignore[index]


def test_the_config_stays_in_the_format_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = (begun(),)
    upgrade(monkeypatch)
    for snapshot in snapshots:
        decided = plan(snapshot, NOW)
        assert EnsureConfig not in {type(action) for action in decided.actions}, "the live one is right as it stands"
        assert pinned_of(decided.status).config_format == 1 and pinned_of(decided.status).wire == 3
        lost = replace(snapshot, objects=replace(snapshot.objects, config_digest=""))
        (action,) = [action for action in plan(lost, NOW).actions if isinstance(action, EnsureConfig)]
        made = render.config(lost, action.format)
        assert (
            made["metadata"]["labels"]["psjob.dev/digest"] == config_digest(cluster_config(snapshot, 1))
            and '"format": 1' in made["data"]["config.json"]
        )
    fresh = plan(replace(job(), runtime_image=NEW), NOW)
    assert pinned_of(fresh.status) == DIGESTED(runtime_image=NEW, config_format=2, wire=4, container="worker", encryption="auto", key=1)
    assert EnsureConfig(2) in fresh.actions


def of_tomorrow(snapshot: ObservedState | None = None, **fields: int | None) -> ObservedState:
    snapshot = snapshot or begun()
    assert snapshot.status is not None
    pinned = pinned_of(snapshot.status).model_copy(update=fields or {"config_format": 9})
    return replace(snapshot, status=with_internal(snapshot.status, pinned=pinned))


@pytest.mark.parametrize("fields", [{"config_format": 9}, {"wire": 7}], ids=str)
def test_a_run_of_another_version_is_held_and_not_broken(fields: dict[str, int]) -> None:
    lost = {"shard_1": pod("shard", 1, **ended(1)), "worker_0": pod("worker", 0, **ended(77, message='{"error": "no"}'))}
    snapshot = of_tomorrow(replace(begun(**lost), objects=job().objects.__class__()), **fields)
    decided = plan(snapshot, NOW)
    assert decided.actions == () and not decided.intent and decided.status.phase == "Running"
    ready = said(decided.status)["Ready"]
    assert (ready.status, ready.reason) == ("False", "RunOfAnotherVersion") and said(decided.status)["Stalled"].status == "True"
    assert str(next(iter(fields.values()))) in ready.message and "Install an operator" in ready.message and len(ready.message) <= 256
    assert [event.reason for event in decided.events] == ["RunOfAnotherVersion"]
    assert pinned_of(decided.status) == pinned_of(snapshot.status)
    assert not after(snapshot, decided).events
    back = plan(replace(snapshot, status=with_internal(decided.status, pinned=begun().status.internal.pinned)), NOW)  # type: ignore[union-attr]
    assert back.status.phase == "Failed", "its own operator looks at it as if nothing had been"


@pytest.mark.parametrize("suspended", [False, True])
def test_a_run_whose_status_has_other_names_is_held_and_not_begun_anew(suspended: bool) -> None:
    """As the version before wrote it, and as the API server gives it once it does not know those fields."""
    snapshot = begun(worker_0=pod("worker", 0, 3), shard_1=pod("shard", 1, **ended(1)))
    assert snapshot.status is not None
    told = {key: value for key, value in snapshot.status.to_manifest().items() if key != "internal"}
    told["shards"] = [{key: value for key, value in shard.items() if key != "replica"} for shard in told["shards"]]
    if suspended:
        told |= {"phase": "Suspended", "startTime": None}
        snapshot = replace(snapshot, processes=())
    for raw in (told, {**told, "view": 3, "placement": 1, "pinned": {"wire": 3}, "workers": {**told["workers"], "start": 3}}):
        decided = plan(replace(snapshot, status=JobStatus.read(raw)), NOW)
        assert decided.actions == () and not decided.intent and decided.status.shards == snapshot.status.shards
        ready = said(decided.status)["Ready"]
        assert ready.reason == "RunOfAnotherVersion" and "status.internal.term" in ready.message and len(ready.message) <= 256


def test_what_ends_or_stops_a_held_run_goes_on() -> None:
    def of(spec: ObservedState) -> str | None:
        return plan(of_tomorrow(replace(spec, runtime_image=NEW)), NOW).status.phase

    done = {f"shard_{index}": pod("shard", index, **ended(0)) for index in range(2)}
    done |= {f"worker_{index}": pod("worker", index, **ended(0)) for index in range(3)}
    assert of(running(job(), **done)) == "Complete"
    assert of(running(job(runPolicy={"activeDeadlineSeconds": 60}))) == "Failed"
    snapshot = running(job())
    stopping = plan(of_tomorrow(replace(snapshot, spec=snapshot.spec.model_copy(update={"suspend": True}))), NOW)
    assert len(deleted(stopping)) == 5


@pytest.mark.parametrize("phase", [None, "Draining", *get_args(Phase)])
def test_nothing_is_decided_by_the_phase_that_a_status_has(phase: str | None) -> None:
    waits = begun(worker_0=pod("worker", 0, ready=False, phase="Pending", started=None))
    lost = begun(shard_0=pod("shard", 0, **ended(1)))
    for snapshot, wanted in ((waits, "Recovering"), (begun(), "Running"), (lost, "Recovering")):
        assert snapshot.status is not None
        told = replace(snapshot, status=JobStatus.read({**snapshot.status.to_manifest(), "phase": phase}))
        decided, usual = plan(told, NOW), plan(snapshot, NOW)
        assert decided.status.phase == wanted and (decided.actions, decided.events) == (usual.actions, usual.events)
    assert names(plan(lost, NOW)) == ["job-shard-0-a2"]
    assert waits.status is not None
    over = replace(waits, status=JobStatus.read({**waits.status.to_manifest(), "phase": phase, "completionTime": "2026-01-01T00:00:00Z"}))
    assert plan(over, NOW).status.phase == phase and not names(plan(over, NOW)), "an end is an end, whatever its word"


def test_a_job_that_is_ready_was_ready_before_a_version_that_has_a_time_for_it() -> None:
    """As the version before wrote it; that of a job that is not ready yet is as that of a new one."""
    up = begun()
    assert up.status is not None
    old = with_internal(up.status, ready_time=None)
    lost = plan(replace(begun(shard_0=pod("shard", 0, **ended(1))), status=old), NOW).status
    ready = said(up.status)["Ready"].last_transition_time
    assert (lost.phase, lost.internal.ready_time, lost.internal.lost_time) == ("Recovering", ready, stamp(NOW))
    assert plan(replace(up, status=old), NOW).status.internal.ready_time == ready


def test_keys_are_the_operators_if_a_pod_of_the_run_mounts_them() -> None:
    snapshot = begun()
    secret = objects.key_secret_name(snapshot.name, snapshot.uid, 2)
    before, ours = (replace(pod("worker", 0), keys=objects.key_secret_name(snapshot.name, snapshot.uid, number)) for number in (1, 2))
    assert not replace(snapshot, processes=()).mounts(secret)
    assert not replace(snapshot, processes=(before, pod("worker", 1))).mounts(secret), (
        "labels, and the keys of the run before it was resumed"
    )
    assert not replace(snapshot, processes=(replace(ours, run="another"),)).mounts(secret)
    assert replace(snapshot, processes=(before, ours)).mounts(secret)
