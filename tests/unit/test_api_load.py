"""Text that is no manifest, or more than one, answers with a sentence."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_operator.api import load
from psjob_operator.api.load import load_documents, load_job
from psjob_operator.api.validate import validate_job
from tests.unit.api_manifest import GOOD, changed

TEXT = yaml.safe_dump(GOOD)
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 6)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}\n" for level in range(1, 6))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no document"),
        ("---\n---\n", "holds no document"),
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
        (TEXT.replace("shards: 2", "shards: .nan"), "must be of type integer"),
        (TEXT.replace("shards: 2", "shards: 2026-01-01"), "must be of type integer"),
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
    "spec.ps",
    "spec.ps.shards",
    "spec.ps.template",
    "spec.ps.template.spec.containers",
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
    "spec.checkpoint.interval",
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
    TEXT.replace("shards: 2", "shards: 2\n    shards: 3").encode(),
    TEXT.replace("shards: 2", "shards: {2").encode(),
    TEXT.replace("shards: 2", "\tshards: 2").encode(),
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
