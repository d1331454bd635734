"""Each sentence that docs/troubleshooting.md quotes is one that the code says."""

from __future__ import annotations

import pytest

from tests.docs.pages import GAP, QUOTED, said


@pytest.mark.parametrize("sentence", QUOTED)
def test_a_quoted_sentence_is_said_by_the_code(sentence: str) -> None:
    assert any(sentence in one for one in said()), "the message was changed: change the page too"


def test_there_are_answers_to_many_sentences_and_each_has_words_of_its_own() -> None:
    assert len(QUOTED) == len(set(QUOTED)) >= 25
    assert all(len(sentence.replace(GAP, "")) > 25 for sentence in QUOTED)
