"""Each sentence that docs/troubleshooting.md quotes is one that the code says."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^> (.+)$", PAGE, re.MULTILINE)
GAP = "…"


@functools.cache
def said() -> frozenset[str]:
    """Every text of the sources, with a gap where something is filled in."""
    found = set()
    for folder in ("runtime/src", "client/src", "operator/src"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    whole = "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
                    found.add(re.sub(f"{GAP}+", GAP, whole))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(re.sub(r"\{\w*\}", GAP, node.value))
    return frozenset(found)


@pytest.mark.parametrize("sentence", QUOTED)
def test_a_quoted_sentence_is_said_by_the_code(sentence: str) -> None:
    assert any(sentence in one for one in said()), "the message was changed: change the page too"


def test_there_are_answers_to_many_sentences_and_each_has_words_of_its_own() -> None:
    assert len(QUOTED) == len(set(QUOTED)) >= 25
    assert all(len(sentence.replace(GAP, "")) > 25 for sentence in QUOTED)
