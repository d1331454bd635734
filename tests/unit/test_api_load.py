"""Text that is no manifest, or more than one, answers with a sentence.

- What one object of a job's author costs the operator, which serves all others too. Manifests that are slow are grown further.
- Manifests of jobs, changed in every way that a person or a tool could: each is a job, or has problems in words.

Every name that the manifest had before is refused, and the refusal names the present one.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_operator.api import load
from psjob_operator.api.crd import node
from psjob_operator.api.load import load_documents, load_job
from psjob_operator.api.status import short
from psjob_operator.api.validate import LARGEST_SPEC, RENAMED_FIELDS, RENAMED_VALUES, every_problem, schema, validate_job
from psjob_operator.cluster.cache import JobStore
from psjob_operator.cluster.client import JOBS, JobKey
from psjob_operator.cluster.observe import _spec
from psjob_operator.plan.objects import cluster_config, config_digest
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.plan import plan
from tests.support.costs import LIMIT_SECONDS, MOST_BYTES, dearest, since
from tests.support.fuzzing import Change, byte_changes, changed_bytes, changed_json, counts, fuzz, json_changes
from tests.support.soaking import soak
from tests.unit.api_manifest import GOOD, Case, changed
from tests.unit.api_template_cases import WORKER

TEXT = yaml.safe_dump(GOOD)
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 6)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}\n" for level in range(1, 6))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the manifest is empty"),
        ("---\n---\n", "the manifest is empty"),
        ("just text", "must be an object"),
        ("- 1\n- 2\n", "must be an object"),
        (f"{TEXT}---\n{TEXT}", "holds 2 documents"),
        (f"{TEXT}---\napiVersion: v1\nkind: Secret\n", "holds 2 documents"),
        ("a: [", "is not YAML: line "),
        ("a: b: c", "is not YAML: line 1, column 5"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: 1\na: 2", "key 'a' already set in map"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        ("a: \x00", "is not YAML"),
        ("x" * (1024 * 1024 + 1), "the limit of 1048576 bytes"),
        ("1: 2", "the key 1 is not text"),
        ("a: {[1]: 2}", "is not YAML"),
        ("apiVersion: batch/v1\nkind: Job\n", 'must be "PSTrainingJob"'),
        ("apiVersion: psjob.dev/v1\nkind: PSTrainingJob\n", 'apiVersion: Invalid value: "psjob.dev/v1": must be "psjob.dev/v1alpha1"'),
        ("kind: PSTrainingJob\n", 'apiVersion: must be "psjob.dev/v1alpha1"'),
        ("a: &a [x]\nb: [" + "*a, " * 101 + "]", "more than 100 aliases"),
        (BOMB, "1234573 values with every alias written out, at most 100000 are taken; write out"),
        (BOMB.replace("[", "{k: [").replace("]", "]}"), "values with every alias written out"),
        (MERGES, "values with every alias written out"),
        ("a: &a [1, *a]", "line 1: an alias stands inside the value that it names"),
        ("[" * 5000, "nested too deep"),
        ("a: 9999-99-99", "must be"),
        (TEXT.replace("replicas: 2", "replicas: .nan"), "must be of type integer"),
        (TEXT.replace("replicas: 2", "replicas: 2026-01-01"), "must be of type integer"),
        (TEXT.replace("name: digits", "name:"), "metadata.name: Required value"),
        (TEXT.replace("name: digits", "name: 5"), "metadata.name: Invalid value: 5: must be of type string"),
        (TEXT.replace("  name: digits", "  generateName: digits-"), "metadata.name: Required value"),
    ],
)
def test_bad_text_answers_with_one_line(text: str | bytes, sentence: str) -> None:
    job, problems = load_job(text)
    assert job is None
    lines = [str(problem) for problem in problems]
    assert any(sentence in line for line in lines), lines
    assert all(line and "\n" not in line and len(line) < 500 for line in lines)


def test_a_few_aliases_are_fine() -> None:
    text = TEXT + "".join(f"x{i}: *e\n" for i in range(5))
    job, problems = load_job("e: &e [1, 2]\n" + text)
    assert job is None and all("unknown field" in str(problem) for problem in problems) and problems


@pytest.mark.parametrize("text", [TEXT, TEXT.encode(), json.dumps(GOOD), f"---\n{TEXT}...\n", f"# note\n{TEXT}---\n"])
def test_a_manifest_is_read(text: str | bytes) -> None:
    job, problems = load_job(text)
    assert problems == []
    assert job is not None
    assert job.metadata.name == "digits"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PLACES = [
    "",
    "spec",
    "spec.shards",
    "spec.shards.replicas",
    "spec.shards.template",
    "spec.shards.template.spec.containers",
    "spec.workers",
    "spec.workers.template",
    "spec.workers.template.spec",
    "spec.workers.template.metadata",
    "spec.workers.template.spec.containers",
    "spec.workers.template.spec.containers.0",
    "spec.workers.template.spec.containers.0.env",
    "spec.workers.template.spec.containers.0.resources",
    "spec.workers.template.spec.volumes",
    "spec.checkpoint",
    "spec.checkpoint.volume",
    "spec.checkpoint.periodSeconds",
    "spec.runPolicy",
    "spec.suspend",
    "metadata",
    "metadata.name",
    "metadata.labels",
    "status",
]


@settings(max_examples=100)
@given(place=st.sampled_from(PLACES), value=json_values)
def test_whatever_stands_anywhere_the_answer_is_a_job_or_sentences(place: str, value: object) -> None:
    raw = changed(GOOD, {place: value}) if place else value
    job, problems = validate_job(raw)
    assert (job is None) == bool(problems)
    for problem in problems:
        assert "\n" not in str(problem)
        assert problem.limit


@pytest.mark.parametrize("place", ["spec.workers.template.spec.x", "spec.checkpoint.volume", "metadata.annotations", "status", "x"])
@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("depth", [150, 500, 900, 5000])
def test_however_deep_the_answer_is_a_sentence(place: str, kind: str, depth: int) -> None:
    deep: object = 1
    for _ in range(depth):
        deep = {"a": deep} if kind == "object" else [deep]
    raw = changed(GOOD, {})
    *way, last = place.split(".")
    part = raw
    for step in way:
        part = part.setdefault(step, {})
    part[last] = deep
    job, problems = validate_job(raw)
    assert job is None
    assert str(problems[0]) == "the manifest is nested deeper than 100 levels; a pod needs some twenty; look for a slip"


@settings(max_examples=60)
@given(text=st.text(max_size=60) | st.binary(max_size=60))
def test_whatever_the_text_no_exception_comes_out(text: str | bytes) -> None:
    job, problems = load_job(text)
    assert (job is None) == bool(problems)
    assert all("\n" not in str(problem) for problem in problems)


ODD = (
    b"a: |\n  x\n  y\nb: >-\n  folded\n  text\nc: [1, {d: e}]\n--- \n? complex\n: value\n...\n# end\n",
    b"- a\n-\n- - b\n  - c\n- &x {a: 1}\n- *x\n- {<<: *x, b: 2}\n",
    "ü: ö # ä\n'ß': \"\\u00fc \\\n  b\"\r\nk:\r\n".encode(),
    b"c: 0o7\nd: 07\ne: 1:30\nf: 2001-01-01\ng: ~\nh: 1e3\ni: .5\nj: yes\n",
    TEXT.replace("replicas: 2", "replicas: 2\n    replicas: 3").encode(),
    TEXT.replace("replicas: 2", "replicas: {2").encode(),
    TEXT.replace("replicas: 2", "\treplicas: 2").encode(),
)


@pytest.mark.parametrize("text", [*ODD, *(path.read_bytes() for path in sorted(Path("examples").rglob("*.yaml"))[::4])])
def test_libyaml_reads_what_python_reads_and_at_the_same_lines(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> tuple[list[tuple[object, object]], list[str]]:
        found, problems = load_documents(text)
        return [(document.value, _lines(document.node)) for document in found], [str(problem) for problem in problems]

    assert load._Quick is not None
    quick = read()
    monkeypatch.setattr(load, "_Quick", None)
    assert quick == read()


def _lines(node: yaml.Node) -> object:
    parts = node.value if isinstance(node.value, list) else []
    return node.start_mark.line, [tuple(map(_lines, part)) if isinstance(part, tuple) else _lines(part) for part in parts]


def test_a_large_text_is_read_in_a_fraction_of_what_python_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"- name: A{number}\n  value: 'x{number}'\n" for number in range(1500))

    def seconds() -> float:
        took = []
        for _ in range(3):
            began = time.thread_time()
            assert load_documents(text)[0]
            took.append(time.thread_time() - began)
        return min(took)

    quick = seconds()
    monkeypatch.setattr(load, "_Quick", None)
    assert quick < seconds() / 2


POD = "spec.workers.template.spec"
ENV = [{"name": f"A{number}", "value": "x"} for number in range(20)]
SEEDS: dict[str, dict[str, Any]] = {
    "env": {f"{WORKER}.env": ENV},
    "unknown": {f"{POD}.{name}{number}": 1 for number in range(20) for name in ("volume", "x")},
    "empty": {f"{POD}.containers": [{}, {}, {}]},
    "tolerations": {f"{POD}.tolerations": [{"key": "a"}] * 10, "spec.shards.template": {"spec": {"tolerations": [{"key": "a"}] * 10}}},
    "words": {f"{WORKER}.command": ["x"] * 50, f"{WORKER}.args": ["x"] * 50},
    "mounts": {f"{WORKER}.volumeMounts": [{"name": "a", "mountPath": "/a"}] * 9, f"{POD}.volumes": [{"name": "a", "emptyDir": {}}] * 9},
    "rules": {"spec.runPolicy": {"podFailurePolicy": {"rules": [{"action": "Ignore", "exitCodes": [1, 2]}] * 9}}},
    "stages": {"spec.stages": [{"name": f"s{number}", "replicas": 1} for number in range(9)]},
    "options": {"spec.training": {"ruleOptions": {f"x{number}": 1.0 for number in range(20)}}},
    "volume": {"spec.checkpoint": {"volume": {"projected": {"sources": [{}] * 20}}}},
    "metadata": {"metadata.labels": {f"a{number}": "" for number in range(20)}},
}


def observed(text: bytes) -> float:
    """Seconds in which the operator takes in what the API server says of a job, once kopf has read its JSON."""
    raw = json.loads(text)
    raw["metadata"] = {**raw.get("metadata", {}), "namespace": "space", "name": "job", "uid": "u", "resourceVersion": "7"}
    store = JobStore()
    began = time.thread_time()
    store.put(JOBS, raw)
    job = store.job(JobKey("space", "job"))
    assert job is not None
    _spec(job, SimpleNamespace(observed=None))  # type: ignore[arg-type]
    return since(began)


def change(random: Random, one: bytes, other: bytes) -> bytes:
    """More of a part of what is there, in the room of a spec that is taken or of a whole object; or a part of another, or any change."""
    raw = json.loads(one)
    if random.random() < 0.2:
        made = changed_json(raw, json_changes(random))
        whole = isinstance(made, dict) and all(isinstance(made.get(part), dict) for part in ("metadata", "spec"))
        return json.dumps(made).encode() if whole else one  # the API server takes no other
    part: Any = raw if random.random() < 0.1 else raw["spec"]
    above = raw
    while isinstance(part, dict | list) and part:
        if random.random() < 0.3 and not (isinstance(part, dict) and "template" in part):
            _more(random, part, random.choice((LARGEST_SPEC, MOST_BYTES)) - len(one))
            break
        above = part
        part = random.choice(list(part.values() if isinstance(part, dict) else part))
    if isinstance(above, dict) and random.random() < 0.1:
        above.update(json.loads(other)["spec"].get("training", {}))
    return json.dumps(raw, separators=(",", ":")).encode()


def _more(random: Random, part: Any, room: int) -> None:
    times = random.choice((2, 10, room // max(1, len(json.dumps(part, separators=(",", ":"))))))
    if isinstance(part, list):
        part.extend(part * max(0, times - 1))
    else:
        part.update({f"{name}{number}": value for number in range(times) for name, value in list(part.items())[:50]})


@pytest.mark.parametrize(("name", "rounds"), [*((name, 4) for name in SEEDS), *(soak(name, 100) for name in SEEDS)])
@pytest.mark.timeout(3600)
def test_no_object_of_a_mebibyte_costs_the_operator_more_than_a_tenth_of_a_second(name: str, rounds: int) -> None:
    seed = 1 if rounds < 100 else Random().randrange(1 << 32)
    first = json.dumps(changed(GOOD, SEEDS[name])).encode()
    begin = [first, *(change(Random(number), first, first) for number in range(4))]
    took, worst = dearest(begin, change, len, observed, rounds, seed, LIMIT_SECONDS)
    assert took <= LIMIT_SECONDS, f"{took:.3f} s of {len(worst)} bytes: {worst[:500]!r} … {worst[-300:]!r}, seed {seed}"


@pytest.mark.parametrize("part", ["spec", "status", "metadata"])
def test_a_mebibyte_of_empty_objects_is_not_looked_at_one_by_one(part: str) -> None:
    raw = {**GOOD, part: {**GOOD.get(part, {}), "x": [{}] * 330_000}}
    job, problems = validate_job(raw)
    assert (job is None) == (part == "spec")
    assert len(problems) == (part == "spec")


def test_of_a_spec_that_is_too_large_small_fields_hold() -> None:
    """Who runs it, and whether it is to run. Its size is told each time."""
    body = changed(GOOD, {"spec.suspend": True, "spec.managedBy": "example.com/other", f"{WORKER}.env": ENV * 500})
    body["metadata"] |= {"namespace": "space", "uid": "u", "resourceVersion": "7", "generation": 3}
    store = JobStore()
    store.put(JOBS, body)
    job = store.job(JobKey("space", body["metadata"]["name"]))
    assert job is not None and job.size > LARGEST_SPEC and not job.large
    spec, problems = _spec(job, SimpleNamespace(observed=None))  # type: ignore[arg-type]
    assert (spec.suspend, spec.managed_by, spec.shards.replicas) == (True, "example.com/other", body["spec"]["shards"]["replicas"])
    assert len(problems) == 1 and f"is {job.size} bytes as JSON" in problems[0]


WHOLE = changed(
    GOOD,
    {
        "spec.training": {"mode": "async", "seed": 3, "nonFinite": "skip", "transport": "tcp",
                          "compression": {"push": "int8", "pull": "bf16"}, "updateRule": "lr-over-lag"},
        "spec.checkpoint": {"periodSeconds": 30, "keep": 3, "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"},
                            "volumeClaimTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {
                                "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}}},
        "spec.runPolicy": {"backoffLimit": 6, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 9, "cleanPodPolicy": "Running"},
        "spec.workers.progressDeadlineSeconds": 60,
        "spec.workers.template.spec.volumes": [{"name": "data", "emptyDir": {}}],
        "spec.workers.template.spec.containers.0.resources": {"limits": {"cpu": "1", "nvidia.com/gpu": 1}},
        "metadata.labels": {"team": "a"},
    },
)  # fmt: skip
TEXT_MANIFESTS = yaml.safe_dump(WHOLE).encode()
ALIASED = TEXT_MANIFESTS + b"x: &a [1, 2]\ny: [*a, *a]\nz: {<<: {k: 1}}\n"
MOST = 64 << 20
"""Bytes of memory for a manifest here, of some KiB: YAML takes about half a KiB a value, and aliases stand for MOST_NODES at most."""


def judged(raw: Any) -> None:
    """A job that is taken can be planned; one that is not has a sentence for each problem."""
    job, problems = validate_job(raw)
    assert (job is None) == bool(problems)
    for problem in problems:
        assert str(problem).strip() and len(short(str(problem))) <= 300
    if job is not None:
        snapshot = ObservedState(job.metadata.name, "ns", "uid-1", 1, "1", 0.0, job.spec, None, live=True)
        assert config_digest(cluster_config(snapshot))
        plan(snapshot, 1.0)


@counts(200, 100_000)
def test_a_changed_manifest_is_a_job_or_has_problems(cases: int) -> None:
    assert load_job(TEXT_MANIFESTS)[0] is not None
    fuzz(cases, json_changes, lambda changes: judged(changed_json(WHOLE, changes)), MOST)


@counts(75, 20_000)
def test_changed_text_is_a_job_or_has_problems(cases: int) -> None:
    def make(random: Random) -> tuple[bytes, list[Change]]:
        return random.choice((TEXT_MANIFESTS, ALIASED)), byte_changes(random)

    def read(case: tuple[bytes, list[Change]]) -> None:
        text = changed_bytes(*case)
        job, problems = load_job(text)
        assert (job is None) == bool(problems) and all(str(problem).strip() for problem in problems)
        for document in load_documents(text)[0]:
            judged(document.value)

    fuzz(cases, make, read, MOST)


def refusals(path: str, value: Any) -> list[str]:
    at, _, name = path.partition("[].")
    manifest = Case("renamed", {at: [{name: value}] if name else value}).manifest()
    made, problems = validate_job(manifest)
    assert made is None and every_problem(manifest)[1]
    return [re.sub(r"\[\d+\]", "[]", str(problem)) for problem in problems]


@pytest.mark.parametrize("path", RENAMED_FIELDS)
def test_an_old_field_is_refused_with_the_present_one(path: str) -> None:
    assert f'{path}: unknown field "{path}"; {RENAMED_FIELDS[path]}' in refusals(path, {})
    named = re.findall(r"spec(?:\.[A-Za-z]+(?:\[\])?)+", RENAMED_FIELDS[path])
    assert named and all(node(schema(), present) for present in named)
    with pytest.raises(KeyError):
        node(schema(), path)


@pytest.mark.parametrize(("path", "old"), sorted((path, old) for path, words in RENAMED_VALUES.items() for old in words))
def test_an_old_value_is_refused_with_the_present_one(path: str, old: str) -> None:
    (said,) = [each for each in refusals(path, old) if each.startswith(f"{path}: Unsupported value")]
    assert said.endswith(f"; write {RENAMED_VALUES[path][old]}") and RENAMED_VALUES[path][old] in node(schema(), path)["enum"]
