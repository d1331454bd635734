"""Every fenced block of README and docs: what a test does with it, or why it is not run.

A manifest is read by the models of the API, a command by the parser of the commands, Python by the compiler. RUN names the tests that run
blocks on top of that. A page with Python that is in neither list fails, so that a new block is noticed.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.readme import commands
from hack.site.links import FENCE
from hack.site.stage import pages
from psjob_operator.api.load import load_job
from tests.docs import ROOT

RUN = {
    "README.md": "tests/e2e/test_readme_start.py",
    "docs/convert.md": "tests/live/test_docs_commands.py",
    "docs/choose.md": "tests/live/test_docs_commands.py",
    "docs/port.md": "tests/live/test_docs_commands.py",
    "docs/doctor.md": "tests/live/test_docs_commands.py",
    "docs/python.md": "tests/live/test_docs_python.py",
    "docs/data.md": "tests/live/test_docs_python.py",
    "docs/reference.md": "tests/live/test_docs_reference.py",
    "docs/scripts.md": "tests/scripts/test_page.py",
    "docs/topology.md": "tests/unit/test_topology_cli.py",
    "docs/stages.md": "tests/unit/test_stages_cli.py",
    "docs/contributing/add-a-rule.md": "tests/docs/test_contribute.py",
    "docs/contributing/add-a-mode.md": "tests/docs/test_contribute.py",
    "docs/pipelines.md": "tests/unit/test_pipeline_api.py",
}
"""The test that runs or reads the blocks of a page. It names the page."""
PARSED = {
    "docs/quickstart.md": "MyModel and dataset are the reader's own",
    "docs/accelerate.md": "as `psjob init --template accelerate`, which tests/live/test_init.py runs",
    "docs/lightning.md": "as `psjob init --template lightning`, which tests/live/test_init.py runs",
    "docs/transformers.md": "as `psjob init --template transformers`, which tests/live/test_init.py runs",
    "docs/collectives.md": "model, loader and loss are the reader's own",
    "docs/processes.md": "needs one machine with several GPUs",
    "docs/embeddings.md": "model and loader are the reader's own; examples/clicks is run",
    "docs/tables.md": "loader is the reader's own; examples/lda is run",
    "docs/rules/reductions.md": "a function to name in a manifest, without a script around it",
    "docs/design/0001-protocol-machine.md": "signatures of a decision",
}
"""Pages whose Python is compiled and not run, and why."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, of which kind it is, and its text."""

    page: str
    line: int
    kind: str
    text: str


def blocks(page: str, text: str) -> list[Block]:
    found: list[Block] = []
    begun: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and begun is None:
            begun, lines = (number, line.strip().lstrip("`~")), []
        elif mark and begun is not None:
            found.append(Block(page, *begun, textwrap.dedent("\n".join(lines)) + "\n"))
            begun = None
        else:
            lines.append(line)
    return found


ALL = [block for page, text in pages(ROOT).items() for block in blocks(page, text)]
KNOWN = (ROOT / "docs/cli.md").read_text()
"""The reference of the commands, generated from them."""


def of(*kinds: str) -> list[Any]:
    return [pytest.param(block, id=f"{block.page}:{block.line}") for block in ALL if block.kind in kinds]


def test_every_block_has_a_kind_that_is_checked() -> None:
    assert len(ALL) > 100
    known = ("", "sh", "python", "pycon", "yaml", "json", "text", "console", "mermaid", "diff", "markdown")
    assert [f"{block.page}:{block.line} {block.kind!r}" for block in ALL if block.kind not in known] == []


def test_python_runs_or_has_a_reason() -> None:
    having = {block.page for block in ALL if block.kind == "python"}
    assert having - set(RUN) - set(PARSED) == set(), "run the blocks of these pages, or say in PARSED why not"
    assert set(PARSED) <= having and all(len(reason.split()) >= 4 for reason in PARSED.values())


@pytest.mark.parametrize(("page", "test"), RUN.items())
def test_the_test_of_a_page_names_it(page: str, test: str) -> None:
    source = (ROOT / test).read_text()
    assert Path(page).name in source, f"{test} reads {page} no more"
    assert any(block.page == page for block in ALL)


@pytest.mark.parametrize("block", of("python"))
def test_python_compiles(block: Block) -> None:
    if block.page == "docs/reference.md" and re.match(r"[\w.]+\(", block.text):  # a signature, generated of the function
        named = re.sub(r"^[\w.]+", "named", block.text.strip())
        ast.parse(f"def {named}: ...")
    else:
        ast.parse(block.text)


@pytest.mark.parametrize("block", of("json"))
def test_json_is_read(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_a_manifest_or_a_part_of_one(block: Block) -> None:
    for document in yaml.safe_load_all(block.text):
        assert isinstance(document, dict) and document
        if document.get("kind") == "PSTrainingJob":
            problems = load_job(yaml.safe_dump(document))[1]
            assert bool(problems) == block.text.startswith("# wrong.yaml\n"), problems
        elif set(document) == {"spec"}:
            assert load_job(yaml.safe_dump(around(document["spec"])))[1] == []


def around(spec: dict[str, Any]) -> dict[str, Any]:
    """A whole job around a part of its spec."""
    worker = {"name": "worker", "image": "example", "command": ["python", "train.py"]}
    replicas = {} if "stages" in spec else {"replicas": 8}
    workers = {**replicas, "template": {"spec": {"containers": [worker]}}, **spec.get("workers", {})}
    whole = {**spec, "ps": {"shards": 2, **spec.get("ps", {})}, "workers": workers}
    for stage in whole.get("stages", []):
        if stage.get("template") == "…":  # a pod template that the page leaves out
            stage["template"] = workers["template"]
    return {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "part"}, "spec": whole}


@pytest.mark.parametrize("block", of("sh"))
def test_a_command_of_psjob_is_one_that_there_is(block: Block) -> None:
    for line in commands(f"# x\n```sh\n{block.text}```\n", "x"):
        lexer = shlex.shlex(line.replace("<run>", "run"), posix=True, punctuation_chars="|;&")
        lexer.whitespace_split = True
        words = list(itertools.takewhile(lambda word: set(word) - set("|;&"), lexer))
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[:2] == ["kubectl", "psjob"]:
            words = words[1:]
        if words[:1] == ["psjob"]:
            reads(words)


def reads(words: list[str]) -> None:
    """The command is in the reference, with each of its options."""
    names = [" ".join(words[:count]) for count in (3, 2)]
    name = next((one for one in names if re.search(rf"^#+ `?{re.escape(one)}`?$", KNOWN, re.MULTILINE)), None)
    assert name is not None, f"there is no command {names[-1]}"
    section = re.split(rf"^#+ `?{re.escape(name)}`?$", KNOWN, flags=re.MULTILINE)[1].split("\n## ")[0]
    if name == "psjob convert":  # what follows torchrun is torchrun's
        words = words[: next((at for at, word in enumerate(words) if word == "torchrun"), len(words))]
    for word in words[2:]:
        if re.match(r"--?[a-z]", word):
            assert f"`{word.partition('=')[0]}" in section or f"{word.partition('=')[0]}`" in section, f"{name} has no option {word}"


def test_a_command_and_an_option_that_are_not_there_are_found() -> None:
    with pytest.raises(AssertionError, match="there is no command psjob trian"):
        reads(["psjob", "trian"])
    with pytest.raises(AssertionError, match="psjob run has no option --nope"):
        reads(["psjob", "run", "job.yaml", "--nope"])


def test_a_part_that_the_models_refuse_is_found() -> None:
    assert load_job(yaml.safe_dump(around({"training": {"mode": "asnyc"}})))[1]
