"""docs/reasons.md: every reason, Event, cause, label and annotation that the operator writes. A test reads the code for what is missing."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, tuple[str, str]] = {
    "WaitingForOperator": ("Ready, Reconciling", "no operator has seen the job yet"),
    "Starting": ("Ready, Reconciling", "processes are made, or restore from a checkpoint"),
    "Running": ("Ready", "all shards and workers run"),
    "Recovering": ("Ready, Reconciling", "a lost process is started again; the message says which and why"),
    "Suspending": ("Ready, Reconciling", "processes make a last checkpoint and end"),
    "Suspended": ("Ready, Suspended", "no process is left"),
    "Resumed": ("Suspended", "False: the job was suspended and continues"),
    "NotSuspended": ("Suspended", "False: a suspension is asked for, and processes are still there, or the job has ended"),
    "NameConflict": ("Ready, Reconciling", "an object with a name that the job needs is not the job's"),
    "WaitingForJob": ("Ready, Reconciling", "the job that spec.checkpoint.resumeFrom names is not there, or has no checkpoint yet"),
    "CheckpointElsewhere": (
        "Ready, Reconciling",
        "that job has its checkpoints on another volume, or keeps none",
    ),
    "CreateRefused": ("Ready, Reconciling, Degraded", "the API server refuses an object of the job; it is tried again"),
    "NamespaceTerminating": ("Ready, Reconciling", "the namespace is being deleted, and takes no more pods"),
    "ClaimPending": ("Ready, Reconciling, CheckpointReady", "the claim for checkpoints is not bound"),
    "ClaimTerminating": ("CheckpointReady", "the claim with the checkpoints is being deleted, and goes when no pod uses it"),
    "ClaimMissing": ("CheckpointReady", "the claim with the checkpoints is not there"),
    "Ending": ("Ready, Reconciling", "a process waits with its start until shards have made a last checkpoint"),
    "BackOff": ("Ready, Reconciling", "a process that failed waits until it is started again"),
    "Unschedulable": ("Ready, Reconciling", "the scheduler finds no node for a pod"),
    "ImagePullBackOff": ("Ready, Reconciling", "an image cannot be pulled"),
    "SlowStart": ("Ready, Reconciling", "a pod was scheduled and does not start; the message is its newest Event"),
    "Waiting": ("Ready, Reconciling", "a container waits, and the kubelet's word for it is no reason"),
    "TemplateInvalid": ("Ready, Stalled, Failed", "a pod template breaks a rule, or the API server refuses each pod of it"),
    "SpecInvalid": ("Ready, Stalled, Failed", "the spec outside templates breaks a rule that only the operator can see"),
    "TemplateChanged": ("Ready, Stalled", "more than the placement of a run's pods was changed while it was suspended; change it back"),
    "RunOfAnotherVersion": ("Ready, Stalled", "the run was begun by a version that this operator does not serve"),
    "WaitingForMember": ("Ready, Degraded", "a process waits for another"),
    "SidecarCrashing": ("Ready, Degraded", "a sidecar of a pod restarts"),
    "ProgressUnknown": ("Ready, Degraded", "shard 0 does not take the operator's key, or does not prove its answer"),
    "LearningRateHigh": ("Ready, LearningRateHigh", "the learning rate is above what the staleness of pushes tolerates"),
    "NonFiniteGradients": ("Ready, NonFiniteGradients", "a gradient held NaN or inf"),
    "LargePushes": ("Ready, LargePushes", "a push was beyond training.maxPushNorm"),
    "Diverged": ("Ready, Diverged, Complete", "a loss was NaN or inf"),
    "WorkersDiffer": ("Ready, WorkersDiffer, Complete", "weights of workers that should be equal are not"),
    "BuffersDiffer": ("Ready, BuffersDiffer", "buffers of workers that should be equal are not"),
    "DataNotSharded": ("Ready, DataNotSharded", "workers read the same data"),
    "OtherWriter": ("Contended", "another operator or controller keeps changing an object of the job"),
    "Cleared": ("the conditions of warnings", "False: it is over"),
    "Committed": ("CheckpointReady", "a lost shard restores the last checkpoint"),
    "CheckpointProblem": ("CheckpointReady", "checkpoints cannot be written; the message says why"),
    "Disabled": ("CheckpointReady", "spec.checkpoint.disabled is true"),
    "Completed": ("Ready, Complete", "training is done and its last checkpoint is committed"),
    "ShardLost": ("Ready, Stalled, Failed", "a shard is lost and checkpoints are disabled"),
    "WorkerFailed": ("Ready, Stalled, Failed", "a worker has not finished, the shards have, and checkpoints are disabled"),
    "BackoffLimitExceeded": ("Ready, Stalled, Failed", "one failure more than spec.runPolicy.backoffLimit, or than a role's limit"),
    "NeverAttached": ("Ready, Stalled, Failed", "a worker ended with exit code 0 and never called psjob.attach"),
    "DeadlineExceeded": ("Ready, Stalled, Failed", "spec.runPolicy.activeDeadlineSeconds is over"),
    "PendingTimeout": ("Ready, Stalled, Failed", "spec.runPolicy.pendingTimeoutSeconds is over"),
    "Refused": ("Ready, Stalled, Failed", "a process ended with exit code 77: it says that a restart is of no use"),
    "CheckpointLost": ("Ready, Stalled, Failed", "a shard found no checkpoint where one was known (exit code 78)"),
    "PodFailurePolicy": ("Ready, Stalled, Failed", "a rule of spec.runPolicy.podFailurePolicy.rules says FailJob"),
}
"""Reason of a condition -> its conditions, and what it says. Other words are the kubelet's own, of a container that waits."""
EVENTS: Mapping[str, tuple[str, str]] = {
    "Running": ("Normal", "all shards and workers run for the first time, or again after a suspension"),
    "Restarted": ("Normal or Warning", "processes are started again; Warning if that counts against a limit"),
    "Recovered": ("Normal", "training continues after a loss; the message has the time and the cost"),
    "Suspending": ("Normal", "all processes end; shards make a last checkpoint"),
    "Suspended": ("Normal", "no process is left"),
    "Resumed": ("Normal or Warning", "all processes start from the last checkpoint; Warning if there is none"),
    "KeysTaken": ("Warning", "a Secret of the run's keys was there before any pod; new keys are made"),
    "StatusRefused": ("Warning", "the API server refuses the job's status; nothing is started until it takes it"),
    "Contended": ("Warning", "another operator or controller keeps changing an object of the job"),
    "DeleteRefused": ("Warning", "the API server refuses to delete the job whose ttlSecondsAfterFinished is over"),
    "NetworkPolicyRefused": ("Warning", "the job continues without its NetworkPolicy"),
}
"""Reason of an Event -> its type, and when it comes."""
CAUSES: Mapping[str, tuple[str, str]] = {
    "Error": ("yes", "the process ended with an exit code that nothing explains, and its container's reason is no other word"),
    "OOMKilled": ("yes", "it was beyond its memory limit"),
    "InitFailed": ("yes", "an init container failed"),
    "Unresponsive": ("yes", "a shard's status port did not answer for shards.progressDeadlineSeconds"),
    "Hung": ("yes", "a worker made no step for workers.progressDeadlineSeconds while others waited"),
    "DeviceLost": ("yes", "a worker cannot use its GPU any more: an ECC error, an Xid, or a kernel that failed; the message has the words"),
    "UnfinishedExit": ("yes", "a worker ended with exit code 0 in the middle of training"),
    "Evicted": ("yes", "the kubelet evicted the pod for what it used itself"),
    "NodePressure": ("no", "the kubelet evicted the pod for what others used"),
    "Preempted": ("no", "a pod of higher priority took its place"),
    "Drained": ("no", "its node was drained"),
    "NodeLost": ("no", "its node is out of reach or gone"),
    "NodeShutdown": ("no", "its node was shut down"),
    "TerminationByKubelet": ("no", "the kubelet ended it for its node's sake"),
    "Moved": ("no", "its pod goes to the node of its partner, or of those with which it shares a volume"),
    "Deleted": ("no", "somebody deleted the pod"),
    "ContainerStatusUnknown": ("no", "nobody saw how it ended: its node or container runtime was restarted"),
    "Missing": ("no", "the pod is gone and nobody saw it end"),
    "Fenced": ("no", "a shard met a newer term, or a worker a newer process of its rank, and ended"),
    "Retry": ("no", "it asked to be started again (exit code 75)"),
    "Finished": ("no", "it had ended well and is needed again"),
    "NodeAffinity": ("no", "the kubelet did not admit the pod"),
    "NodeName": ("no", "the kubelet did not admit the pod"),
    "NodePorts": ("no", "the kubelet did not admit the pod"),
    "TaintToleration": ("no", "the kubelet did not admit the pod"),
    "TopologyAffinityError": ("no", "the kubelet did not admit the pod"),
    "SMTAlignmentError": ("no", "the kubelet did not admit the pod"),
    "InvalidNodeInfo": ("no", "the kubelet did not admit the pod"),
    "UnexpectedAdmissionError": ("no", "the kubelet did not admit the pod"),
}
"""Cause of a restart -> whether it counts against backoffLimit, and what happened. Other words are the kubelet's own."""
LABELS: Mapping[str, tuple[str, str]] = {
    "app.kubernetes.io/name": ("all objects", "psjob"),
    "app.kubernetes.io/instance": ("all objects", "name of the job"),
    "app.kubernetes.io/component": ("all objects", "what the object is for, such as worker"),
    "app.kubernetes.io/managed-by": ("all objects", "psjob-operator"),
    "psjob.dev/job-name": ("all objects", "name of the job"),
    "psjob.dev/run": ("all objects", "uid of the job"),
    "psjob.dev/role": ("pods", "shard or worker"),
    "psjob.dev/index": ("pods", "number of the shard or worker, from 0"),
    "psjob.dev/number": ("pods", "attempt of a shard, start of a worker"),
    "psjob.dev/attempt": ("pods of shards", "attempt"),
    "psjob.dev/start": ("pods of workers", "start"),
    "psjob.dev/term": ("pods", "term in which the pod was made"),
    "psjob.dev/stage": ("pods of workers", "name of the stage, in a model that is cut in stages"),
    "psjob.dev/placement": ("pods of shards", "number that those who share a volume have in common"),
    "psjob.dev/pair": ("pods and claims of pairs", "number of the volume that a worker and its shard both mount"),
    "psjob.dev/digest": ("the ConfigMap", "names its content"),
}
"""Label -> where it stands, and its value."""
ANNOTATIONS: Mapping[str, tuple[str, str]] = {
    "psjob.dev/container": ("pods", "the container whose end is the process's end"),
    "psjob.dev/waited-seconds": ("pods", "for how long its start was held back"),
    "kubectl.kubernetes.io/default-container": ("pods", "the same container, for `kubectl logs` and `kubectl exec`"),
}

_PAGE = """# Reasons, Events, causes and labels

<!-- generated by `make generate`; edit hack/reasonspage.py instead -->

Each word that the operator writes, for programs that match them. What a job's situation looks like is in
[operations](operations.md#reading-a-job).

## Reasons of conditions

A container that waits may bring a word of the kubelet's own beside these, such as CreateContainerConfigError.

{reasons}

## Events

An end has its reason as an Event too: Normal for Complete, Warning for Failed. So has a job that is Stalled.

{events}

## Causes of restarts

The keys of `status.restarts.causes`, which `runPolicy.podFailurePolicy.rules[].onReasons` takes. A container may bring a word
of the kubelet's own beside these, such as ContainerCannotRun or OutOfcpu. "Counts" says
whether it counts against `backoffLimit` if no rule decides.

{causes}

## Labels

{labels}

## Annotations

{annotations}
"""


def page() -> str:
    """The page as Markdown, the same on every call."""
    return _PAGE.format(
        reasons=_table(("reason", "conditions", "what it says"), REASONS),
        events=_table(("reason", "type", "when"), EVENTS),
        causes=_table(("cause", "counts", "what happened"), CAUSES),
        labels=_table(("label", "of", "value"), LABELS),
        annotations=_table(("annotation", "of", "value"), ANNOTATIONS),
    )


def _table(head: tuple[str, str, str], rows: Mapping[str, tuple[str, str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {first} | {second} |" for name, (first, second) in rows.items())])
