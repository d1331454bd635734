"""Figures of a run as rows: what was measured, what is wanted of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Run = Mapping[str, Any]


def rows(run: Run) -> list[tuple[str, str, str]]:
    """(measure, figure, wanted) of each row that this run has."""
    found = []
    for title, read, wanted in ROWS:
        try:
            figure = read(run)
        except (KeyError, ZeroDivisionError, TypeError):
            continue
        found.append((title, figure, wanted))
    return found


def table(run: Run) -> str:
    """As markdown."""
    head = f"{run['jobs']} jobs x {run['shards']} + {run['workers']} pods, {run['about']}"
    return f"{head}\n\n| measure | figure | wanted |\n| --- | --- | --- |\n" + "\n".join(
        f"| {title} | {figure} | {wanted} |" for title, figure, wanted in rows(run)
    )


def share_of_bare(run: Run, bare: str = "bare") -> float:
    """Pods created a second, as a share of the bare client's."""
    return float(run["burst"]["podsPerSecond"] / run[bare]["podsPerSecond"])


def cpu_per_pod(run: Run, who: str = "operator") -> float:
    """Milliseconds of CPU for each pod of the burst."""
    return float(1000 * run["phases"]["burst"]["cpu"][who] / run["burst"]["pods"])


def requests_per_pod(run: Run) -> float:
    """The operator's requests over the whole run, for each pod made."""
    asked = sum(sum(phase["requests"].values()) for phase in run["phases"].values())
    return float(asked / run["podsMade"])


def _share(bare: str) -> Callable[[Run], str]:
    return lambda run: f"{run['burst']['podsPerSecond']:.0f} ({share_of_bare(run, bare):.2f} of {run[bare]['podsPerSecond']:.0f})"


def _status(bare: str) -> Callable[[Run], str]:
    def read(run: Run) -> str:
        mine, theirs = run["burst"]["allStatusRunning"], run[bare]["allRunning"]
        return f"{mine:.1f} s ({mine / theirs:.2f} x {theirs:.1f} s)"

    return read


def _quantiles(*path: str) -> Callable[[Run], str]:
    def read(run: Run) -> str:
        found: Any = run
        for word in path:
            found = found[word]
        return f"{found['p50']:.2f} / {found['p95']:.2f} / {found['p99']:.2f} s"

    return read


def _requests(phase: str, per: Callable[[Run], float]) -> Callable[[Run], str]:
    return lambda run: f"{sum(run['phases'][phase]['requests'].values()) / per(run):.2f}"


ROWS: tuple[tuple[str, Callable[[Run], str], str], ...] = (
    ("pods created a second (share of the bare client's)", _share("bare"), ">= 0.40"),
    ("the same, of a bare client's that makes the very same pods", _share("alike"), ""),
    ("all jobs' status Running (times the bare client's pods)", _status("bare"), "<= 1.6 x"),
    ("the same, times a bare client's very same pods", _status("alike"), ""),
    ("a job's pods are there, p50 / p95 / p99", _quantiles("burst", "toPods"), ""),
    ("a job's status Running, p50 / p95 / p99", _quantiles("burst", "toStatusRunning"), "p50 <= 3 s"),
    ("a worker of each job lost at once -> new pod", _quantiles("lose", "toNewPod"), "p50 <= 0.5 s, p99 <= 1.5 s"),
    ("superfluous pods", lambda run: str(run["lose"]["superfluous"]), "0"),
    ("last process ended -> Complete", _quantiles("finish", "toComplete"), ""),
    ("operator's requests a pod, whole life", lambda run: f"{requests_per_pod(run):.2f}", "<= 1.4"),
    ("requests a pod, burst", _requests("burst", lambda run: run["burst"]["pods"]), ""),
    ("requests a lost worker", _requests("lose", lambda run: run["lose"]["deleted"]), ""),
    ("requests a job at its end", _requests("finish", lambda run: run["jobs"]), ""),
    ("operator's CPU a pod created", lambda run: f"{cpu_per_pod(run):.1f} ms", "<= 3.5 ms"),
    ("API server's CPU a pod created", lambda run: f"{cpu_per_pod(run, 'kube-apiserver'):.1f} ms", ""),
    ("requests while all run and nothing happens", _requests("idle", lambda run: 1), "0"),
    ("RSS: start, burst, end", lambda run: " / ".join(f"{run['rss'][at]:.0f}" for at in ("start", "burst", "end")) + " MiB", ""),
    ("foreign cores in the burst (noise)", lambda run: f"{run['phases']['burst']['foreign_cores']:.2f}", ""),
)
