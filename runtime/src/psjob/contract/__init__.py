"""What a process is handed, and what it answers: the words that planner and processes share.

This file imports nothing, so that the operator's copy (made by `make generate`) is the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

GROUP: Final = "psjob.dev"
VERSION: Final = "v1alpha1"
KIND: Final = "PSTrainingJob"
PLURAL: Final = "pstrainingjobs"

INSTALL: Final = "in a checkout of psjob: pip install './runtime[client]' ./operator ./client"
"""How all of psjob is installed: it is in no package index."""

# -- environment of every process --------------------------------------------------------------
ENV_PREFIX: Final = "PSJOB_"
ENV_ROLE: Final = "PSJOB_ROLE"
"""`worker` or `shard`."""
ENV_INDEX: Final = "PSJOB_INDEX"
"""Ordinal within the role, from 0; a worker's rank, a shard's index."""
ENV_RUN: Final = "PSJOB_RUN"
"""The run: the job's uid on a cluster, a fresh id on a laptop."""
ENV_START: Final = "PSJOB_START"
"""Workers: the *start* half of the incarnation, from 1, given by the planner."""
ENV_ATTEMPT: Final = "PSJOB_ATTEMPT"
"""Shards: n-th start of this shard, from 1."""
ENV_TERM: Final = "PSJOB_VIEW"
"""Shards: the term that this process was started in, from 1. Runs of wire 2 named it view, in what the operator gives and reads too."""
ENV_CONFIG: Final = "PSJOB_CONFIG"
"""Path of the job's config (JSON, see `CONFIG_FORMAT`)."""
ENV_POD: Final = "PSJOB_POD"
"""Name of this process (pod), unique in the run; written into claims and logs."""
ENV_CHECKPOINTS: Final = "PSJOB_CHECKPOINTS"
"""Shards: folder that holds one folder per run."""
ENV_REWINDS: Final = "PSJOB_REWINDS"
"""Workers: the *rewinds* half of the incarnation; set by the process itself before it execs."""
ENV_MODE: Final = "PSJOB_MODE"
"""Workers: the mode that the job runs where it is not the config's, such as `bounded:3`; set by the process itself before it execs."""
ENV_LEFT_OUT: Final = "PSJOB_LEFT_OUT"
"""Workers: files that are not there for the script until it stands at its place, a JSON list; set by the process itself before it execs."""
ENV_PROCESSES: Final = "PSJOB_PROCESSES"
"""Workers of several processes: how many; the command is `python -m psjob.agent` with the script's after it. Absent: one."""
ENV_LOCAL: Final = "PSJOB_LOCAL"
"""Workers of several processes: which one of them this is, from 0; set by the agent."""
ENV_SOCKETS: Final = "PSJOB_SOCKETS"
"""Workers of several processes: numbers of the descriptors that lead to the others, separated by commas; set by the agent.
Process 0 has the agent's first and then one for each other process, any other has that only to process 0."""
ENV_FORK_SERVER: Final = "PS_FORK_SERVER"
"""Seconds of training after which processes are prepared from which others are forked; `never`: none are. Users set it."""
FORK_SERVER_SECONDS: Final = 5.0
MOST_NUMBER: Final = (1 << 31) - 1
"""The largest term, attempt and start."""
MOST_RISE: Final = 1000
"""Terms by which another process of the run may be ahead: one for each time that a shard was started meanwhile."""
ENV_BIND: Final = "PSJOB_BIND"
"""Shards: address to listen on; absent means every address."""
ENV_KEYS: Final = "PSJOB_KEYS"
"""Path of the file that holds this process's keys, see `KEYS`."""
ENV_PAIR: Final = "PSJOB_PAIR"
"""Folder of a volume that a worker and the shard of its index both mount on one node, through which they lend each other memory. Absent:
they have none."""
ENV_ENCRYPTION: Final = "PSJOB_ENCRYPTION"
"""One of ENCRYPTION: what the config must say. Who may change the config only cannot change this. Absent: what the config says holds."""

# -- keys ----------------------------------------------------------------------------------------
KEYS: Final = """A run has three keys of 32 random bytes: `workers`, `shards` and `questions`. No process but the planner makes them.

The file of a process has one line `name key` for each of its keys; a key is written as 64 hex digits:
worker: of a worker, keys.worker_key(workers, index, start)
shard: of a shard, keys.shard_key(shards, index, attempt)
workers: of every shard, which derives the key of each worker that dials it
shards: of shard 0, which derives the key of each shard that dials it
questions: of every shard, for the status port

On a cluster the keys lie in a Secret that only the init container of a pod mounts. It has the entries `workers`, `shards` and
`questions` as hex digits, and `workers.inner`, `workers.outer`, `shards.inner`, `shards.outer`. Those are the two blocks of 64 bytes
that HMAC puts before what it hashes (RFC 2104). With them a shell which has only sha256 can derive a key.

If streams are encrypted, AUTHORITY lies beside the file of a process, and beside that of a shard CERTIFICATE of its index. They are
PEM files of the run's CA, and of the shard's private key and certificate. The certificate's only name is the DNS name SHARD_NAME. In a
job with stages a worker has the same, as WORKER_CERTIFICATE and WORKER_NAME. The Secret has them as entries of the same names. No private
key of the CA is kept.
"""
AUTHORITY: Final = "ca.pem"
CERTIFICATE: Final = "shard-{index}.pem"
SHARD_NAME: Final = "shard-{index}"
WORKER_CERTIFICATE: Final = "worker-{index}.pem"
WORKER_NAME: Final = "worker-{index}"

# -- the config file ---------------------------------------------------------------------------
CONFIG_FORMAT: Final = 1
"""Number of what a process is handed and answers: its command, environment and config, its exit codes, last message and status port.

A run keeps the number that it began with (status.internal.pinned), and so do its pods. The number rises with every change by which a
runtime of the version before would refuse or do another thing. Such changes are a key that goes, one that means something else, or one with
another default. Keys that a reader does not know are passed over, so that one that may be missing comes without a rise.

Keys of the config (all present, but for delay, processes, localSum and those of stages):

format: 1 · job: name · run: str · specHash: sha256 hex of the spec's training-relevant part
mode: one of MODES · seed: int · updateAt: "server" (the spec's shard) | "worker" | null
(null: server where the optimizer is known)
backupWorkers: int (sync) · staleness: int | null (bounded: 3, threshold: 16) · splits: int | null (softsync: 1)
delay: int (pushes of a worker that may be under way while it computes; absent: 0)
local: null (another mode) | {"innerSteps": int, "quorum": int, "graceSeconds": float, "lr": float, "momentum": float}
updateRule: one of UPDATE_RULES | null (null: that of the script's optimizer) · ruleOptions: {name: float}
reduction: "mean" | "sum" | "median" | "trimmed_mean" | "module:function" · lrScaling: "none" | "linear" · warmupSteps: int
nonFinite: one of NON_FINITE · maxGradNorm: float | null · maxPushNorm: float | null
compression: {"push": one of PUSH_CODECS, "pull": one of PULL_CODECS, "ratio": float (share of a gradient that topk and randomk send)}
workers: int (how many ranks)
processes: int (processes of each worker; absent: 1)
localSum: one of LOCAL_SUMS (how they sum; absent: auto)
stages: [{"name": str, "replicas": int, "cut": str | null}] | null (a model that is cut in stages: ranks are counted through them in order.
        cut: the module with which the stage begins, null for the first one, and for all where the script names the cuts)
pipeline: {"microbatches": int (parts that each batch is cut in; absent: the script says), "schedule": one of SCHEDULES,
           "weights": one of STAGE_WEIGHTS, "predict": one of PREDICTIONS, "annealSteps": int (updates in which a late stage's
           learning rate comes to the script's; absent: it has it from the first), "correct": one of CORRECTIONS (absent: none),
           "correctOptions": {name: float} (absent: none), "highestMomentum": float (that NAdam's beta1 of a late stage comes near to;
           absent: beta1 is the script's at all stages)} | null. Both are absent in a job without stages.
shards: [{"host": str, "port": int, "statusPort": int}] in index order
checkpoint: {"intervalSeconds": float, "everySteps": int | null, "keep": int, "disabled": bool,
             "request": int | null (a checkpoint is taken soon after it has changed while the job runs),
             "resumeFrom": {"path": str} | null}   (resumeFrom.path: a run's folder as the shard sees it)
successPolicy: "AllWorkers" | "FirstWorker"
shardTimeoutSeconds: float (spec.shards.progressDeadlineSeconds)
stepTimeoutSeconds: float | null (spec.workers.progressDeadlineSeconds: a worker without a step for so long while others wait for it
is started again; null: never)
encryption: one of ENCRYPTION (absent: none)
transport: "auto" | "tcp" (auto: shared memory where a worker and a shard can reach each other's, else TCP)
sharing: "host" | "index" (absent: host. index: only a worker and a shard of one index share memory, as if each index were a machine)
streams: int (TCP streams between a worker and a shard)
autoStreams: true (shards offer as many streams as cores allow, and workers keep what is faster) | absent
gradientBytes: int (gradients that a shard may hold of all workers together; each worker has an equal share)
connectSeconds: float (600; how long a process tries to find its peers before it exits with EXIT_RETRY)
"""
CONFIG_FORMATS: Final = (1,)
"""Those of the runs that this version's operator serves: its own, and that of the version before."""
WIRE: Final = 3
"""Version of the frames between the processes of a run. Both ends have the same: all pods of a run keep one runtime image."""
WIRES: Final = (3, 2)
"""Those of the runs that this version's operator serves."""
MODES: Final[dict[str, tuple[str, ...]]] = {
    "sync": ("backupWorkers", "reduction", "maxGradNorm"),
    "bounded": ("staleness",),
    "softsync": ("splits",),
    "async": (),
    "threshold": ("staleness",),
    "local": ("innerSteps", "quorum", "graceSeconds", "lr", "momentum"),
}
"""Modes that a job may name, each with the fields of its own: those of spec.training.<mode>, which no other mode takes."""
UPDATE_RULES: Final[dict[str, tuple[str, ...]]] = {
    "plain": (),
    "heavy-ball": (),
    "nag": (),
    "multi-momentum": (),
    "dana-zero": (),
    "dana-slim": (),
    "dana-dc": ("lam", "decay", "adaptive"),
    "dc-asgd": ("lam", "decay", "adaptive"),
    "gap-aware": ("average", "max_lr"),
    "gap-aware-dana": ("average", "max_lr"),
    "lr-over-lag": (),
    "adam-async": (),
    "ftrl": ("beta", "l1", "l2"),
    "delayed-nesterov": ("every", "activation"),
}
"""Rules that a job may name, each with the numbers that it takes from ruleOptions; all others are those of the script's optimizer."""
ASYNC_OUTER_RULE: Final = "delayed-nesterov"
"""In mode local it takes each round when it comes, and nobody waits; it is the only one that a job may name there."""
GOES_ON: Final[dict[str, tuple[str, ...]]] = {
    "sync": ("sync", "bounded", "async"),
    "bounded": ("sync", "bounded", "async"),
    "async": ("bounded", "async"),
}
"""By the mode of a checkpoint: those in which a run may continue from it; each one not named here, in itself. A running job changes among
these when its config names another: at a checkpoint, where all processes go back to it in the new mode. Bounded with staleness 0
is sync, which needs all workers at one step: an async checkpoint does not have them there, one of bounded does."""
GRADIENT_MEBIBYTES: Final = 4096
"""MiB of gradients that a shard may hold where a job says nothing; more where workers have less than LEAST_SHARE_MEBIBYTES each."""
LEAST_SHARE_MEBIBYTES: Final = 4
"""MiB of a shard's gradients that a worker needs: one block."""
NON_FINITE: Final = ("pass", "skip", "refuse")
"""What becomes of a gradient that holds NaN or inf: it is applied as torch does it, its step is skipped, or it ends the job."""
SCHEDULES: Final = ("flush", "2bw", "pipedream")
"""When stages make their updates: with a flush after each batch, or without."""
STAGE_WEIGHTS: Final = ("stash", "vertical", "recompute", "latest")
"""The weights of a backward: those of its forward, or the same version at all stages, or the newest. With `recompute` the forward runs
again on the newest, with `latest` the activations are of older ones."""
PREDICTIONS: Final = ("none", "nesterov")
"""The weights of a forward: as they are, or as their momentum leads to until its gradient counts."""
CORRECTIONS: Final = ("none", "dc-asgd", "gap-aware")
"""What a stage does with gradients of old weights before it pushes them; each is a rule of UPDATE_RULES too, with its numbers."""
PUSH_CODECS: Final = ("none", "bf16", "fp16", "int8", "topk", "randomk", "auto")
"""How gradients travel; none: as they are; auto: by the measured speed of the link."""
AUTO_CODEC: Final = "auto"
LOCAL_SUMS: Final = ("auto", "shared", "gloo", "nccl")
"""How the processes of a worker sum: in shared memory, or after an exchange by a backend of torch.distributed."""
ENCRYPTION: Final = ("none", "auto", "tls")
"""Which streams of a run are encrypted with TLS 1.3: none, those between two hosts, or all."""
PULL_CODECS: Final = ("none", "bf16", "fp16", "auto")
"""How weights travel: an error in them is not made good by a later pull, so they keep a floating point form."""
DATA_PORT: Final = 7070
STATUS_PORT: Final = 7071

# -- exit codes ----------------------------------------------------------------------------------
EXIT_DONE: Final = 0
EXIT_RETRY: Final = 75
"""Start me again, uncounted: peers not found in time, drained, stopped on request after a checkpoint."""
EXIT_FENCED: Final = 76
"""A shard met a term above its own, or an equal one claimed by another pod. Its termination message is
`{"fenced": {"term": <int>}}`; the planner raises the term above that number. Or a worker met a newer process of its rank, by number:
its status is older than the run. Its message holds `"fenced": {"start": <int>}`, and the planner gives a start above that. Uncounted."""
EXIT_REFUSED: Final = 77
"""The runtime refused what the script or the environment asks; starting again cannot help.
The termination message holds the sentence: `{"error": "..."}`. The job fails."""
EXIT_CHECKPOINT_LOST: Final = 78
"""A shard found no valid manifest though the planner knows of a checkpoint. The job fails with CheckpointLost."""
EXIT_HUNG: Final = 79
"""A worker was told that others have waited too long for its step. It has written the stacks of its threads to its log. Counted.
The termination message holds the sentence: `{"error": "..."}`."""
EXIT_DEVICE_LOST: Final = 80
"""A worker's GPU, or the driver's context on it, can be used no more by this process: after an ECC error, an Xid, a kernel that failed.
Counted; a new process is started. The termination message holds the sentence, with the driver's words: `{"error": "..."}`."""
ENDING_KEYS: Final = frozenset({"error", "ending", "refused", "fenced"})
"""The termination message of a worker that the runtime ends has no others, whatever its exit code; `ending` may be empty. The codes
above without such a message are the script's own. `refused` is true if a process was refused that multiprocessing or a launcher has
started, such as torchrun: its exit code is not the worker's."""
ENV_MIN_STEP: Final = "PSJOB_MIN_STEP"
"""Shards: 1 when status.checkpoint.step > 0, so that a manifest must be found; else absent."""

TERMINATION_LOG: Final = "/dev/termination-log"
ENV_TERMINATION_LOG: Final = "PSJOB_TERMINATION_LOG"
"""File for the termination message; absent means TERMINATION_LOG. At most 2,048 bytes of JSON are written. A shard leaves
`{"status": {...}}` with what fits of STATUS_KEYS, and shard 0 before it `"met": "1:0-2,5 2:3-4"`: by start, the ranks it has met so."""

# -- the status port (HTTP, read-only, every shard) ----------------------------------------------
# Whoever reaches it hears of HEALTH_PATH and STARTED_PATH; everything else is told to who proves to have the key `questions`.
CHALLENGE_PATH: Final = "/challenge"
"""{"nonce": letters and digits}: for one question, asked within CHALLENGE_SECONDS."""
CHALLENGE_SECONDS: Final = 10.0
PROOF_HEADER: Final = "X-Psjob-Proof"
"""Of a question to STATUS_PATH or HISTORY_PATH: the nonce, a space, keys.question(questions, nonce, path). 403 without a right one."""
ANSWER_HEADER: Final = "X-Psjob-Answer"
"""Of its answer: keys.answer(questions, nonce, path, body). Who asks refuses a body that it does not fit."""
STATUS_PATH: Final = "/status"
HISTORY_PATH: Final = "/history"
"""Of shard 0 alone: {"entries": [{"time": unix s, "step": int, "rate": steps/s | null, "metrics": {name: number},
"reported": [the step at which each of them was last given], "stepParts": [seconds, in STEP_PARTS' order] | null}, ...]}, oldest first:
some hundreds over the time since this start of shard 0. Steps go back where a restart undid some."""
STATUS_BYTES: Final = 1 << 20
"""What is read of an answer: above what shard 0 says of 4,000 workers and 256 reported numbers, each name and number at its longest."""
HEALTH_PATH: Final = "/healthz"
"""200 while the process makes progress, else 503. Progress: its main loop and its disk thread gave a sign of life within
shardTimeoutSeconds. A transfer that moves bytes and a system call that is under way are such signs, so that a slow disk is no hang."""
STARTED_PATH: Final = "/startedz"
"""200 once the shard can be ordered something: its coordinator runs, or it has heard the coordinator; 503 before. The startup probe.
From then on HEALTH_PATH tells whether the shard makes progress: a restore may take hours, and one that hangs is not waited for."""
STEP_PARTS: Final[dict[str, str]] = {
    "compute": "the script: forward, backward, data, all that is not in a call of psjob",
    "copyOut": "gradients are copied, or encoded, to where they leave",
    "wire": "the worker waits while its push or the answer is on its way, or is read",
    "others": "the worker waits for other workers' pushes, or for those of its stages or processes",
    "update": "the worker waits while a shard reduces and applies, or makes the optimizer's own step itself",
    "copyBack": "answers are copied into the model",
    "psjob": "psjob's own: records, checks, checkpoints",
}
"""What a worker's step is made of, and what each part is."""
STATUS_KEYS: Final = """JSON of STATUS_PATH:

run, index, attempt, term, pod, state: "starting" | "restoring" | "waiting" | "serving" | "finishing" | "finished"
transfer: {"doing": "reading" | "writing", "done": int, "total": int} | null (bytes of a checkpoint that this shard reads or writes now)
problem: str | null (what keeps this shard from the run's folder: it waits for it)
counters: {"pushes": int (frames with a gradient or absent mark seen), "pushBytes": int (their payload, as it travelled),
           "applied": int (pushes that counted, in worker-clocks of this shard),
           "dropped": int (those that the mode has dropped), "duplicatesRefused": int, "duplicatesDiffering": int (those of them
           with other bytes than the push that counted), "fenced": int, "updatesLost": int,
           "crashes": int (processes of this attempt that were killed or hung, after which another continued from their memory),
           "acknowledged": {rank: clock},
           "firstApplied": float | null (unix time of the first push applied in this attempt), "badConnections": int}
transports: {rank: "shared" | "tcp" | "mixed"} (how that worker's blocks and rows go)
memory: {"rssBytes": int}
nonFinite: {"pushes": int, "worker": int, "step": int, "tensor": str} | null (pushes with NaN or inf that an update of this shard held,
  or that were skipped, and the first of them; a push counts once. A robust reduction may have left such a push out: it is not counted)
largePushes: {"pushes": int, "worker": int, "step": int, "of": str (block or table), "norm": float | null (NaN or inf)} | null (pushes
  beyond maxPushNorm, and the first of them; a push counts once)
staleness, gap: {"count": int, "sum": float, "max": float, "buckets": [[edge, count of what is at most that], ...]} | null (mode sync):
  over pushes that counted here since the last restore, at most one entry a worker's clock. staleness: updates between the weights of a
  gradient and those it is applied to; gap: root mean square of what the weights have moved meanwhile, estimated on a sample of
  elements, and of some clocks only
and from shard 0 only:
coordinator: {"mode": str (the one that runs, such as "bounded:3"),
  "staleness", "gap": as above, over all shards (a push counts once on each) since this coordinator began, some seconds old at most,
  "step": int (lowest complete clock over live workers), "loss": float | null, "rate": float (steps per second) | null,
  "eta": float (seconds) | null, "totalSteps": int | null, "metrics": {name: float},
  "stepParts": {one of STEP_PARTS: float (seconds of a worker's step)} | null (the mean over the workers, of the last minute mostly; a step
    is what "step" counts, in mode local a round; together they are a worker's step),
  "stepAdvice": str | null (workers compute for less than half of their time: where the most of it goes, and what would help),
  "reported": [int, ...] (the step at which each of the metrics was last given, in their order),
  "workers": [{"rank": int, "clock": int, "state": "absent" | "joined" | "left" | "lost", "start": int, "rewinds": int,
    "idle": float (the part of its present process's time in which the script waited for others) | null,
    "here": bool (its process has a stream to shard 0),
    "passesAgain": int (passes over its data that its script ran through again after a restart, since this coordinator began)}],
  "stages": [{"index": int, "name": str, "desired": int (workers declared), "ready": int (there, or through), "step": int (the lowest of
    its workers), "delay": float (updates between the weights of a gradient and those it is applied to; 0 with a flush) | null,
    "idle": float (the part of the last 32 steps' time in which its workers waited for activations, gradients or shards, their mean) | null,
    "rssBytes", "peakBytes": int (RAM of the worker that holds most, now and at most) | null, "devicePeakBytes": int (of the worker whose
    tensors held most on its device) | null, "waiting": str (what one of its workers waits for) | null}, ...] | null (without stages),
  "checkpoint": {"step": int, "term": int, "time": float (unix), "age": float (seconds; its node's clock may be another than the reader's),
    "bytes": int, "path": str, "final": bool,
    "observedRequest": int (the newest checkpoint.request that had been seen when it was begun) | null} | null,
  "checkpointProgress": {"doing": "writing" | "reading", "shards": [{"index", "doing", "done", "total"}], "done", "total"} | null (bytes),
  "checkpointProblem": str | null (why no checkpoint commits), "waiting": str | null (who is missing, which block, for how long),
  "hung": [{"rank": int, "start": int, "seconds": float}, ...] (workers without a step for more than stepTimeoutSeconds while others wait
    for it, that were told so and are still there),
  "codecs": str | null (how numbers travel between shard 0 and the workers, such as "push int8, pull bf16"; null: as they are),
  "weightsSha256": str | null (of final.safetensors' parameters, once final), "failure": str | null,
  "transport": "shared" | "tcp" | "mixed" | null (how blocks and rows go between the workers and shard 0),
  "nonFinite": str | null (the same of shard 0, in a sentence), "largePush": str | null (so of largePushes),
  "dataProblem": str | null (workers train on the same batches, or read other data),
  "drift": str | null (weights differ that should be equal on all workers, or the rates by which workers step),
  "buffersDiffer": str | null (each worker has buffers of its own),
  "diverged": str | null (the loss that rank 0 reported last is NaN or inf, or such a gradient was applied),
  "warning": str | null (the learning rate is above what late gradients bear),
  "pushBytes": int, "updatesLost": int (counters of all shards together, since this coordinator began; some seconds old at most),
  "stepsLost": int (steps undone by going back to a checkpoint, since this coordinator began),
  "resumed": {"term": int, "start": int (the highest of the workers that were there), "from": int (step continued from), "step": int,
    "age": float (seconds)} | null (the first step that all passed after a process had joined or shards were restored),
  "passed": [[step, unix time], ...] (last 64 steps completed, newest last)}
"""

# -- files of a run --------------------------------------------------------------------------------
FINAL_WEIGHTS: Final = "final.safetensors"
TEMP: Final = ".tmp"
"""What the name of a checkpoint's file ends in until the file is whole."""
SHARD_PART: Final = "-shard{shard:03d}-a{attempt}"
"""What the names of a shard's files of a checkpoint hold; all others are the coordinator's."""


def fork_server_after(environ: Mapping[str, str]) -> float:
    """Seconds by ENV_FORK_SERVER; infinite for a word."""
    try:
        found = float(environ.get(ENV_FORK_SERVER) or FORK_SERVER_SECONDS)
    except ValueError:
        return float("inf")
    return found if found == found else float("inf")  # the word nan is a number
