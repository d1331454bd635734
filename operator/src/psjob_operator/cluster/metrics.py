"""The one table of the operator's metrics: what Prometheus reads, what docs/metrics.md lists, what rules and dashboard may name.

Names, types and labels are public. A label's values are bounded: by the API server's resources, by words of this operator, by the jobs
that exist. Never a pod, a message or a number goes into a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
JOB = ("namespace", "job")


@dataclass(frozen=True)
class Metric:
    """One metric; a counter's name ends in `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper edges of a histogram of ours; empty where shard 0 brings its own."""


TURN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)
RECOVERY_SECONDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, 600.0, 1800.0)

INFO = Metric("psjob_operator_info", "gauge", "1; the label tells the operator's version.", ("version",))
READY = Metric(
    "psjob_operator_ready",
    "gauge",
    "1 once the CRD is served and every watched kind was listed and may be read in one namespace at least, else 0.",
)
REFUSED = Metric(
    "psjob_operator_namespace_refused",
    "gauge",
    "1 for each watched namespace in which the API server does not let the operator read something: nothing is done there. Empty: all.",
    ("namespace",),
)
LEADER = Metric("psjob_operator_leader", "gauge", "1 while this operator acts on jobs, 0 while it stands by.")
QUEUE_JOBS = Metric("psjob_operator_queue_jobs", "gauge", "Jobs that wait for their turn.")
QUEUE_OLDEST = Metric("psjob_operator_queue_oldest_seconds", "gauge", "How long the job that waits longest has waited; 0 where none waits.")
TURNS_RUNNING = Metric("psjob_operator_turns_running", "gauge", "Turns under way: jobs that are looked at now.")
BACKOFF_JOBS = Metric("psjob_operator_backoff_jobs", "gauge", "Jobs whose last turn failed and is tried again after a growing pause.")
TURNS = Metric(
    "psjob_operator_turns_total",
    "counter",
    "Turns by result: ok, api (the API server refused or gave no answer), error (a fault of the operator).",
    ("result",),
)
TURN = Metric("psjob_operator_turn_seconds", "histogram", "Seconds of a turn.", (), TURN_SECONDS)
REQUESTS = Metric(
    "psjob_operator_api_requests_total",
    "counter",
    "Requests to the API server; the code is that of HTTP, or none where no answer came. Watches are counted when they are opened.",
    ("verb", "resource", "code"),
)
REQUEST = Metric(
    "psjob_operator_api_request_seconds", "histogram", "Seconds of a request, watches left out.", ("verb", "resource"), REQUEST_SECONDS
)
ERRORS = Metric(
    "psjob_operator_api_errors_total",
    "counter",
    "Requests that were refused or not answered, by code and by the API server's reason (Timeout and Connection are the operator's own).",
    ("code", "reason"),
)
RELISTS = Metric(
    "psjob_operator_relists_total", "counter", "Lists before a new watch: the first one, and one whenever a watch was lost.", ("resource",)
)
WATCH_EVENTS = Metric("psjob_operator_watch_events_total", "counter", "Objects that lists and watches brought.", ("resource",))
OBJECTS = Metric("psjob_operator_objects", "gauge", "Objects that the operator knows.", ("resource",))
PULLS = Metric(
    "psjob_operator_progress_pulls_total",
    "counter",
    "Questions to shard 0 of a job, by result: ok, missed (out of reach, or not proven).",
    ("result",),
)
RECOVERY = Metric(
    "psjob_recovery_seconds",
    "histogram",
    "Seconds from when the loss of a process was seen to the first step after it, of all jobs.",
    ("cause",),
    RECOVERY_SECONDS,
)
JOBS = Metric("psjob_jobs", "gauge", "Jobs.", ("namespace", "phase"))

PHASE = Metric("psjob_job_phase", "gauge", "1 for the phase that the job is in; the others have no series.", (*JOB, "phase"))
SHARDS = Metric("psjob_job_shards", "gauge", "Shards declared.", JOB)
SHARDS_READY = Metric("psjob_job_shards_ready", "gauge", "Shards that serve; 0 of a job that has failed.", JOB)
WORKERS = Metric("psjob_job_workers", "gauge", "Workers declared.", JOB)
WORKERS_READY = Metric("psjob_job_workers_ready", "gauge", "Workers that run, or have succeeded; 0 of a job that has failed.", JOB)
RESTARTS = Metric("psjob_job_restarts_total", "counter", "Starts beyond the first, by cause.", (*JOB, "cause"))
CONTENDED = Metric(
    "psjob_job_contended", "gauge", "1 while another operator, or another controller, keeps changing an object of the job.", JOB
)
FAILURES = Metric("psjob_job_failures_counted", "gauge", "Failures that count against backoffLimit now.", JOB)
INTERRUPTED = Metric(
    "psjob_job_interrupted_seconds", "gauge", "How long training has made no step since a loss; absent while it goes on.", JOB
)
LAST_RECOVERY = Metric("psjob_job_last_recovery_seconds", "gauge", "Seconds that the last recovery took.", JOB)
STEPS_LOST = Metric("psjob_job_steps_lost_total", "counter", "Steps done again after going back to a checkpoint.", JOB)
UPDATES_LOST = Metric("psjob_job_updates_lost_total", "counter", "Updates lost with lost shards (async, bounded).", JOB)
CHECKPOINT_AGE = Metric(
    "psjob_job_checkpoint_age_seconds",
    "gauge",
    "Age of the last committed checkpoint of a job that is Running or Recovering; without one, time since the job began.",
    JOB,
)
CHECKPOINT_INTERVAL = Metric("psjob_job_checkpoint_interval_seconds", "gauge", "Time between two checkpoints, as the job asks for it.", JOB)
FINISHED = Metric("psjob_job_completion_time_seconds", "gauge", "Unix time at which the job was complete or failed.", JOB)
CHECKPOINT_STEP = Metric("psjob_job_checkpoint_step", "gauge", "Step of the last committed checkpoint.", JOB)
CHECKPOINT_BYTES = Metric("psjob_job_checkpoint_bytes", "gauge", "Size of its files together.", JOB)
STAGE_WORKERS_READY = Metric("psjob_job_stage_workers_ready", "gauge", "Workers of a stage that run, or have succeeded.", (*JOB, "stage"))
STAGE_STEP = Metric("psjob_job_stage_step", "gauge", "Lowest complete step of a stage's workers.", (*JOB, "stage"))
STAGE_IDLE = Metric(
    "psjob_job_stage_idle_share",
    "gauge",
    "Part of the time of the last 32 steps in which a stage's workers waited for activations, gradients or shards, 0 to 1: their mean.",
    (*JOB, "stage"),
)
STAGE_DELAY = Metric(
    "psjob_job_stage_delay_updates",
    "gauge",
    "Updates between the weights that a stage's gradients were computed on and those they are applied to; 0 where steps are flushes.",
    (*JOB, "stage"),
)
STAGE_MEMORY = Metric(
    "psjob_job_stage_peak_memory_bytes",
    "gauge",
    "The most RAM that one worker of a stage has held since its process began.",
    (*JOB, "stage"),
)
STEP = Metric("psjob_job_step", "gauge", "Lowest complete step of all workers. It goes back where a recovery undoes steps.", JOB)
RATE = Metric("psjob_job_steps_per_second", "gauge", "Steps a second, pauses such as a restart left out.", JOB)
LOSS = Metric("psjob_job_loss", "gauge", "Last loss that the script reported.", JOB)
WAIT_SHARE = Metric(
    "psjob_job_wait_share",
    "gauge",
    "Part of the time in which scripts waited for shards and other workers, 0 to 1: the mean of all workers.",
    JOB,
)
PUSH_BYTES = Metric("psjob_job_push_bytes_total", "counter", "Bytes of pushes as they travelled, to all shards.", JOB)
PUSHES = Metric("psjob_job_pushes_total", "counter", "Pushes that counted on shard 0: one a worker and step.", JOB)
PROGRESS_AGE = Metric(
    "psjob_job_progress_age_seconds", "gauge", "Age of what shard 0 last told: of the other series that come from it.", JOB
)
LAG = Metric(
    "psjob_push_lag",
    "histogram",
    "Updates between the weights that a gradient was computed on and those it is applied to, of all shards.",
    JOB,
)
GAP = Metric(
    "psjob_push_gap", "histogram", "Root mean square of what the weights have moved between, estimated on samples of all shards'.", JOB
)

OF_OPERATOR = (
    INFO, READY, REFUSED, LEADER, QUEUE_JOBS, QUEUE_OLDEST, TURNS_RUNNING, BACKOFF_JOBS, TURNS, TURN, REQUESTS, REQUEST, ERRORS, RELISTS,
    WATCH_EVENTS, OBJECTS, PULLS,
)  # fmt: skip
OF_ALL_JOBS = (JOBS, RECOVERY)
OF_A_JOB = (
    PHASE, SHARDS, SHARDS_READY, WORKERS, WORKERS_READY, RESTARTS, CONTENDED, FAILURES, INTERRUPTED, LAST_RECOVERY, STEPS_LOST,
    UPDATES_LOST, CHECKPOINT_AGE, CHECKPOINT_INTERVAL, CHECKPOINT_STEP, CHECKPOINT_BYTES, FINISHED, STAGE_WORKERS_READY,
)  # fmt: skip
TOLD_BY_SHARD_0 = (
    STEP, RATE, LOSS, WAIT_SHARE, PUSH_BYTES, PUSHES, PROGRESS_AGE, LAG, GAP, STAGE_STEP, STAGE_IDLE, STAGE_DELAY, STAGE_MEMORY,
)  # fmt: skip
METRICS = (*OF_OPERATOR, *OF_ALL_JOBS, *OF_A_JOB, *TOLD_BY_SHARD_0)
