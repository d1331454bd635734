"""Every output that README and docs show is what the code says: compared in a run, or with the sentences in the sources.

`docs/troubleshooting.md` has a test of its own, with the same sentences: `tests/unit/test_docs_pages.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from psjob_client.cli.main import cli
from tests.docs.finding import ALL, TEXTS, Block
from tests.docs.pages import GAP, PAGES, QUOTED, said
from tests.support import warm
from tests.support.typed import CliRunner

SHOWN = [block for block in ALL if block.kind in ("", "text", "console") and block.page != "docs/cli.md"]
"""docs/cli.md is generated."""
RUN = {f"docs/{getattr(page, 'values', [page])[0]}" for page in PAGES}
"""Their output is compared by tests/live/test_docs_pages.py."""
DRAWN = {
    "docs/architecture.md": "pictures of boxes and arrows, and the command that the operator writes",
    "docs/stages.md": "the output for a model of the page's author, whose words are compared below",
}
"""Pages whose output is a drawing or depends on a model that is not in the repository."""
FORMULA = re.compile(r"^[\w·+()\- ]+$")
COVERED, LEAST = 0.8, 4
"""A text counts as said where this part of it is in sentences of the code that have at least so many letters."""


def covered(text: str) -> float:
    """The part of the text, of its letters, that sentences of the code explain. A gap stands for up to 120 characters."""
    flat = " ".join(text.split())
    marks = [False] * len(flat)
    for sentence in said():
        parts = [part for part in " ".join(sentence.split()).split(GAP) if part.strip()]
        if not parts or max(len(part.strip()) for part in parts) < LEAST or not all(part.strip() in flat for part in parts):
            continue
        for found in re.finditer(".{0,120}?".join(re.escape(part.strip()) for part in parts), flat):
            marks[found.start() : found.end()] = [True] * (found.end() - found.start())
    letters = [mark for mark, letter in zip(marks, flat, strict=True) if letter.isalpha()]
    return sum(letters) / len(letters)


COMPARED = [
    pytest.param(one, id=one.place, marks=[pytest.mark.rotating] if one.kind == "console" else [])
    for one in SHOWN
    if one.page not in {*RUN, *DRAWN}
]


@pytest.mark.parametrize("block", COMPARED)
def test_what_is_shown_is_what_the_code_says(tmp_path: Path, block: Block) -> None:
    if block.kind == "console":
        runs(tmp_path, block)
    elif block.page == "docs/topology.md":
        same(block, "plan-topology", "--preset", "d2l")
    elif not (block.kind == "text" and FORMULA.match(block.text.strip())):
        line = block.text.splitlines()[0] if block.text.startswith("STAGE") else block.text
        assert covered(line) >= COVERED, f"the code does not say this: {line}"


def runs(folder: Path, block: Block) -> None:
    """The commands after `$` print the lines below them, but for their SHA-256, which is of the machine."""
    told = ""
    for line in block.text.splitlines():
        if line.startswith("$ psjob "):
            code, told = warm.run(folder, line.split()[2:])
            assert code == 0, told
        else:
            pattern = re.sub(r"[0-9a-f]{12}…", "[0-9a-f]{12,64}", re.escape(line).replace("\\…", "…"))
            assert re.search(pattern, told), f"{line}\nis not in\n{told}"


def same(block: Block, *words: str) -> None:
    """The command prints these lines, in this order."""
    told = [line.rstrip() for line in CliRunner().invoke(cli, list(words)).stdout.splitlines()]
    places = [told.index(line.rstrip()) for line in block.text.splitlines() if line != GAP]
    assert places == sorted(places)


def test_each_page_that_is_left_out_shows_something() -> None:
    assert {block.page for block in SHOWN} >= set(DRAWN)
    assert all(len(reason.split()) > 5 for reason in DRAWN.values())


def test_sentences_are_quoted_on_one_page() -> None:
    """A quoted line elsewhere would be compared with nothing."""
    quotes = {page for page, text in TEXTS.items() if re.search(r"^> ", text, re.MULTILINE)}
    assert QUOTED and quotes == {"docs/troubleshooting.md"}


@pytest.mark.parametrize("text", ["psjob: the shard has lost its way and asks a passer-by", "zzz 4.1 zzz"])
def test_what_the_code_does_not_say_is_found(text: str) -> None:
    assert covered(text) < COVERED
