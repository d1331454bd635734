"""Deleting processes: those that were replaced, and those left when the job has ended."""

from __future__ import annotations

from psjob_operator.plan import hung
from psjob_operator.plan.actions import DeleteProcess
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.raising import Raising
from psjob_operator.plan.snapshot import Process

UNRESPONSIVE_GRACE = 1
"""As the liveness probe's: a process that does not answer does not save either."""


def after_finish(facts: Facts) -> tuple[DeleteProcess, ...]:
    """What cleanPodPolicy says: processes still running, all of them, or none."""
    policy = facts.snapshot.spec.run_policy.clean_pod_policy
    if policy == "None":
        return ()
    return tuple(
        DeleteProcess(pod.name, pod.uid, why="the job has ended")
        for pod in facts.pods
        if pod.deleting is None and (policy == "All" or not _ended(pod))
    )


def replaced(facts: Facts, raising: Raising) -> tuple[DeleteProcess, ...]:
    """Replaced processes that still run, and ended ones but for the newest of each seat (its log is what people ask for)."""
    numbers = {(seat.role, seat.index): raising.number(seat) for seat in facts.seats}
    newest: dict[tuple[str, int], int] = {}
    old = [pod for pod in facts.pods if pod.deleting is None and pod.number < numbers.get((pod.role, pod.index), 0)]
    for pod in old:
        if _ended(pod):
            newest[pod.role, pod.index] = max(pod.number, newest.get((pod.role, pod.index), 0))
    return tuple(
        DeleteProcess(pod.name, pod.uid, _grace(facts, pod), why="it was replaced")
        for pod in sorted(old, key=lambda pod: (pod.role, pod.index, pod.number))
        if not _ended(pod) or pod.number < newest[pod.role, pod.index]
    )


def _grace(facts: Facts, pod: Process) -> int | None:
    if pod.role == "worker" and facts.hung.get(pod.index, (0, 0.0))[0] == pod.number:
        return hung.GRACE_SECONDS
    return UNRESPONSIVE_GRACE if pod.unresponsive else None


def _ended(pod: Process) -> bool:
    return pod.phase in ("Succeeded", "Failed") and not pod.lingering
