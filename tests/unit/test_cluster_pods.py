"""From a pod's JSON to what the planner sees, and what the store keeps of what it hears."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob_operator.api.status import unix
from psjob_operator.cluster.cache import JobStore
from psjob_operator.cluster.client import JOBS, PODS, SERVICES, JobKey
from psjob_operator.cluster.observe import slow_and_shown
from psjob_operator.cluster.pods import GONE_SECONDS, parse_pod
from psjob_operator.contract import MOST_NUMBER
from psjob_operator.plan.observed_state import SLOW_START_SECONDS
from psjob_operator.render.objects import ANNOTATION_CONTAINER, ANNOTATION_WAITED, LABEL_INDEX, LABEL_NUMBER, LABEL_ROLE
from tests.unit.cluster_pods import AT, entry, pod


def condition(kind: str, status: str = "True", **more: str) -> dict[str, Any]:
    return {"type": kind, "status": status, "lastTransitionTime": AT, **more}


def view(**status: Any) -> Any:
    found = parse_pod(pod(**status))
    assert found is not None
    return found


def test_who_it_is() -> None:
    process = view().process
    assert (process.role, process.index, process.number, process.run, process.node) == ("worker", 3, 2, "run", "node")
    assert process.created == unix(AT)


@pytest.mark.parametrize("label", [LABEL_ROLE, LABEL_INDEX, LABEL_NUMBER])
def test_a_pod_without_our_labels_is_no_process(label: str) -> None:
    raw = pod()
    raw["metadata"]["labels"][label] = "x1"
    assert parse_pod(raw) is None


@pytest.mark.parametrize(
    ("role", "label", "text", "ours"),
    [
        ("worker", LABEL_NUMBER, "9" * 60, False),
        ("worker", LABEL_NUMBER, str(MOST_NUMBER + 1), False),
        ("worker", LABEL_NUMBER, str(MOST_NUMBER), True),
        ("worker", LABEL_NUMBER, "0", False),
        ("worker", LABEL_NUMBER, "02", False),
        ("worker", LABEL_NUMBER, "", False),
        ("worker", LABEL_INDEX, "9" * 60, False),
        ("worker", LABEL_INDEX, "0", True),
        ("worker", LABEL_INDEX, "3999", True),
        ("worker", LABEL_INDEX, "4000", False),
        ("shard", LABEL_INDEX, "255", True),
        ("shard", LABEL_INDEX, "256", False),
    ],
)
def test_a_pod_whose_numbers_nobody_gave_is_no_process(role: str, label: str, text: str, ours: bool) -> None:
    """A stranger's pod can name our job as its owner; a status with its number would be refused (422) forever."""
    raw = pod()
    raw["metadata"]["labels"] |= {LABEL_ROLE: role, label: text}
    assert (parse_pod(raw) is not None) == ours


def test_the_trained_containers_end_is_the_end_whatever_sidecars_do() -> None:
    ended = entry("worker", terminated={"exitCode": 0, "reason": "Completed", "startedAt": AT})
    process = view(containerStatuses=[entry("logs", running={"startedAt": AT}), ended]).process
    assert process.phase == "Succeeded" and process.exit.code == 0 and process.lingering


def test_a_failure_keeps_code_reason_and_last_words() -> None:
    ended = entry("worker", terminated={"exitCode": 137, "reason": "OOMKilled", "message": "word " * 1000})
    process = view(phase="Failed", containerStatuses=[ended]).process
    assert (process.phase, process.exit.code, process.exit.reason) == ("Failed", 137, "OOMKilled")
    assert 2000 < len(process.exit.log_tail) <= 2048 and not process.lingering
    said = view(containerStatuses=[entry("worker", terminated={"exitCode": 77, "message": '{"error": "no"}'})]).process.exit
    assert said.message == '{"error": "no"}' and said.log_tail == ""


def test_the_pods_own_reason_goes_before_the_one_that_several_causes_share() -> None:
    disrupted = condition("DisruptionTarget", reason="TerminationByKubelet", message="m")
    assert view(conditions=[disrupted]).process.pod_reason == "TerminationByKubelet"
    assert view(conditions=[disrupted], reason="Evicted", message="low on memory").process.pod_reason == "Evicted"


def test_conditions_that_a_rule_can_name_are_kept_in_order_and_few() -> None:
    said = [condition("Ready", "False"), condition("PodScheduled"), condition("example.com/Bad", "Unknown"), condition("DisruptionTarget")]
    assert view(conditions=said).process.conditions == (("DisruptionTarget", "True"), ("example.com/Bad", "Unknown"))
    assert len(view(conditions=[condition(f"C{number}") for number in range(99)]).process.conditions) == 16


def test_waiting_words_come_from_init_containers_first_and_starting_is_no_trouble() -> None:
    waits = entry("psjob-inject", waiting={"reason": "ErrImagePull", "message": "not found"})
    later = entry("worker", waiting={"reason": "PodInitializing"})
    process = view(phase="Pending", initContainerStatuses=[waits], containerStatuses=[later]).process
    assert process.waiting_reason == "ErrImagePull" and "psjob-inject: not found" in process.waiting_message
    assert view(phase="Pending", containerStatuses=[later]).process.waiting_reason == ""


def test_the_schedulers_words() -> None:
    raw = pod(phase="Pending", conditions=[condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")])
    del raw["spec"]["nodeName"]
    found = parse_pod(raw)
    assert found is not None and found.process.unschedulable == "0/3 nodes" and found.process.scheduled is None
    assert view(conditions=[condition("PodScheduled")]).process.scheduled == unix(AT)


def test_a_bound_pod_is_not_unschedulable_whatever_an_older_condition_says() -> None:
    raw = pod(phase="Pending", conditions=[condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")])
    found = parse_pod(raw)
    assert found is not None and raw["spec"]["nodeName"] and found.process.unschedulable == ""


def test_when_it_must_be_asked_for_its_events_or_its_node() -> None:
    scheduled = {"phase": "Pending", "conditions": [condition("PodScheduled")]}
    assert view(**scheduled).process.slow_at == unix(AT) + SLOW_START_SECONDS
    assert view(conditions=[condition("PodScheduled")]).process.slow_at is None
    going = pod(conditions=[condition("DisruptionTarget", reason="DeletionByTaintManager")])
    going["metadata"]["deletionTimestamp"] = AT
    found = parse_pod(going)
    assert found is not None and found.overdue_at() == unix(AT)
    going["status"]["conditions"] = []
    found = parse_pod(going)
    assert found is not None and found.overdue_at() == unix(AT) + GONE_SECONDS


TERMINATED = st.fixed_dictionaries(
    {"exitCode": st.integers(0, 255)}, optional={"message": st.text(max_size=9), "reason": st.text(max_size=9)}
)
STATES = st.one_of(
    st.just({}),
    TERMINATED.map(lambda it: {"terminated": it}),
    st.just({"running": {"startedAt": AT}}),
    st.fixed_dictionaries({}, optional={"reason": st.text(max_size=9), "message": st.text(max_size=9)}).map(lambda it: {"waiting": it}),
)


@given(
    st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown", "", None]),
    st.lists(st.tuples(st.sampled_from(["worker", "logs", "psjob-inject"]), STATES), max_size=4),
)
def test_every_status_has_a_view(phase: str | None, states: list[tuple[str, dict[str, Any]]]) -> None:
    statuses = [{"name": name, "state": state} for name, state in states]
    found = parse_pod(pod(phase=phase, containerStatuses=statuses, initContainerStatuses=statuses))
    assert found is not None and found.process.phase in ("Pending", "Running", "Succeeded", "Failed", "Unknown")


# -- the store --------------------------------------------------------------------------------------

KEY = JobKey("n", "job")


def listed(store: JobStore, namespace: str, version: int, *items: dict[str, Any], job: JobKey | None = None) -> set[JobKey]:
    """A whole list of pods was read."""
    news = {found for raw in items if (found := store.put(PODS, raw)) is not None}
    return news | store.sweep(PODS, namespace, {raw["metadata"]["uid"] for raw in items}, version, job)


def test_an_older_word_never_replaces_a_newer_one() -> None:
    store = JobStore()
    assert store.put(PODS, pod(version=5, phase="Running")) == KEY
    assert store.put(PODS, pod(version=4, phase="Pending")) is None
    assert store.put(PODS, pod(version=5, phase="Pending")) is None
    assert store.pods(KEY)[0].process.phase == "Running"


def test_what_is_gone_stays_gone_whatever_comes_late() -> None:
    store = JobStore()
    store.put(PODS, pod(version=5))
    assert store.remove(PODS, pod(version=9)) == KEY
    assert store.put(PODS, pod(version=7)) is None
    assert store.pods(KEY) == []
    assert store.put(PODS, pod(version=10, uid="u2")) == KEY, "another object of that name is another matter"


def test_a_pod_whose_label_goes_and_returns_is_seen_again() -> None:
    """For a watch of that label it is deleted and added: the same uid, with a newer version."""
    store = JobStore()
    store.put(JOBS, {"metadata": {"name": KEY.name, "namespace": KEY.namespace, "uid": "run", "resourceVersion": "1"}})
    store.put(PODS, pod(version=5, phase="Running"))
    store.remove(PODS, pod(version=9, phase="Running"))
    assert [process.gone for process in store.removed(KEY)] == [True], "for its job it is as good as removed"
    assert store.put(PODS, pod(version=12, phase="Running")) == KEY
    assert [view.process.uid for view in store.pods(KEY)] == ["u1"]
    listed(store, "", 20)
    assert store.pods(KEY) == [] and store.put(PODS, pod(version=19)) is None
    assert store.put(PODS, pod(version=21)) == KEY, "as well where a list told that it was away"
    store.remove(PODS, {"metadata": {"namespace": "n", "name": "job-worker-3-r1", "uid": "u1"}})
    assert store.put(PODS, pod(version=99)) is None, "what is known to be deleted stays so"


def test_a_pod_that_loses_the_label_of_its_role_is_as_good_as_removed() -> None:
    store = JobStore()
    store.put(JOBS, {"metadata": {"name": KEY.name, "namespace": KEY.namespace, "uid": "run", "resourceVersion": "1"}})
    store.put(PODS, pod(version=5, phase="Running"))
    bare = pod(version=6, phase="Running")
    del bare["metadata"]["labels"][LABEL_ROLE]
    assert store.put(PODS, bare) == KEY and store.pods(KEY) == []
    (process,) = store.removed(KEY)
    assert process.gone and process.deleting is None
    store.dismiss(KEY, process.uid)
    assert store.removed(KEY) == ()


def test_the_removal_of_one_object_does_not_take_the_next_of_its_name() -> None:
    store = JobStore()
    store.put(PODS, pod(version=10, uid="u2"))
    assert store.remove(PODS, pod(version=9, uid="u1")) is None
    assert len(store.pods(KEY)) == 1


def test_the_last_words_of_shard_0_outlive_its_pod() -> None:
    def shard(version: int, uid: str, **status: Any) -> dict[str, Any]:
        raw = pod(f"job-shard-0-a{uid}", version, uid, **status)
        raw["metadata"]["labels"] |= {LABEL_ROLE: "shard", LABEL_INDEX: "0", LABEL_NUMBER: uid}
        raw["spec"]["containers"] = [{"name": "shard"}]
        return raw

    over = {"phase": "Failed", "containerStatuses": [entry("shard", terminated={"exitCode": 75, "message": "{}"})]}
    store = JobStore()
    store.put(PODS, shard(1, "1"))
    store.remove(PODS, shard(3, "1"))
    assert store.farewell(KEY) is None, "removed by force: it said nothing"
    store.put(PODS, shard(4, "2"))
    store.remove(PODS, shard(6, "2", **over))
    assert (gone := store.farewell(KEY)) is not None and gone.number == 2 and gone.exit is not None
    store.put(PODS, shard(7, "3", **over))
    listed(store, "", 9)
    assert (gone := store.farewell(KEY)) is not None and gone.number == 3, "the watch was away, and a list told of the removal"
    made = {"metadata": {"name": KEY.name, "namespace": KEY.namespace, "uid": "run", "resourceVersion": "1"}}
    store.put(JOBS, made)
    store.remove(JOBS, made)
    assert store.farewell(KEY) is None, "nothing is kept of a job that is gone"


def test_a_list_takes_away_what_it_does_not_hold_but_not_what_is_younger() -> None:
    store = JobStore()
    store.put(PODS, pod("job-worker-3-r1", version=3, uid="a"))
    store.put(PODS, pod("job-worker-3-r2", version=4, uid="b"))
    store.put(PODS, pod("job-worker-3-r3", version=9, uid="c"))
    assert listed(store, "", 6, pod("job-worker-3-r2", version=4, uid="b")) == {KEY}
    assert [it.process.uid for it in store.pods(KEY)] == ["b", "c"]


def test_a_list_of_one_namespace_or_one_job_leaves_the_others() -> None:
    store = JobStore()
    other = copy.deepcopy(pod(version=1, uid="x"))
    other["metadata"]["namespace"] = "m"
    store.put(PODS, other)
    store.put(PODS, pod(version=2, uid="y"))
    listed(store, "n", 5)
    assert store.pods(KEY) == [] and len(store.pods(JobKey("m", "job"))) == 1
    listed(store, "m", 5, job=KEY)
    assert len(store.pods(JobKey("m", "job"))) == 1


def test_children_are_found_by_their_label_and_jobs_by_their_name() -> None:
    store = JobStore()
    service = {"metadata": {**pod()["metadata"], "name": "job-shards", "uid": "s"}}
    assert store.put(SERVICES, service) == KEY
    assert [(it.name, it.owner) for it in store.children(SERVICES, KEY)] == [("job-shards", "run")]
    job = {"metadata": {"name": "job", "namespace": "n", "uid": "run", "resourceVersion": "7", "generation": 2}, "spec": {"shards": {}}}
    assert store.put(JOBS, job) == KEY
    found = store.job(KEY)
    assert found is not None and (found.uid, found.generation, found.deleting) == ("run", 2, False)


@given(st.lists(st.tuples(st.sampled_from(["put", "remove", "list"]), st.integers(0, 3), st.integers(1, 30)), max_size=40))
def test_the_store_holds_each_name_once_and_forgets_no_removal(steps: list[tuple[str, int, int]]) -> None:
    store = JobStore()
    gone: dict[str, int] = {}
    for what, which, version in steps:
        uid = f"{which}-{version // 10}"
        raw = pod(f"job-worker-3-r{which}", version=version, uid=uid)
        if what != "remove" and gone.get(uid, version) < version:
            del gone[uid]  # it had only lost its label
        if what == "put":
            store.put(PODS, raw)
        elif what == "remove":
            store.remove(PODS, raw)
            gone[uid] = version
        else:
            listed(store, "", version, raw)
        names = [it.process.name for it in store.pods(KEY)]
        assert len(set(names)) == len(names)
        assert not gone.keys() & {it.process.uid for it in store.pods(KEY)}


def test_a_proxy_that_is_injected_first_is_not_taken_for_the_trained_container() -> None:
    raw = pod(phase="Running", containerStatuses=[entry("proxy", running={"startedAt": AT}), entry("train", terminated={"exitCode": 3})])
    raw["metadata"]["annotations"] = {ANNOTATION_CONTAINER: "train"}
    raw["spec"]["containers"] = [{"name": "proxy"}, {"name": "train"}]
    seen = parse_pod(raw)
    assert seen is not None and seen.process.exit is not None and seen.process.exit.code == 3
    assert seen.process.lingering and seen.process.phase == "Failed"


def test_events_are_read_of_as_many_slow_pods_as_a_status_shows() -> None:
    """Four hundred pods that wait for an image are four hundred questions otherwise."""
    now = (unix(AT) or 0.0) + SLOW_START_SECONDS + 1

    def slow(role: str, index: int, **status: Any) -> Any:
        raw = pod(f"job-{role}-{index}", uid=f"{role}-{index}", phase="Pending", conditions=[condition("PodScheduled")], **status)
        raw["metadata"]["labels"] |= {LABEL_ROLE: role, LABEL_INDEX: str(index)}
        view = parse_pod(raw)
        assert view is not None
        return view

    started = slow("worker", 0, containerStatuses=[entry("worker", running={"startedAt": AT})])
    views = [*(slow("worker", index) for index in range(400, 0, -1)), started, slow("shard", 3)]
    assert slow_and_shown(views, now) == {"shard-3", *(f"worker-{index}" for index in range(1, 9))}
    assert slow_and_shown(views, now - 2) == frozenset(), "none is slow yet"


@pytest.mark.parametrize(("text", "seconds"), [(None, 0), ("40", 40), ("-1", 0), ("soon", 0), ("9" * 30, 0)])
def test_how_long_a_start_was_held_back_stands_on_its_pod(text: str | None, seconds: int) -> None:
    raw = pod()
    raw["metadata"]["annotations"] = {} if text is None else {ANNOTATION_WAITED: text}
    view = parse_pod(raw)
    assert view is not None and view.process.waited == seconds
