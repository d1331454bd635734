"""What the prose linter reads of Python sources: public docstrings, messages, and where each line is from.

- What the prose linter says on a machine that cannot build it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.cluster.paths import Unavailable
from hack.prose import __main__ as prose
from hack.prose.extract import extract
from hack.prose.sources import Origin, sources, written

ROOT = Path(__file__).resolve().parents[2]


def docstrings(source: str) -> list[str]:
    return [" ".join(" ".join(line.text for line in one.lines).split()) for one in extract(source) if one.docstring]


def messages(source: str) -> list[str]:
    return [" ".join(line.text for line in one.lines).strip() for one in extract(source) if not one.docstring]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""A module."""', ["A module."]),
        ('def f():\n    """Do."""', ["Do."]),
        ('async def f():\n    """Do."""', ["Do."]),
        ('def _f():\n    """Do."""', []),
        ('class A:\n    """An A."""\n    def m(self):\n        """Do."""\n    def _m(self):\n        """Hide."""', ["An A.", "Do."]),
        ('class _A:\n    """An A."""\n    def m(self):\n        """Do."""', []),
        ('X: int = 3\n"""So many."""', ["So many."]),
        ('X = 3\n"""So many."""\n_Y = 3\n"""Hidden."""', ["So many."]),
        ('def f(a):\n    """Do.\n\n    Args:\n        a: What is done.\n\n    Example:\n        f(3)\n    """', ["Do. What is done."]),
        ('"""Do.\n\nimport psjob as ps\nps.attach(m)\n\nThe end.\n"""', ["Do. The end."]),
        ('K = 1\n"""An object:\n\n{"a": int}\n"""', ["An object:"]),
        ('"""It is taken\nfrom there and read."""', ["It is taken from there and read."]),
        ('"""Of a < b * c, see ``d``."""', ["Of a ‹ b · c, see `d`."]),
    ],
)
def test_public_docstrings_are_read_as_paragraphs(source: str, found: list[str]) -> None:
    assert docstrings(source) == found


@pytest.mark.parametrize(("source", "found"), [
    ('raise ValueError(f"size is {n}, must be {a} or more")', ["size is X, must be X or more"]),
    ('raise ValueError("size is wrong " f"by {n} bytes in all")', ["size is wrong by X bytes in all"]),
    ('log.warning("worker %d waits %.1f s for it", 1, 2.0)', ["worker X waits X s for it"]),
    ('said = "{name} has more than {0} of them".format(3, name=2)', ["X has more than X of them"]),
    ('f(help="Name of a job, or of a run.")', ["Name of a job, or of a run."]),
    ("x = f\"{g('the inner words are read too')} and the outer ones too\"", ["X and the outer ones too", "the inner words are read too"]),
    ('a = "three words only"', []),
    ('f(cel="size of self is at most three")', []),
    ('a = "self.size() > 0 && self.size() < 3"', []),
    ('a = "<p class=one>a page of some words</p>"', []),
    ('a = r"(?:one|two) of three \\w+ and four"', []),
    ('def f():\n    "The docstring has four words."', []),
    ('raise E("a: the key is kept in one line")', ["a: the key is kept in one line"]),
])  # fmt: skip
def test_strings_that_read_as_sentences_are_messages(source: str, found: list[str]) -> None:
    assert messages(source) == found


def test_a_line_of_a_page_leads_back_to_its_source() -> None:
    source = '"""One.\n\nTwo and\nthree.\n"""\n\nraise E(\n    "this message has five words"\n)\n'
    pages = written({"house/src/a/b.py": extract(source)})
    assert set(pages) == {"house/src/a/docstrings.md", "house/src/a/messages.md"}
    page = pages["house/src/a/docstrings.md"]
    assert page.lines == ["One.", "", "Two and", "three.", ""]
    assert [origin.line for origin in page.origins] == [1, 2, 3, 4, 4]
    (message, _) = pages["house/src/a/messages.md"].origins
    assert message == Origin("house/src/a/b.py", 8)


def test_copies_are_read_where_their_originals_are() -> None:
    found = sources(ROOT)
    assert "runtime/src/psjob/contract/__init__.py" in found and "operator/src/psjob_operator/contract.py" not in found
    assert len(found) > 300


@pytest.fixture
def without_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has neither vale nor Go."""

    def none() -> str:
        raise Unavailable("no Go")

    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path))
    monkeypatch.delenv("PSJOB_FORBID_SKIP", raising=False)
    monkeypatch.setattr(prose, "find_go", none)


@pytest.mark.usefixtures("without_go")
def test_lint_skips_prose_by_name_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main([]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("skipped: prose (") and "install Go 1.26" in said.out and said.err == ""


@pytest.mark.usefixtures("without_go")
def test_prose_fails_where_skipping_is_forbidden_or_pages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prose.main(["README.md"]) == 1
    monkeypatch.setenv("PSJOB_FORBID_SKIP", "1")
    assert prose.main([]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("install Go 1.26") == 2


@pytest.mark.usefixtures("without_go")
def test_a_machine_without_a_c_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prose, "find_go", lambda: "/go")
    monkeypatch.setenv("PATH", "")
    assert prose.main([]) == 0
    assert "install gcc or clang" in capsys.readouterr().out
