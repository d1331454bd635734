"""Series of the operator's metrics, as Prometheus scrapes them, and whether an alert fires at some minute of them.

Values are those of promtool: `0+60x9` is 0, 60, … 540, one a minute; `_x5` are five minutes without a sample.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One recording, and what it comes to."""

    name: str
    alert: str
    series: dict[str, str]
    minute: int
    firing: int
    """How many alerts of that name fire then."""


def of(metric: str, instance: str = "old", **labels: str) -> str:
    """A series of a job, as one replica of the operator exposes it."""
    told = {"namespace": "a", "job": "one", **labels, "instance": instance, "pod": f"psjob-{instance}"}
    return _series(metric, told)


def failed(values: str, instance: str = "old") -> dict[str, str]:
    return {of("psjob_job_phase", instance, phase="Failed"): values}


def ended(values: str, instance: str = "old") -> dict[str, str]:
    return {of("psjob_job_completion_time_seconds", instance): values}


def age(values: str, interval: int = 30) -> dict[str, str]:
    count = 400
    return {of("psjob_job_checkpoint_age_seconds"): values, of("psjob_job_checkpoint_interval_seconds"): f"{interval}x{count}"}


def restarts(values: str, instance: str = "old", cause: str = "Error") -> dict[str, str]:
    return {of("psjob_job_restarts_total", instance, cause=cause): values}


def operator(metric: str, values: str, instance: str = "old", **labels: str) -> dict[str, str]:
    told = {**labels, "instance": instance}
    return {_series(metric, told): values}


def _series(metric: str, labels: dict[str, str]) -> str:
    return metric + "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


CASES: tuple[Case, ...] = (
    Case("a job fails", "PSJobFailed", failed("_x10 1x50") | ended("_x10 600x50"), 12, 1),
    Case("it is told for an hour", "PSJobFailed", failed("_x10 1x90") | ended("_x10 600x90"), 75, 0),
    Case(
        "the operator is rolled out later",
        "PSJobFailed",
        failed("1x100 _x30") | ended("60x100 _x30") | failed("_x101 1x29", "new") | ended("_x101 60x29", "new"),
        110,
        0,
    ),
    Case(
        "the operator is rolled out within the hour",
        "PSJobFailed",
        failed("1x20 _x40") | ended("60x20 _x40") | failed("_x19 1x40", "new") | ended("_x19 60x40", "new"),
        20,
        1,
    ),
    Case("the operator was away for a while", "PSJobFailed", failed("1x20 _x30 1x60") | ended("60x20 _x30 60x60"), 90, 0),
    Case("a job is complete", "PSJobFailed", {of("psjob_job_phase", phase="Complete"): "1x30"} | ended("60x30"), 10, 0),
    Case("no checkpoint for more than an hour", "PSJobCheckpointOld", age("0+60x100"), 70, 1),
    Case("checkpoints every two hours", "PSJobCheckpointOld", age("0+60x119 0+60x119", 7200), 110, 0),
    Case("two of them are missing", "PSJobCheckpointOld", age("0+60x300", 7200), 250, 1),
    Case("a job that is resumed after hours", "PSJobCheckpointOld", age("0+60x20 _x200 0+60x50"), 255, 0),
    Case("eleven restarts in an hour", "PSJobRestartStorm", restarts("0+1x20"), 20, 1),
    Case("five restarts in an hour", "PSJobRestartStorm", restarts("0+1x5 5x60"), 40, 0),
    Case("restarts by several causes", "PSJobRestartStorm", restarts("0+1x7 7x60") | restarts("0+1x7 7x60", cause="Hung"), 30, 1),
    Case("old restarts after a rollout", "PSJobRestartStorm", restarts("20x60 _x60") | restarts("_x61 20x59", "new"), 70, 0),
    Case("a storm that continues through a rollout", "PSJobRestartStorm", restarts("0+1x6 _x60") | restarts("_x7 6+1x10", "new"), 18, 1),
    Case("no step after a loss", "PSJobInterrupted", {of("psjob_job_interrupted_seconds"): "0+60x30"}, 18, 1),
    Case("a recovery in ten minutes", "PSJobInterrupted", {of("psjob_job_interrupted_seconds"): "0+60x10 _x20"}, 18, 0),
    Case("two releases", "PSJobContended", {of("psjob_job_contended"): "1x20", of("psjob_job_contended", "new"): "1x20"}, 10, 1),
    Case("a contest that ends", "PSJobContended", {of("psjob_job_contended"): "1x3 0x20"}, 10, 0),
    Case("no operator", "PSJobOperatorDown", operator("psjob_operator_leader", "0x30"), 10, 1),
    Case(
        "a rollout of the operator",
        "PSJobOperatorDown",
        operator("psjob_operator_leader", "1x10 _x20") | operator("psjob_operator_leader", "_x12 1x20", "new"),
        14,
        0,
    ),
    Case(
        "a namespace is refused",
        "PSJobOperatorNamespaceRefused",
        operator("psjob_operator_namespace_refused", "1x20", namespace="b")
        | operator("psjob_operator_namespace_refused", "1x20", namespace="c"),
        10,
        2,
    ),
    Case("an upgrade of the API server", "PSJobOperatorNamespaceRefused", operator("psjob_operator_namespace_refused", "1x2 _x20"), 12, 0),
    Case("a job waits for its turn", "PSJobOperatorQueueStuck", operator("psjob_operator_queue_oldest_seconds", "0+60x20"), 12, 1),
    Case("turns are taken", "PSJobOperatorQueueStuck", operator("psjob_operator_queue_oldest_seconds", "10x20"), 12, 0),
    Case(
        "requests fail",
        "PSJobOperatorApiErrors",
        operator("psjob_operator_api_errors_total", "0+10x30", code="500") | operator("psjob_operator_api_requests_total", "0+50x30"),
        20,
        1,
    ),
    Case(
        "conflicts are none",
        "PSJobOperatorApiErrors",
        operator("psjob_operator_api_errors_total", "0+10x30", code="409") | operator("psjob_operator_api_requests_total", "0+50x30"),
        20,
        0,
    ),
    Case("the first fault", "PSJobOperatorFault", operator("psjob_operator_turns_total", "0x5 1x10", result="error"), 8, 1),
    Case("a fault half an hour ago", "PSJobOperatorFault", operator("psjob_operator_turns_total", "0x5 1x60", result="error"), 40, 0),
)
