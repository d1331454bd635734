"""docs/expectations.md: each yes names a test that exists, each partly and no has a reason, and the first sentence counts them.

- docs/contributing/founding.md: its commands are there, and those that are quick give the figures that it names.
- Each sentence that docs/troubleshooting.md quotes is one that the code says.
- Every reason, Event, cause, label and annotation that the operator's code writes stands in docs/reasons.md, and no other does.
- What hack/readme.py takes from a page.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.measures import MEASURES
from hack import reasonspage
from hack.readme import commands
from psjob_client.cli.main import cli
from psjob_operator.api.crd import STATUS_DEFAULT
from psjob_operator.contract import GROUP
from psjob_operator.plan.conditions import OF_TRAINING
from psjob_operator.plan.process_outcome import UNCOUNTED
from tests.docs.pages import CELLS, COMMANDS, GAP, QUOTED, said
from tests.support.typed import CliRunner

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/expectations.md").read_text()
HEADING = ("expectation", "psjob", "test, or what is missing")
ROWS = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in PAGE.splitlines() if line.startswith("| ")]
LINES = [row for row in ROWS if row != HEADING and not row[0].startswith("---")]


def test_the_first_sentence_counts_the_lines() -> None:
    counts = Counter(verdict for _, verdict, _ in LINES)
    assert set(counts) <= {"yes", "partly", "no"}
    said = f"Of {len(LINES)} expectations psjob meets {counts['yes']}, {counts['partly']} partly and {counts['no']} not at all."
    assert PAGE.split("\n\n")[1] == said


def test_a_line_is_there_once() -> None:
    assert len(LINES) >= 45 and len({line[0] for line in LINES}) == len(LINES)


@pytest.mark.parametrize(("what", "verdict", "why"), LINES, ids=[line[0] for line in LINES])
def test_a_yes_has_a_test_and_all_else_has_a_reason(what: str, verdict: str, why: str) -> None:
    named = re.fullmatch(r"`(\w+/\w+\.py)::(test_\w+)`", why)
    if verdict != "yes":
        assert named is None and why.endswith(".") and len(why.split()) >= 5, f"{what}: say what is missing"
        return
    assert named is not None, f"{what}: name one test as `folder/file.py::function`"
    file = ROOT / "tests" / named[1]
    assert file.is_file(), f"{what}: {file} is not there"
    functions = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert named[2] in functions, f"{what}: {named[1]} has no {named[2]}"


def test_both_lists_of_pages_name_the_page() -> None:
    assert "(expectations.md)" in (ROOT / "docs/index.md").read_text()
    assert "(docs/expectations.md)" in (ROOT / "README.md").read_text()


REFERENCE = (ROOT / "docs/cli.md").read_text()
"""Generated of the commands."""
PLANNED = [(words, figure) for words, figure in COMMANDS if words.startswith("psjob plan-topology --preset")]


@functools.cache
def printed(words: str) -> str:
    done = CliRunner().invoke(cli, shlex.split(words)[1:])
    assert done.exit_code == 0, done.output
    return done.output


def test_every_line_has_a_command_or_says_that_it_is_not_here() -> None:
    assert len(CELLS) > 90
    for cells in CELLS[5:]:
        assert all(cells), cells
        assert cells[-2] in ("command", "not here") or re.search(r"`[^`]+`|\]\(", cells[-2]), cells


@pytest.mark.parametrize(("words", "figure"), PLANNED)
def test_a_quick_command_prints_the_figures_of_its_line(words: str, figure: str) -> None:
    wanted = re.findall(r"`([^`]+)`", figure)
    assert all(one in printed(words) for one in wanted), (wanted, printed(words))


def test_commands_name_what_there_is() -> None:
    for words, _ in COMMANDS:
        first, *rest = shlex.split(words)
        if first == "psjob":
            name = " ".join(["psjob", *rest[: 2 if rest[0] == "simulate" else 1]])
            page = re.split(rf"^## {name}$", REFERENCE, flags=re.MULTILINE)[1].split("\n## ")[0]
            options = {word.split("=")[0] for word in rest if word.startswith("--")}
            assert all(f"{option} " in page or f"{option}`" in page or f"{option}," in page for option in options), words
            files = [word for word in rest if word.startswith("examples/")]
            assert all((ROOT / file).is_file() for file in files), words
        elif first == "pytest":
            tests = re.findall(r"^def (test_\w+)", (ROOT / rest[0]).read_text(), re.MULTILINE)
            assert rest[1:] in ([], ["-m", "soak"]) or any(rest[2] in name for name in tests), words
        else:
            assert {word for word in rest[2:] if not word.startswith("--") and word != "TensorFlow"} <= {
                measure.name for measure in MEASURES
            }, words


@pytest.mark.parametrize("sentence", QUOTED)
def test_a_quoted_sentence_is_said_by_the_code(sentence: str) -> None:
    assert any(sentence in one for one in said()), "the message was changed: change the page too"


def test_there_are_answers_to_many_sentences_and_each_has_words_of_its_own() -> None:
    assert len(QUOTED) == len(set(QUOTED)) >= 25
    assert all(len(sentence.replace(GAP, "")) > 25 for sentence in QUOTED)


OPERATOR = Path(__file__).resolve().parents[2] / "operator/src/psjob_operator"
TREES = {
    path: ast.parse(path.read_text()) for path in sorted(OPERATOR.rglob("*.py")) if path.parent.name in ("plan", "cluster", "render", "api")
}
NAMED = {
    target.id: node.value.value
    for tree in TREES.values()
    for node in tree.body
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    for target in node.targets
    if isinstance(target, ast.Name)
}
"""Constants of modules that are text."""
WORD = re.compile(r"[A-Z][A-Za-z]+")
PLACES = {"Say": 1, "Trouble": 1, "starting_conditions": 0, "running_conditions": 0, "_stall": 1, "_wait": 1, "TerminalPhase": 1}
"""Calls that make a condition, and the place of its reason."""


def words(*nodes: ast.AST | None) -> set[str]:
    """Words that stand in these parts of the code, by themselves or by the name of a constant."""
    found = [one for node in nodes if node is not None for one in ast.walk(node)]
    texts = [one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    texts += [NAMED[one.id] for one in found if isinstance(one, ast.Name) and one.id in NAMED]
    return {text for text in texts if WORD.fullmatch(text)}


def arguments(name: str, place: int) -> Iterator[ast.AST]:
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name and len(node.args) > place:
                yield node.args[place]


def parts(kind: type[ast.AST], function: str) -> Iterator[ast.AST]:
    """Nodes of a kind in functions of that name."""
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                yield from (one for one in ast.walk(node) if isinstance(one, kind))


def fatal_causes() -> set[str]:
    calls = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    outcomes = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "ProcessOutcome" and len(call.args) > 1]
    return set().union(*(words(call.args[1]) for call in outcomes if "fatal" in ast.unparse(call.args[0])))


def causes() -> set[str]:
    return set().union(*(words(node) for node in arguments("ProcessOutcome", 1)), words(*parts(ast.Return, "cause"))) | set(
        UNCOUNTED.values()
    )


def test_every_reason_of_a_condition_is_in_the_table_and_no_other() -> None:
    emitted = set().union(*(words(*arguments(name, place)) for name, place in PLACES.items()))
    yields = [node.value for function in ("_around", "_unread") for node in parts(ast.Yield, function) if isinstance(node, ast.Yield)]
    emitted |= words(*(pair.elts[0] for pair in yields if isinstance(pair, ast.Tuple)))
    returned = [
        node.value for function in ("leaving", "waits_for_source") for node in parts(ast.Return, function) if isinstance(node, ast.Return)
    ]
    emitted |= words(*(pair.elts[0] for pair in returned if isinstance(pair, ast.Tuple)))
    emitted |= words(*parts(ast.Return, "spec_reason")) | set(OF_TRAINING) | fatal_causes()
    emitted |= {condition["reason"] for condition in STATUS_DEFAULT["conditions"]} | {"Waiting"}
    assert emitted == set(reasonspage.REASONS)


def test_every_event_is_in_the_table_and_no_other() -> None:
    of_suspension = {"Suspending", "Suspended"}
    assert words(*arguments("Event", 1)) | of_suspension == set(reasonspage.EVENTS)


def test_every_cause_is_in_the_table_and_no_other() -> None:
    also = {"UnfinishedExit"}
    assert causes() - fatal_causes() | also == set(reasonspage.CAUSES)


def test_every_label_and_annotation_is_in_a_table_and_no_other() -> None:
    text = "".join(path.read_text() for path in TREES)
    ours = {f"{GROUP}/{name}" for name in re.findall(r"\{GROUP\}/([a-z-]+)", text)}
    others = set(re.findall(r'"((?:app\.kubernetes\.io|kubectl\.kubernetes\.io/default)[-a-z/]+)"', text))
    assert ours | others == set(reasonspage.LABELS) | set(reasonspage.ANNOTATIONS)


SAMPLE_PAGE = """# Top

```sh
make nothing
```

## Start

Words.

```sh
# a comment
one --flag \\
  --other

two && three
```

```python
# Not a heading
four
```

### Below it

```sh
five # with a word
```

## Next

```sh
six
```
"""


def test_commands_of_a_section_come_in_their_order() -> None:
    assert commands(SAMPLE_PAGE, "Start") == ["one --flag --other", "two && three", "five # with a word"]
    assert commands(SAMPLE_PAGE, "Below it") == ["five # with a word"]
    assert commands(SAMPLE_PAGE, "Next") == ["six"]
    assert len(commands(SAMPLE_PAGE, "Top")) == 5


def test_a_section_that_is_not_there_is_an_error() -> None:
    for title in ("Nowhere", "Not a heading"):
        with pytest.raises(LookupError, match=title):
            commands(SAMPLE_PAGE, title)
