"""The prose linter: its rules find what they are for. `make lint` asks it about the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.cluster.paths import ClusterError, Unavailable
from hack.prose.__main__ import ROOT, Finding, _asked, findings, judge, of_sources, vale
from hack.prose.extract import extract

LONG = "word " * 30 + "end."
ERROR = Finding("docs/a.md", 3, "psjob.Long", "too long", True)


@pytest.fixture(scope="module")
def built() -> Path:
    try:
        return vale()
    except Unavailable as absent:
        pytest.skip(f"needs vale, which Go builds: {absent}")


def told(tmp_path: Path, text: str) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n")
    return [f"{one.line} {one.rule}" for one in findings([str(page)])]


@pytest.mark.usefixtures("built")
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (LONG + "\n\nShort. So short. Very.", ["3 psjob.Long", "3 psjob.Longish"]),
        ("word " * 26 + "end. Short one. So is this.", ["3 psjob.Longish"]),
        ("word " * 17 + "end. " + "word " * 17 + "end.", ["1 psjob.Mean"]),
        ("Rules for late pushes are there.", ["3 psjob.Riddles"]),
        ("It tells the truth in status.", ["3 psjob.Riddles"]),
        ("Every worker has a clock.", ["3 psjob.Clock"]),
        ("The virtual clock runs.", []),
        ("Shards alone have it.", ["3 psjob.Habits"]),
        ("The operator leaves these pods alone.", []),
        ("The job goes on from there.", ["3 psjob.Habits"]),
        ("What goes on the wire is sealed.", []),
        ("All modes but local take it.", ["3 psjob.Habits"]),
        ("Memory is 4 MiB a worker.", ["3 psjob.Habits"]),
        ("In one a run ended.", []),
        ("The script is told so.", ["3 psjob.Habits"]),
        ("Where a worker is lost, another starts.", ["3 psjob.If"]),
        ("Where the volume is mounted.", []),
        ("We utilize it.", ["3 psjob.Terms"]),
        ("The lag of a push.", ["3 psjob.Terms"]),
        ("A worker lags behind. The rule is lr-over-lag.", []),
        ("A worker pushes a gradient.", []),
        ("`tells the truth`\n\n```\na clock\n```", []),
    ],
)
def test_a_rule_finds_what_it_is_for(tmp_path: Path, text: str, rules: list[str]) -> None:
    assert told(tmp_path, text) == rules


@pytest.mark.usefixtures("built")
@pytest.mark.rotating
def test_a_source_is_read_by_the_rules_of_pages() -> None:
    source = f'''"""Short.\n\n{LONG}\n"""\n\nraise E("the message tells the truth " f"of {{n}} values")\n'''
    calm = '"""Short. So short. Very. It is. So it is. It has to be."""\n'
    found = of_sources({"house/a.py": extract(source), "house/b.py": extract(calm)})
    assert [f"{one.page}:{one.line} {one.rule}" for one in found if one.error] == ["house/a.py:3 psjob.Long", "house/a.py:6 psjob.Riddles"]


@pytest.mark.usefixtures("built")
@pytest.mark.rotating
def test_the_mean_of_sentences_is_that_of_a_folder() -> None:
    (found,) = of_sources({"house/a.py": extract(f'"""{"word " * 17}end."""\n')})
    assert (found.page, found.line, found.rule) == ("house/docstrings.md", 1, "psjob.Mean")


def test_an_error_that_is_not_counted_is_named() -> None:
    assert judge([ERROR], {}) == ["docs/a.md:3: error: too long (psjob.Long)"]
    assert judge([ERROR], {"docs/a.md": 1}) == []


def test_a_count_that_is_too_high_is_named() -> None:
    (wrong,) = judge([ERROR], {"docs/a.md": 2})
    assert wrong == "hack/prose/pending.toml counts 2 errors of docs/a.md, which has 1; lower the number"


def test_a_page_that_is_not_there_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="there is no page"):
        findings([str(tmp_path / "gone.md")])


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


@pytest.mark.usefixtures("built")
@pytest.mark.rotating
def test_sentences_of_the_first_pages_are_short(tmp_path: Path) -> None:
    """The rule finds a page like them with longer ones, and the linter asks it of both (`python -m hack.prose`)."""
    text = "word " * 13 + "end. " + "word " * 16 + "end."
    for name, rules in (("README.md", ["1 psjob.First"]), ("other.md", [])):
        (tmp_path / name).write_text(f"# Page\n\n{text}\n")
        assert [f"{one.line} {one.rule}" for one in _asked([name], tmp_path) if one.error] == rules
