"""The config of a run is read by the library that the run was begun with, whatever operator has written it."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from psjob import contract
from psjob.modes.stages import Stages
from psjob.process import config as reading
from psjob.process.errors import Refused
from psjob.wire import frame
from psjob_operator import contract as operators
from psjob_operator.plan import objects
from tests.support.runkeys import key_file, write_certificates
from tests.unit.api_manifest import MANY_NODES
from tests.unit.plan_given import job

FORMAT_1: dict[str, Any] = {
    "format": 1,
    "job": "job",
    "run": "run-1",
    "mode": "sync",
    "seed": 0,
    "updateAt": None,
    "updateRule": None,
    "ruleOptions": {},
    "backupWorkers": 0,
    "staleness": None,
    "splits": None,
    "local": None,
    "reduction": "mean",
    "lrScaling": "none",
    "warmupSteps": 0,
    "maxGradNorm": None,
    "nonFinite": "pass",
    "maxPushNorm": None,
    "transport": "auto",
    "streams": 1,
    "gradientBytes": 4096 << 20,
    "compression": {"push": "none", "pull": "none", "ratio": 0.01},
    "workers": 3,
    "shards": [{"host": f"job-shard-{index}.job-shards", "port": 7070, "statusPort": 7071} for index in range(2)],
    "checkpoint": {"intervalSeconds": 30.0, "everySteps": None, "keep": 3, "request": None, "disabled": False, "resumeFrom": None},
    "successPolicy": "AllWorkers",
    "shardTimeoutSeconds": 10.0,
    "stepTimeoutSeconds": None,
    "connectSeconds": 600.0,
}
"""What runs of format 1 are told where their job says nothing. It is never edited: what a library of that format does with it would change
under a run that an upgrade meets. Keys that such a library passes over may come beside these; all else is the next format."""


def holds(made: Any, known: Any) -> None:
    assert type(made) is type(known), (made, known)
    if isinstance(known, dict):
        for key, value in known.items():
            holds(made[key], value)
    else:
        assert made == known


def test_what_format_1_says_is_what_it_always_said() -> None:
    holds(objects.cluster_config(job(), 1), FORMAT_1)


STAGED = {"workers": {"replicas": None}, "stages": [{"name": "a", "replicas": 2}, {"name": "b", "cut": "head"}]}


def test_keys_of_stages_are_there_in_a_job_that_has_some_alone() -> None:
    """A config that changed by a word would be written anew for every run that an upgrade meets."""
    assert not {"stages", "pipeline"} & objects.cluster_config(job()).keys()
    made = objects.cluster_config(job(**STAGED))
    assert made["stages"] == [{"name": "a", "replicas": 2, "cut": None}, {"name": "b", "replicas": 1, "cut": "head"}]
    assert (made["workers"], made["pipeline"]) == (3, None)
    assert objects.cluster_config(job(**STAGED, training={"pipeline": {"microbatches": 4}}))["pipeline"] == {
        "microbatches": 4, "schedule": "flush", "weights": "stash", "predict": "none",
    }  # fmt: skip


def test_stages_decide_which_updates_are_made() -> None:
    other = [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 2, "cut": "head"}]
    pipeline = {"training": {"pipeline": {"microbatches": 4}}}
    hashes = [objects.spec_hash(job(**laid).spec) for laid in ({}, STAGED, {**STAGED, "stages": other}, {**STAGED, **pipeline})]
    assert len(set(hashes)) == 4
    known = {"training": {**job().spec.training.to_manifest()}, "workers": 3}
    del known["training"]["encryption"], known["training"]["delay"]
    known["training"]["streams"] = 1
    assert hashes[0] == hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize(("mode", "delay"), [("sync", 0), ("sync", 1), ("async", 8)])
def test_a_delay_is_in_the_config_where_there_is_one(mode: str, delay: int) -> None:
    given, plain = job(training={"mode": mode, "delay": delay}), job(training={"mode": mode})
    made = objects.cluster_config(given)
    assert made.get("delay") == (delay or None) and ("delay" in made) == (delay > 0)
    assert reading._config(made).delay == delay
    assert (objects.spec_hash(given.spec) == objects.spec_hash(plain.spec)) == (delay == 0)


@pytest.mark.parametrize(("streams", "told"), [("auto", None), (1, 1), (3, 3)])
def test_streams_that_psjob_chooses_are_one_to_an_older_library(streams: int | str, told: int | None) -> None:
    """It passes over the key that it does not know."""
    given = job(training={"streams": streams})
    made = objects.cluster_config(given)
    assert made["streams"] == (told or 1) and made.get("autoStreams") == (None if told else True)
    assert reading._config(made).streams == told
    assert (objects.spec_hash(given.spec) == objects.spec_hash(job().spec)) == (told != 3)


def test_the_hash_of_a_spec_that_says_nothing_is_what_it_always_was() -> None:
    """A field that is new would change the config of every run that an upgrade meets."""
    assert objects.spec_hash(job().spec) == "2639beb57a68202cdf0f8fef48eb0f988d76b60d0f8419360dd6b854c2bac68c"


def test_a_process_reads_its_stages() -> None:
    plain = reading._config(objects.cluster_config(job()))
    assert (plain.stages, plain.stage_names, plain.cuts, plain.microbatches) == (Stages(), (), (), None)
    read = reading._config(objects.cluster_config(job(**STAGED, training={"pipeline": {"microbatches": 4}})))
    assert (read.stages, read.stage_names, read.cuts, read.microbatches) == (Stages((2, 1)), ("a", "b"), ("head",), 4)
    assert [read.stages.of(rank) for rank in range(read.workers)] == [0, 0, 1]
    assert (read.schedule, read.stage_weights, read.predict, read.flushes) == ("flush", "stash", "none", True)
    assert read.anneal_steps is None
    words = {"microbatches": 4, "schedule": "pipedream", "weights": "recompute", "predict": "nesterov"}
    read = reading._config(objects.cluster_config(job(**STAGED, training={"pipeline": words})))
    assert (read.schedule, read.stage_weights, read.predict, read.flushes) == ("pipedream", "recompute", "nesterov", False)
    late = {"microbatches": 4, "schedule": "pipedream", "weights": "latest", "annealSteps": 300}
    read = reading._config(objects.cluster_config(job(**STAGED, training={"pipeline": late})))
    assert (read.stage_weights, read.anneal_steps) == ("latest", 300)
    assert (read.correct, read.correct_options, read.highest_momentum) == ("none", {}, None)
    late = {"microbatches": 4, "schedule": "pipedream", "correct": "dc-asgd", "correctOptions": {"lam": 3}, "highestMomentum": 0.99}
    read = reading._config(objects.cluster_config(job(**STAGED, training={"pipeline": late})))
    assert (read.correct, read.correct_options, read.highest_momentum) == ("dc-asgd", {"lam": 3.0}, 0.99)


def limited(**limits: object) -> dict[str, Any]:
    """A template of workers whose container has these limits."""
    container = {"name": "worker", "image": "me/x:1", "command": ["python", "train.py"], "resources": {"limits": limits}}
    return {"spec": {"containers": [container, {"name": "beside", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 7}}}]}}


@pytest.mark.parametrize(("processes", "way", "said"), [(2, "gloo", "gloo"), (2, "auto", None), (1, "gloo", None)])
def test_the_way_of_a_local_sum_is_in_the_config_where_it_matters(processes: int, way: str, said: str | None) -> None:
    given, plain = job(workers={"processes": processes, "localSum": way}), job(workers={"processes": processes})
    made = objects.cluster_config(given)
    assert made.get("localSum") == said
    assert reading._config(made).local_sum == (said or "auto")
    assert objects.spec_hash(given.spec) == objects.spec_hash(plain.spec)


@pytest.mark.parametrize(
    ("workers", "processes"),
    [
        ({}, 1),
        ({"processes": 1}, 1),
        ({"processes": 3, "template": limited(**{"nvidia.com/gpu": 2})}, 3),
        ({"processes": "auto", "template": limited(**{"nvidia.com/gpu": 2})}, 2),
        ({"processes": "auto", "template": limited(**{"nvidia.com/gpu": "4"})}, 4),
        ({"processes": "auto", "template": limited(**{"amd.com/gpu": 8})}, 8),
        ({"processes": "auto", "template": limited(cpu="4")}, 1),
        ({"processes": "auto", "template": limited(**{"nvidia.com/gpu": "some"})}, 1),
    ],
)
def test_processes_of_a_worker_are_in_the_config_where_there_are_several(workers: dict[str, Any], processes: int) -> None:
    given, plain = job(workers=workers), job()
    made = objects.cluster_config(given)
    assert made.get("processes") == (processes if processes > 1 else None)
    assert reading._config(made).processes == processes
    assert (objects.spec_hash(given.spec) == objects.spec_hash(plain.spec)) == (processes == 1)


@pytest.mark.parametrize(("environ", "says"), [
    ({contract.ENV_LOCAL: "1", contract.ENV_SOCKETS: "7"}, None),
    ({contract.ENV_LOCAL: "2", contract.ENV_SOCKETS: "7"}, "PSJOB_LOCAL is 2, this job has 2 processes per worker"),
    ({contract.ENV_SOCKETS: "7"}, "PSJOB_LOCAL is '', expected a whole number"),
    ({contract.ENV_LOCAL: "1", contract.ENV_SOCKETS: "7", contract.ENV_ENCRYPTION: "tls"},
        "the config says encryption none, and this process was started with tls (PSJOB_ENCRYPTION)"),
    ({contract.ENV_LOCAL: "0"}, "PSJOB_SOCKETS is '', expected numbers; start the script by python -m psjob.agent"),
])  # fmt: skip
def test_a_process_knows_which_one_of_its_worker_it_is(tmp_path: Path, environ: dict[str, str], says: str | None) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**objects.cluster_config(job(workers={"processes": 2})), "encryption": "none"}))
    known = {
        contract.ENV_ROLE: "worker",
        contract.ENV_INDEX: "2",
        contract.ENV_START: "1",
        contract.ENV_RUN: "run-1",
        contract.ENV_CONFIG: str(path),
        contract.ENV_KEYS: key_file(tmp_path, "worker", 0),
    }
    if says is not None:
        with pytest.raises(Refused, match=re.escape(says)):
            reading.place({**known, **environ})
        return
    place = reading.place({**known, **environ})
    assert place is not None and (place.rank, place.world, place.sockets) == (5, 6, (7,))


def test_stages_of_another_number_of_workers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**objects.cluster_config(job(**STAGED)), "workers": 4, "encryption": "none"}))
    environ = {
        contract.ENV_ROLE: "worker",
        contract.ENV_INDEX: "0",
        contract.ENV_START: "1",
        contract.ENV_RUN: "run-1",
        contract.ENV_CONFIG: str(path),
        contract.ENV_KEYS: key_file(tmp_path, "worker", 0),
    }
    with pytest.raises(Refused, match=r"the stages of the config have 3 workers together, and the job has 4$"):
        reading.place(environ)


def test_every_format_that_is_served_can_be_written_and_the_newest_is_read() -> None:
    assert set(operators.CONFIG_FORMATS) == set(objects.WRITERS) and max(operators.CONFIG_FORMATS) == operators.CONFIG_FORMAT
    assert len(operators.CONFIG_FORMATS) <= 2 and len(operators.WIRES) <= 2 and max(operators.WIRES) == operators.WIRE
    assert frame.VERSION == operators.WIRE == contract.WIRE
    assert reading._config(objects.cluster_config(job())).workers == 3


def test_who_shares_memory_is_said_by_a_laptop_alone() -> None:
    """On a cluster machines are machines: two pairs of one node may share memory where they can."""
    pairs = job(shards={"replicas": 2, "placement": "Colocated"}, checkpoint=MANY_NODES)
    made = objects.cluster_config(pairs)
    assert "sharing" not in made and made == objects.cluster_config(job(checkpoint=MANY_NODES))
    assert reading._config(made).sharing == "host" and reading._config({**made, "sharing": "index"}).sharing == "index"
    with pytest.raises(ValueError, match="sharing 'node'; it is one of host, index"):
        reading._config({**made, "sharing": "node"})


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if isinstance(value, dict) else []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(inner, (*at, key))
    return found


STAGED_CONFIG = objects.cluster_config(job(**STAGED, training={"pipeline": {"microbatches": 4}}), 1)
LOCAL = objects.cluster_config(job(training={"mode": "local"}), 1)


@pytest.mark.parametrize(
    ("made", "at"),
    [(made, at) for made in (LOCAL, STAGED_CONFIG) for at in places(made) if at != ("ruleOptions",)],
    ids=lambda value: str(value) if isinstance(value, tuple) else value["mode"],
)
def test_a_key_of_a_newer_operator_is_passed_over(made: dict[str, Any], at: tuple[Any, ...]) -> None:
    laid = copy.deepcopy(made)
    inner = laid
    for key in at:
        inner = inner[key]
    inner["keyOfTomorrow"] = {"x": 1}
    assert reading._config(laid) == reading._config(made)


def test_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path, problems = tmp_path / "config.json", list[str]()
    path.write_text(json.dumps({**FORMAT_1, "specHash": "", "format": 99}))
    assert reading._read(str(path), problems) is None
    assert "format 99" in problems[0] and "version that the run began with" in problems[0]


@pytest.mark.parametrize(
    ("role", "word", "refused"), [("worker", "none", True), ("shard", "none", True), ("worker", "auto", False), ("shard", "tls", False)]
)
def test_a_config_does_not_turn_encryption_off_for_a_run_that_has_an_authority(tmp_path: Path, role: str, word: str, refused: bool) -> None:
    """Whoever may change a ConfigMap would read the weights else: a worker that takes no TLS talks to whoever stands between."""
    write_certificates(tmp_path, 1)
    problems: list[str] = []
    made = reading._encryption(word, Path(key_file(tmp_path, role, 0)), role, 0, problems)
    assert bool(problems) == refused and made.word == ("none" if refused else word)
    assert not refused or "the config says that no stream is encrypted, but this run has an authority" in problems[0]


@pytest.mark.parametrize(
    ("word", "told", "refused"),
    [
        ("auto", "tls", True),
        ("none", "tls", True),
        ("none", "auto", True),
        ("tls", "auto", True),
        ("tls", "tls", False),
        ("none", "none", False),
    ],
)
def test_a_config_says_the_encryption_that_a_pod_was_made_with(word: str, told: str, refused: bool) -> None:
    problems: list[str] = []
    reading._check_encryption(word, told, problems)
    assert bool(problems) == refused and (not refused or (f"encryption {word}" in problems[0] and f"with {told}" in problems[0]))


@pytest.mark.parametrize(("role", "linked"), [("worker", False), ("worker", True), ("shard", False), ("shard", True)])
def test_who_listens_has_a_certificate_of_its_own(tmp_path: Path, role: str, linked: bool) -> None:
    write_certificates(tmp_path, 1, workers=1)
    problems: list[str] = []
    made = reading._encryption("tls", Path(key_file(tmp_path, role, 0)), role, 0, problems, linked)
    assert not problems and made.dials is not None and (made.accepts is not None) == (role == "shard" or linked)


def test_a_worker_of_a_stage_without_its_certificate_says_so(tmp_path: Path) -> None:
    write_certificates(tmp_path, 1)
    problems: list[str] = []
    reading._encryption("tls", Path(key_file(tmp_path, "worker", 2)), "worker", 2, problems, linked=True)
    assert "worker-2.pem cannot be used" in problems[0] and "suspend and resume" in problems[0]
