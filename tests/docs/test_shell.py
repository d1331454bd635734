"""Every command that README and docs show is one that there is: read by its own parser, with each option.

What is cheap and needs no cluster is run: charts are rendered, kustomizations built, make's targets planned.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from psjob_client.convert.launcher import taken_apart
from psjob_operator.api.load import load_job
from tests.docs import ROOT
from tests.docs.commands import has, psjob_takes, simple
from tests.docs.finding import ALL, TEXTS, around, indented
from tests.e2e.kube import tool

SHOWN = [block for block in ALL if block.kind == "sh"] + [block for page, text in TEXTS.items() for block in indented(page, text)]
LINES = [(block.place, words) for block in SHOWN for words in simple(block.text)]
WRITTEN = {block.text.partition("\n")[0] for block in ALL}
"""First lines of blocks: `# name` where the page gives a file."""
FOREIGN = {
    "velero": "a tool of others, whose server no test has",
    "buildah": "builds images as root; hack/cluster/pack.py calls it with these words in the tests of images",
    "cosign": "signs with keys that only a maintainer has",
    "docker": "not on this machine; its target and folder are looked for in the Dockerfile",
    "git": "signs and pushes with keys that only a maintainer has",
    "twine": "uploads with a token that only a maintainer has",
    "uv": "asks a package index; make's own target for requirements does the same",
}
"""Programs whose options are not looked up, and why."""
SHELL = {"cat", "cd", "grep", "head", "jq", "less", "ls", "sha256sum", "source", "true"}


def run(*words: str, seconds: float = 120) -> str:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def psjob(words: list[str]) -> None:
    psjob_takes(words[1:])


def kubectl(words: list[str]) -> None:
    if words[1] == "psjob":
        psjob_takes(words[2:])
        return
    has(words[:2], words[2:])
    if words[1] == "kustomize":
        assert "kind: PSTrainingJob" in run(tool("kubectl"), *words[1:])
    if "-p" in words:
        spec = {"shards": {"replicas": 2}, **json.loads(words[words.index("-p") + 1])["spec"]}
        assert load_job(yaml.safe_dump(around(spec)))[1] == []


def helm(words: list[str]) -> None:
    has(words[:2], words[2:])
    if words[1] in ("install", "upgrade", "template"):
        charts = [re.sub(r"^(oci://\S+|.*charts/psjob)$", "charts/psjob", word) for word in words[2:]]
        assert "charts/psjob" in charts, words
        own = ("--reuse-values",)  # of only upgrade
        rendered = run(tool("helm"), "template", *[word for word in charts if word not in own and word != "--wait"])
        assert "kind:" in rendered


def make(words: list[str]) -> None:
    run("make", "--dry-run", *words[1:])


def python(words: list[str]) -> None:
    if words[1] == "-m" and words[2] == "pytest":
        pytest_finds(words[2:])
    elif words[1] == "-m" and words[2] not in ("venv", "pip"):
        assert importlib.util.find_spec(words[2]) is not None, f"there is no module {words[2]}"
        if any(word.startswith("-") for word in words[3:]):
            text = run(sys.executable, "-m", words[2], *[word for word in words[3:4] if re.fullmatch("[a-z]+", word)], "--help")
            assert [word for word in words[3:] if word.startswith("--") and word not in text] == []
    elif words[1] != "-m":
        assert (ROOT / words[1]).is_file() or f"# {words[1]}" in WRITTEN, words[1]


def pytest_finds(words: list[str]) -> None:
    marks = re.findall(r'^  "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for flag, value in itertools.pairwise(words):
        assert flag != "-m" or value.removeprefix("not ") in marks, f"there is no marker {value}"
    files = [word for word in words[1:] if word.startswith("tests/")]
    assert files, words
    for file, _, test in (word.partition("::") for word in files):
        assert (ROOT / file).exists(), f"{file} not found"
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), f"{file} has no {test}"


def docker(words: list[str]) -> None:
    if "--target" in words:
        stages = re.findall(r"^FROM .* AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        assert words[words.index("--target") + 1] in stages, words


def pip(words: list[str]) -> None:
    if shutil.which("pip") is None:
        pytest.skip("pip is not on PATH, and .venv has none")
    has(["pip", words[1]], words[2:])
    for word in words[2:]:
        if word.startswith("psjob"):
            assert word in ("psjob", "psjob[client]", "psjob-client", "psjob-operator"), word


def torchrun(words: list[str]) -> None:
    """By the options that `psjob convert` knows, which are torchrun's own: tests/tensors/test_left_in.py."""
    assert taken_apart(words).script in {line.removeprefix("# ") for line in WRITTEN}


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "psjob": psjob, "kubectl": kubectl, "helm": helm, "make": make, "python": python, "python3": python, "pytest": pytest_finds,
    "docker": docker, "pip": pip, "torchrun": torchrun,
}  # fmt: skip


def known(words: list[str]) -> str:
    return Path(words[0]).name


def test_every_program_is_one_that_is_read() -> None:
    assert len(LINES) > 150
    programs = {known(words) for _, words in LINES}
    assert programs - set(PROGRAMS) - set(FOREIGN) - SHELL == set(), "add how its words are checked, or why they are not"
    assert set(FOREIGN) <= programs and all(len(reason.split()) > 5 for reason in FOREIGN.values())


@pytest.mark.parametrize(("place", "words"), [pytest.param(place, words, id=f"{place} {' '.join(words)[:60]}") for place, words in LINES])
def test_a_command_is_one_that_there_is(place: str, words: list[str]) -> None:
    assert [word for word in words if word.startswith("examples/") and not (ROOT / word).exists()] == []
    if known(words) in PROGRAMS:
        PROGRAMS[known(words)](words)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("psjob trian", "there is no command psjob trian"),
        ("psjob run job.yaml --nope", "No such option: --nope"),
        ("psjob simulate train --workers many", "should be a valid integer"),
        ("kubectl apply --nope", "kubectl apply has no option --nope"),
        ("helm install psjob charts/psjob --nope", "helm install has no option --nope"),
        ("helm install psjob charts/psjob --set nope=1", "nope"),
        ("make nope", "No rule to make target"),
        ("python -m nope", "there is no module nope"),
        ("pytest tests/gone.py", "not found"),
    ],
)
def test_a_command_that_there_is_not_is_found(line: str, says: str) -> None:
    (words,) = simple(line)
    with pytest.raises(AssertionError, match=re.escape(says)):
        PROGRAMS[words[0]](words)


def test_a_line_is_taken_apart() -> None:
    text = "for a in b c; do\n  X=1 psjob get $a | grep -v x > f  # why\ndone\nexport T=$(git log -1)\n../.venv/bin/python -m x \\\n  --y\n"
    assert list(simple(text)) == [
        ["psjob", "get", "$a"],
        ["grep", "-v", "x"],
        ["git", "log", "-1"],
        ["../.venv/bin/python", "-m", "x", "--y"],
    ]
