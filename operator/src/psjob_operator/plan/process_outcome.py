"""What became of one process, and whether that counts against backoffLimit: the table of failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from signal import SIGKILL, SIGTERM
from typing import Any, Literal

from psjob_operator import contract
from psjob_operator.api.spec import FailureRule
from psjob_operator.api.status import short
from psjob_operator.contract import (
    EXIT_CHECKPOINT_LOST,
    EXIT_DEVICE_LOST,
    EXIT_DONE,
    EXIT_FENCED,
    EXIT_HUNG,
    EXIT_REFUSED,
    EXIT_RETRY,
)  # fmt: skip
from psjob_operator.plan.observed_state import Exit, Process, Role

SIGNALLED = 128
"""The exit code of a process that signal n ended is this and n."""
FROM_OUTSIDE = frozenset({SIGKILL, SIGTERM})
"""Signals that say nothing of the program that they end."""
UNSEEN = "it left in the middle of training: by os._exit, by a crash that a pipe hides, or since a child process trained"
"""Why a worker may have ended with exit code 0 without having finished."""
UNSEEN_END = "ContainerStatusUnknown"
"""The cause of a loss whose end nobody saw: its node was reset, or its container runtime was restarted without it."""
UNFINISHED = "UnfinishedExit"
"""The cause of a loss that is found long after the process ended: as soon as the job shows that its script was not through."""
Kind = Literal["absent", "waiting", "running", "done", "lost", "fatal"]
OWN_USE = ("was using", "exceed")
"""Words of the kubelet in an eviction for what the pod itself used; a victim of others' use lacks them."""
NOT_ADMITTED = (
    "NodeAffinity", "NodeName", "NodePorts", "TaintToleration", "TopologyAffinityError", "SMTAlignmentError", "InvalidNodeInfo",
    "UnexpectedAdmissionError",
)  # fmt: skip
"""Reasons by which a kubelet refuses a pod that a scheduler gave it: nothing of it ran. `OutOf…` is another."""
UNCOUNTED = {
    "PreemptionByScheduler": "Preempted",
    "Preempting": "Preempted",
    "EvictionByEvictionAPI": "Drained",
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
    "NodeLost": "NodeLost",
    "NodeShutdown": "NodeShutdown",
    "Shutdown": "NodeShutdown",
    "Terminated": "NodeShutdown",
    "TerminationByKubelet": "TerminationByKubelet",
} | {reason: reason for reason in NOT_ADMITTED}
"""What was done to a pod, not by it: pod reason (or DisruptionTarget reason) -> cause shown."""


@dataclass(frozen=True)
class ProcessOutcome:
    """What became of a process."""

    kind: Kind
    cause: str = ""
    """One CamelCase word: key of status.restarts.causes, or the reason of a fatal end."""
    counted: bool = False
    message: str = ""
    fenced_by: int = 0
    """View that a fenced shard met, start that a fenced worker met; 0 where it was not fenced."""
    each: bool = False
    """A rule says that it counts by itself, whatever was lost together with it."""
    rule: int | None = None
    """Index of the rule of runPolicy.podFailurePolicy.rules that decided; None where none did."""


def outcome_of(process: Process | None) -> ProcessOutcome:
    """The outcome of a process that should be there."""
    if process is None:
        return ProcessOutcome("absent", "Missing")
    if process.exit is not None:
        return _ended(process, process.exit)
    if process.phase == "Succeeded":
        return ProcessOutcome("done")
    if process.phase == "Failed":
        return _failed_unstarted(process)
    if process.deleting is not None or process.gone:
        return ProcessOutcome("lost", _disruption(process) or ("NodeLost" if process.node_lost else "Deleted"), message=process.pod_message)
    if process.node_lost:
        return ProcessOutcome("lost", "NodeLost", message=f"node {process.node} is out of reach")
    if process.unresponsive:
        return ProcessOutcome("lost", "Unresponsive", counted=True, message="no heartbeat for spec.shards.progressDeadlineSeconds")
    running = process.started is not None or (process.phase == "Running" and process.ready)
    return ProcessOutcome("running" if running else "waiting")


def stopped_on_request(process: Process) -> ProcessOutcome | None:
    """The outcome of a process that ended with exit code 0 when it was asked to end; None if it was not.

    Whether a script was through by then its exit code does not say: those with a handler of SIGTERM end with 0 too.
    """
    disruption = _disruption(process)
    if not disruption and process.deleting is None:
        return None
    return ProcessOutcome("lost", disruption or "Deleted", message=process.pod_message or "exit code 0 after it was asked to end")


def unfinished_exit() -> ProcessOutcome:
    """The outcome of a worker that ended with exit code 0, though shard 0 has not heard that its script came to its end."""
    return ProcessOutcome("lost", UNFINISHED, counted=True, message=f"exit code 0: {UNSEEN}")


def hung_worker(seconds: float) -> ProcessOutcome:
    """The outcome of a worker that shard 0 names: it has made no step for so long while others wait for it."""
    return ProcessOutcome("lost", "Hung", counted=True, message=f"it has made no step for {seconds:.0f} s while others wait for it")


def apply_failure_rules(rules: Sequence[FailureRule], role: Role, process: Process | None, found: ProcessOutcome) -> ProcessOutcome:
    """What the job's own rules make of `found`: the first of them that matches holds."""
    number = matching_rule(rules, role, process, found)
    if number is None:
        return found
    rule = rules[number]
    if rule.action == "FailJob":
        why = f"{found.cause}: {found.message}" if found.message else found.cause
        message = f"spec.runPolicy.podFailurePolicy.rules[{number}] says FailJob: {why}"
        return ProcessOutcome("fatal", "PodFailurePolicy", message=message, rule=number)
    return replace(found, counted=rule.action == "Count", each=rule.per == "Process", rule=number)


def matching_rule(rules: Sequence[FailureRule], role: Role, process: Process | None, found: ProcessOutcome) -> int | None:
    """Index of the first rule that a lost process meets; None where there is none."""
    if found.kind != "lost":
        return None
    return next((number for number, rule in enumerate(rules) if _meets(rule, role, process, found)), None)


def _meets(rule: FailureRule, role: Role, process: Process | None, found: ProcessOutcome) -> bool:
    # The exit code of a process that was preempted or deleted is what was done to it; the runtime's own codes have causes.
    own = found.counted and found.cause not in ("Hung", "DeviceLost", UNFINISHED)
    exit = process.exit if process is not None and own else None
    code = 0 if exit is None else exit.code or SIGNALLED + exit.signal
    signal = 0 if exit is None else exit.signal or code - SIGNALLED
    codes = rule.on_exit_codes
    conditions = () if process is None else process.conditions
    return (
        rule.role in ("any", role)
        and (codes is None or (exit is not None and (code in codes.values) == (codes.operator == "In")))
        and (not rule.on_pod_conditions or any((it.type, it.status) in conditions for it in rule.on_pod_conditions))
        and (not rule.on_signals or (exit is not None and signal in rule.on_signals))
        and (not rule.on_reasons or found.cause in rule.on_reasons)
    )


def _ended(process: Process, exit: Exit) -> ProcessOutcome:
    if exit.code == EXIT_DONE and not exit.signal:
        # The script has caught the refusal, or it was made in a thread, and ended as if nothing had been.
        refused = process.role == "worker" and of_the_runtime(exit) and _sentence(exit)
        return ProcessOutcome("fatal", "Refused", message=refused) if refused else ProcessOutcome("done")
    ours = process.role == "shard" or of_the_runtime(exit)
    if ours and (exit.code == EXIT_REFUSED or read_message(exit).get("refused") is True):
        return ProcessOutcome("fatal", "Refused", message=_sentence(exit))
    if exit.code == EXIT_CHECKPOINT_LOST and process.role == "shard":
        return ProcessOutcome("fatal", "CheckpointLost", message=_sentence(exit))
    if exit.code == EXIT_HUNG and process.role == "worker" and ours:
        return ProcessOutcome("lost", "Hung", counted=True, message=_sentence(exit))
    if exit.code == EXIT_DEVICE_LOST and process.role == "worker" and ours:
        return ProcessOutcome("lost", "DeviceLost", counted=True, message=_sentence(exit))
    if exit.code == EXIT_FENCED and ours:
        message = exit.message if process.role == "shard" else _sentence(exit)
        return ProcessOutcome("lost", "Fenced", message=message, fenced_by=_fenced_by(process, exit))
    if process.pod_reason == "Evicted":
        return _evicted(process)
    if exit.reason == "OOMKilled":
        return ProcessOutcome("lost", "OOMKilled", counted=True, message=_words(exit))
    disruption = _disruption(process)
    if disruption or process.deleting is not None:
        return ProcessOutcome("lost", disruption or "Deleted", message=process.pod_message)
    if exit.code == EXIT_RETRY and ours:
        return ProcessOutcome("lost", "Retry", message=_sentence(exit))
    if _unseen(exit):
        where = f" on node {process.node}" if process.node else ""
        return ProcessOutcome(
            "lost", UNSEEN_END, message=f"nobody saw how it ended{where}: the node or its container runtime was restarted"
        )
    cause = exit.reason if exit.reason and exit.reason != "Completed" else "Error"
    return ProcessOutcome("lost", cause, counted=True, message=_words(exit))


def _unseen(exit: Exit) -> bool:
    """The code is not the process's own: containerd and the kubelet give it to a container that they do not find any more."""
    return exit.reason == "ContainerStatusUnknown" or (exit.reason == "Unknown" and exit.code == 255)


def _failed_unstarted(process: Process) -> ProcessOutcome:
    if process.pod_reason == "Evicted":
        return _evicted(process)
    disruption = _disruption(process)
    if disruption or process.deleting is not None:
        return ProcessOutcome("lost", disruption or "Deleted", message=process.pod_message)
    if process.init_exit is not None and process.init_exit.code != 0:
        return ProcessOutcome("lost", "InitFailed", counted=True, message=f"an init container ended: {_words(process.init_exit)}")
    return ProcessOutcome("lost", process.pod_reason or "Error", counted=True, message=process.pod_message)


def _evicted(process: Process) -> ProcessOutcome:
    own = any(word in process.pod_message for word in OWN_USE)
    return ProcessOutcome("lost", "Evicted" if own else "NodePressure", counted=own, message=process.pod_message)


def _disruption(process: Process) -> str:
    if process.pod_reason.startswith("OutOf"):
        return process.pod_reason
    return UNCOUNTED.get(process.pod_reason, "")


def _words(exit: Exit) -> str:
    """`exit code 1`, `signal 9`, and the last of what it said."""
    what = f"signal {exit.signal}" if exit.signal else f"exit code {exit.code}"
    said = _sentence(exit) or exit.log_tail
    if (exit.signal or exit.code - SIGNALLED) in FROM_OUTSIDE:  # the last line of a log is about something else then
        said = "" if exit.message.endswith("\n") else _sentence(exit)
    # The last line says most: Python's error, after its traceback.
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    reason = f" ({exit.reason})" if exit.reason not in ("", "Error", "Completed", "Signal") else ""
    return f"{what}{reason}" + (f": {short(last, 120)}" if last else "")


def _sentence(exit: Exit) -> str:
    """What the process said of its end: its `error`, or a message that is not psjob's own JSON."""
    said = read_message(exit)
    if said:
        return said["error"] if isinstance(said.get("error"), str) else ""
    return exit.message.strip()


def of_the_runtime(exit: Exit) -> bool:
    """Whether the runtime gave a worker's exit code: then its message is one of contract.ENDING_KEYS. A script's own 75 or 77 has none."""
    said = read_message(exit)
    # The runtime writes no newline; the kubelet gives the end of the log, a line of JSON perhaps, where no message was left.
    return bool(said) and said.keys() <= contract.ENDING_KEYS and not exit.message.endswith("\n")


def _fenced_by(process: Process, exit: Exit) -> int:
    fenced = read_message(exit).get("fenced")
    met = fenced.get("term" if process.role == "shard" else "start") if isinstance(fenced, dict) else None
    # The message comes from a pod: a number far off must not carry ours out of every later operator's reach.
    return met if isinstance(met, int) and not isinstance(met, bool) and 0 < met < 2**31 - 2 else 0


def read_message(exit: Exit) -> dict[str, Any]:
    """The termination message of a psjob process; empty where it is none."""
    try:
        read = json.loads(exit.message)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
