"""What this process was handed: the environment and the config file of `contract`, read once and checked whole."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psjob import contract, modes
from psjob.contract import keys
from psjob.modes.stages import ALL, Stages
from psjob.process.errors import Refused

MOST_KEY_BYTES = 4096
"""Of a key file."""
LARGEST_REQUEST = 2**53 - 1
"""Of checkpoint.request, as the manifest's schema has it: every reader of JSON keeps it exactly."""


@dataclass(frozen=True)
class ShardAddress:
    """Where a shard listens."""

    host: str
    port: int
    status_port: int


@dataclass(frozen=True)
class CheckpointConfig:
    """When to checkpoint, how many to keep, and what to begin from."""

    interval_seconds: float
    every_steps: int | None
    keep: int
    disabled: bool
    resume_from: str | None
    request: int | None = None
    """A checkpoint that answers this number is wanted."""


@dataclass(frozen=True)
class CompressionConfig:
    """Codecs of gradients and weights by name, or auto, and the share of elements that topk and randomk send."""

    push: str = "none"
    pull: str = "none"
    ratio: float = 0.01


@dataclass(frozen=True)
class LocalConfig:
    """Mode local: steps between two exchanges, workers that a round needs (0: all), seconds that it waits for others."""

    inner_steps: int = 50
    quorum: int = 0
    grace_seconds: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9


@dataclass(frozen=True)
class Config:
    """The job's config file, see contract.CONFIG_FORMAT."""

    job: str
    run: str
    spec_hash: str
    mode: str
    seed: int
    update_at: str | None
    workers: int
    shards: tuple[ShardAddress, ...]
    checkpoint: CheckpointConfig
    success_policy: str
    shard_timeout: float
    connect_seconds: float
    streams: int | None = 1
    """Between each worker and each shard; None: as psjob finds."""
    gradients: int = contract.GRADIENT_MEBIBYTES << 20
    """Bytes of gradients that a shard may hold of all workers together."""
    compression: CompressionConfig = CompressionConfig()
    transport: str = "auto"
    """auto: shared memory where both ends are on one host, else TCP; tcp: only that."""
    update_rule: str | None = None
    """None: that of the script's optimizer."""
    rule_options: Mapping[str, float] = field(default_factory=dict)
    backup_workers: int = 0
    staleness: int | None = None
    delay: int = 0
    """How many of a worker's pushes may be under way while it computes."""
    splits: int | None = None
    local: LocalConfig = LocalConfig()
    reduction: str = "mean"
    lr_scaling: str = "none"
    warmup_steps: int = 0
    max_grad_norm: float | None = None
    """The largest norm that the mean gradient of a step may have."""
    max_push_norm: float | None = None
    """The largest norm that a worker's push of one block or table may have."""
    non_finite: str = "pass"
    """What becomes of a step whose gradient holds NaN or inf: it ends the job (refuse), is skipped, or passes."""
    encryption: str = "none"
    """Which streams are encrypted: one of contract.ENCRYPTION."""
    stages: Stages = ALL
    """Workers by stage of the model, where it is cut in stages."""
    stage_names: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    """The module with which each stage after the first begins; empty where the script names the cuts."""
    microbatches: int | None = None
    """Parts that each batch is cut in; None: the script says."""
    schedule: str = "flush"
    """How stages are trained: one of contract.SCHEDULES; and below of STAGE_WEIGHTS and PREDICTIONS."""
    stage_weights: str = "stash"
    predict: str = "none"
    anneal_steps: int | None = None
    """Updates in which a late stage's learning rate comes to that of the script; None: it has it from the first."""
    correct: str = "none"
    """How a stage corrects gradients of old weights: one of contract.CORRECTIONS."""
    correct_options: Mapping[str, float] = field(default_factory=dict)
    highest_momentum: float | None = None
    """What NAdam's beta1 of a late stage comes near to; None: it is the script's at all stages."""
    processes: int = 1
    """Processes of each worker."""
    local_sum: str = "auto"
    """How these sum: one of contract.LOCAL_SUMS."""
    step_timeout: float | None = None
    """Seconds without a step, while others wait for it, after which a worker is started again; None: never."""
    sharing: str = "host"
    """host: processes of one host may share memory; index: only a worker and a shard of the same index."""

    @property
    def flushes(self) -> bool:
        """Do all stages make an update before the next batch begins?"""
        return self.schedule == "flush"


@dataclass(frozen=True, repr=False)
class Keys:
    """The keys that a process was handed, by the names of `contract.KEYS`; empty where it has none of that name."""

    worker: bytes = b""
    shard: bytes = b""
    workers: bytes = b""
    shards: bytes = b""
    questions: bytes = b""

    @property
    def own(self) -> bytes:
        """What this process proves with who it is. Raises Refused if it has nothing."""
        if not (self.worker or self.shard):
            raise Refused("this process has no key of its run; it was not started by an operator or by psjob run of this version")
        return self.worker or self.shard


@dataclass(frozen=True)
class Encryption:
    """What streams are encrypted with, TLS 1.3. `word`: all streams are encrypted (tls), none is, or those between two hosts (auto)."""

    word: str = "none"
    dials: ssl.SSLContext | None = None
    accepts: ssl.SSLContext | None = None


NO_KEYS = Keys()
PLAIN = Encryption()


@dataclass(frozen=True)
class ProcessContext:
    """Which process of the job this one is. `number` is a shard's attempt or a worker's start."""

    role: str
    index: int
    run: str
    number: int
    term: int
    rewinds: int
    pod: str
    config: Config
    bind: str | None
    checkpoints: Path | None
    min_step: int
    config_path: str = ""
    """Where the config lies: changes of a running job are in it."""
    keys: Keys = NO_KEYS
    encryption: Encryption = PLAIN
    local: int = 0
    """Of a worker of several processes: which one of them this is."""
    sockets: tuple[int, ...] = ()
    """Of such a worker: see contract.ENV_SOCKETS."""
    pair: str = ""
    """See contract.ENV_PAIR; empty: there is none."""

    @property
    def begins_again(self) -> bool:
        """Has another process of this worker trained before, in this run or in the one that it continues from?"""
        return self.number > 1 or self.rewinds > 0 or self.config.checkpoint.resume_from is not None

    def pairs_with(self, index: int) -> bool:
        """Has this process a folder in common with the one of the other role that has this index, so that the two may share memory?"""
        return bool(self.pair) and index == self.index

    @property
    def rank(self) -> int:
        """Number of this process among those of all workers."""
        return self.index * self.config.processes + self.local

    @property
    def world(self) -> int:
        """How many processes all workers have together."""
        return self.config.workers * self.config.processes


def place(environ: Mapping[str, str] = os.environ) -> ProcessContext | None:
    """This process's place in a job, or None outside one.

    Raises:
        Refused: variables or config that are missing or wrong; one sentence lists all of them.
    """
    role = environ.get(contract.ENV_ROLE)
    if role is None:
        return None
    problems: list[str] = []

    def number(name: str, default: int | None, lowest: int) -> int:
        raw = environ.get(name, "" if default is None else str(default))
        try:
            value = int(raw)
        except ValueError:
            problems.append(f"{name} is {raw!r}, expected a whole number")
            return lowest
        if not lowest <= value <= contract.MOST_NUMBER:
            problems.append(f"{name} is {value}, expected {lowest} to {contract.MOST_NUMBER}")
        return value

    if role not in ("worker", "shard"):
        problems.append(f"{contract.ENV_ROLE} is {role!r}, expected worker or shard")
    index = number(contract.ENV_INDEX, None, 0)
    count = number(contract.ENV_ATTEMPT if role == "shard" else contract.ENV_START, None, 1)
    term = number(contract.ENV_TERM, 0, 0)
    rewinds = number(contract.ENV_REWINDS, 0, 0)
    min_step = number(contract.ENV_MIN_STEP, 0, 0)
    run = environ.get(contract.ENV_RUN, "")
    if not run:
        problems.append(f"{contract.ENV_RUN} is not set")
    checkpoints = environ.get(contract.ENV_CHECKPOINTS)
    path = environ.get(contract.ENV_CONFIG, "")
    config = _read(path, problems)
    if config is not None:
        config = _in_mode(config, environ.get(contract.ENV_MODE, ""), problems)
        _check_encryption(config.encryption, environ.get(contract.ENV_ENCRYPTION, config.encryption), problems)
        if run and config.run != run:
            problems.append(f"{contract.ENV_RUN} is {run}, but the config is of run {config.run}")
        if config.stages and config.stages.workers != config.workers:
            problems.append(f"the stages of the config have {config.stages.workers} workers together, and the job has {config.workers}")
        limit = len(config.shards) if role == "shard" else config.workers
        if index >= limit:
            problems.append(f"{contract.ENV_INDEX} is {index}, this job has {limit} {role}s")
    local = 0
    sockets: tuple[int, ...] = ()
    if config is not None and role == "worker" and config.processes > 1:
        local, sockets = number(contract.ENV_LOCAL, None, 0), _sockets(environ, problems)
        if local >= config.processes:
            problems.append(f"{contract.ENV_LOCAL} is {local}, this job has {config.processes} processes per worker")
    handed = _keys(environ.get(contract.ENV_KEYS, ""), role, index, problems)
    key_file = Path(environ.get(contract.ENV_KEYS) or "keys")
    if config is None:
        encrypting = PLAIN
    else:
        encrypting = _encryption(config.encryption, key_file, role, index, problems, linked=bool(config.stages))
    if problems or config is None:
        raise Refused("this process was not started as part of a job in the right way: " + "; ".join(problems))
    return ProcessContext(
        role, index, run, count, term, rewinds, environ.get(contract.ENV_POD, f"{role}-{index}"), config,
        environ.get(contract.ENV_BIND) or None, Path(checkpoints) if checkpoints else None, min_step, path, handed, encrypting, local,
        sockets, environ.get(contract.ENV_PAIR, ""),
    )  # fmt: skip


def _sockets(environ: Mapping[str, str], problems: list[str]) -> tuple[int, ...]:
    raw = environ.get(contract.ENV_SOCKETS, "")
    try:
        return tuple(int(number) for number in raw.split(","))
    except ValueError:
        problems.append(f"{contract.ENV_SOCKETS} is {raw!r}, expected numbers; start the script by python -m psjob.agent")
        return ()


def desired_config(here: ProcessContext) -> Config | None:
    """The config as it lies there now; None where it cannot be read this time, or is of another run."""
    found = _read(here.config_path, [])
    return found if found is not None and found.run == here.run else None


def _keys(path: str, role: str, index: int, problems: list[str]) -> Keys:
    if not path:
        problems.append(f"{contract.ENV_KEYS} is not set: every stream of a run is authenticated; use an operator of this version")
        return NO_KEYS
    try:
        return read_keys(path, role, index)
    except (OSError, ValueError) as error:
        problems.append(f"{contract.ENV_KEYS}: {path} is not this process's key file: {error}")
        return NO_KEYS


def read_keys(path: str, role: str, index: int) -> Keys:
    """The keys in that file. Raises ValueError if it lacks what a process of this place needs; the text holds no key."""
    with Path(path).open("rb") as file:
        found = keys.parse_keys(file.read(MOST_KEY_BYTES).decode("ascii"))
    needed = {"worker"} if role == "worker" else {"shard", "workers", "questions"} | ({"shards"} if index == 0 else set())
    if found.keys() != needed:
        raise ValueError(
            f"it has keys {', '.join(sorted(found)) or 'of no name'}, a {role} of index {index} has {', '.join(sorted(needed))}"
        )
    return Keys(**found)


def _check_encryption(word: str, told: str, problems: list[str]) -> None:
    """Whoever may change the config only may not have streams sent in the clear: this word comes by another road."""
    if word != told:
        problems.append(
            f"the config says encryption {word}, and this process was started with {told} ({contract.ENV_ENCRYPTION}); see who changed the "
            "config, then suspend and resume the job"
        )


def _encryption(word: str, key_file: Path, role: str, index: int, problems: list[str], linked: bool = False) -> Encryption:
    """`linked`: workers listen to each other, as those of neighbouring stages do."""
    authority = key_file.with_name(contract.AUTHORITY)
    own = contract.CERTIFICATE if role == "shard" else contract.WORKER_CERTIFICATE if linked else None
    certificate = key_file.with_name(own.format(index=index)) if own else None
    if word == "none" and authority.exists():  # whoever may change the config may not turn this off: keys come by another road
        problems.append(f"the config says that no stream is encrypted, but this run has an authority at {authority}; see who changed it")
        return PLAIN
    try:
        return encryption_of(word, authority, certificate)
    except OSError as error:
        files = f"{authority} and {certificate}" if certificate else str(authority)
        problems.append(f"training.encryption is {word}, and {files} cannot be used: {error}; suspend and resume the job for new ones")
        return PLAIN


def encryption_of(word: str, authority: Path, certificate: Path | None) -> Encryption:
    """`authority`: the PEM file of the run's CA; `certificate`: of a shard, its private key and its certificate in one PEM file.

    Raises OSError if a file cannot be read, and ssl.SSLError, which is one, where it is none of the kind.
    """
    if word == "none":
        return Encryption()
    dials = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dials.minimum_version = ssl.TLSVersion.TLSv1_3
    dials.load_verify_locations(authority)
    accepts = None
    if certificate is not None:
        accepts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        accepts.minimum_version = ssl.TLSVersion.TLSv1_3
        accepts.num_tickets = 0  # no stream is resumed, and the last word of the handshake is the dialler's
        accepts.load_cert_chain(certificate)
        # Of the groups that OpenSSL offers by default the largest takes 100 ms of a shard's thread, for whoever dials.
        try:
            accepts.set_ecdh_curve("X25519")
        except (ValueError, ssl.SSLError):
            accepts.set_ecdh_curve("prime256v1")
    return Encryption(word, dials, accepts)


def _in_mode(config: Config, word: str, problems: list[str]) -> Config:
    """The config of a process that was told a mode, which may be another than its file names."""
    try:
        if not word or word == modes.format_mode(modes.of(config)):
            return config
        mode = modes.parse_mode(word)
    except ValueError as error:
        problems.append(f"{contract.ENV_MODE}: {error}")
        return config
    return replace(config, mode=mode.name, staleness=mode.staleness if isinstance(mode, modes.Bounded) else None, delay=mode.delay)


def _read(path: str, problems: list[str]) -> Config | None:
    try:
        raw = json.loads(Path(path).read_text()) if path else None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{contract.ENV_CONFIG}: cannot read {path}: {error}")
        return None
    if raw is None:
        problems.append(f"{contract.ENV_CONFIG} is not set")
        return None
    try:
        return _config(raw)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problems.append(f"{contract.ENV_CONFIG}: {path} is not a config of format {contract.CONFIG_FORMAT}: {error!r}")
        return None


def _config(raw: dict[str, Any]) -> Config:
    if raw["format"] != contract.CONFIG_FORMAT:
        raise ValueError(f"it is of format {raw['format']}; the psjob of this image must be of the version that the run began with")
    saved, stages, pipeline = raw["checkpoint"], raw.get("stages") or (), raw.get("pipeline") or {}
    resume = saved.get("resumeFrom")
    return Config(
        job=str(raw["job"]),
        run=str(raw["run"]),
        spec_hash=str(raw["specHash"]),
        mode=str(raw["mode"]),
        seed=int(raw["seed"]),
        update_at="shard" if raw.get("updateAt") == "server" else raw.get("updateAt"),
        workers=int(raw["workers"]),
        shards=tuple(ShardAddress(str(s["host"]), int(s["port"]), int(s["statusPort"])) for s in raw["shards"]),
        checkpoint=CheckpointConfig(
            float(saved["intervalSeconds"]),
            None if saved.get("everySteps") is None else int(saved["everySteps"]),
            int(saved["keep"]),
            bool(saved["disabled"]),
            str(resume["path"]) if resume else None,
            None if saved.get("request") is None else _request(int(saved["request"])),
        ),
        success_policy=str(raw["successPolicy"]),
        shard_timeout=float(raw["shardTimeoutSeconds"]),
        connect_seconds=float(raw.get("connectSeconds", 600)),
        streams=None if raw.get("autoStreams") else int(raw.get("streams", 1)),
        gradients=int(raw.get("gradientBytes") or contract.GRADIENT_MEBIBYTES << 20),
        compression=_compression(raw.get("compression") or {}),
        transport=_word(raw, "transport", "auto", "tcp"),
        sharing=_word(raw, "sharing", "host", "index"),
        update_rule=None if raw.get("updateRule") is None else _word(raw, "updateRule", *contract.UPDATE_RULES),
        rule_options={str(name): float(value) for name, value in (raw.get("ruleOptions") or {}).items()},
        backup_workers=int(raw.get("backupWorkers") or 0),
        staleness=None if raw.get("staleness") is None else int(raw["staleness"]),
        delay=int(raw.get("delay") or 0),
        splits=None if raw.get("splits") is None else int(raw["splits"]),
        local=_local(raw.get("local") or {}),
        reduction=str(raw.get("reduction") or "mean"),
        lr_scaling=_word(raw, "lrScaling", "none", "linear"),
        warmup_steps=int(raw.get("warmupSteps") or 0),
        max_grad_norm=None if raw.get("maxGradNorm") is None else float(raw["maxGradNorm"]),
        max_push_norm=None if raw.get("maxPushNorm") is None else float(raw["maxPushNorm"]),
        non_finite=_word(raw, "nonFinite", *contract.NON_FINITE),
        encryption=_word(raw, "encryption", *contract.ENCRYPTION),
        stages=Stages(tuple(int(stage["replicas"]) for stage in stages)),
        stage_names=tuple(str(stage["name"]) for stage in stages),
        cuts=tuple(str(stage["cut"]) for stage in stages if stage.get("cut") is not None),
        microbatches=int(pipeline["microbatches"]) if "microbatches" in pipeline else None,
        schedule=_word(pipeline, "schedule", *contract.SCHEDULES),
        stage_weights=_word(pipeline, "weights", *contract.STAGE_WEIGHTS),
        predict=_word(pipeline, "predict", *contract.PREDICTIONS),
        anneal_steps=None if pipeline.get("annealSteps") is None else int(pipeline["annealSteps"]),
        correct=_word(pipeline, "correct", *contract.CORRECTIONS),
        correct_options={str(name): float(value) for name, value in (pipeline.get("correctOptions") or {}).items()},
        highest_momentum=None if pipeline.get("highestMomentum") is None else float(pipeline["highestMomentum"]),
        processes=int(raw.get("processes") or 1),
        local_sum=_word(raw, "localSum", *contract.LOCAL_SUMS),
        step_timeout=None if raw.get("stepTimeoutSeconds") is None else float(raw["stepTimeoutSeconds"]),
    )


def _request(number: int) -> int:
    if not 1 <= number <= LARGEST_REQUEST:
        raise ValueError(f"checkpoint.request {number}; it is a number from 1 to {LARGEST_REQUEST}")
    return number


def _local(raw: Mapping[str, Any]) -> LocalConfig:
    own = LocalConfig()
    return LocalConfig(
        int(raw.get("innerSteps", own.inner_steps)),
        int(raw.get("quorum", own.quorum)),
        float(raw.get("graceSeconds", own.grace_seconds)),
        float(raw.get("lr", own.lr)),
        float(raw.get("momentum", own.momentum)),
    )


def _compression(raw: Mapping[str, Any]) -> CompressionConfig:
    own = CompressionConfig()
    made = CompressionConfig(str(raw.get("push", own.push)), str(raw.get("pull", own.pull)), float(raw.get("ratio", own.ratio)))
    if made.push not in contract.PUSH_CODECS or made.pull not in contract.PULL_CODECS or not 0 < made.ratio <= 0.5:
        raise ValueError(
            f"compression {dict(raw)}; push is one of {contract.PUSH_CODECS}, pull of {contract.PULL_CODECS}, ratio above 0 to 0.5"
        )
    return made


def _word(raw: dict[str, Any], key: str, *words: str) -> str:
    """One of `words`; the first where the key is absent."""
    word = raw.get(key, words[0])
    if word not in words:
        raise ValueError(f"{key} {word!r}; it is one of {', '.join(words)}")
    return str(word)
