"""Questions of users in their own words: the site's own search, in a real browser, finds the page that answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath

import pytest
from playwright.sync_api import Page

from hack.site.__main__ import existing
from hack.site.links import broken
from hack.site.stage import pages
from tests.docs import ROOT
from tests.support.pages import browser

LIST = "tests/docs/questions.md"
ROWS = re.findall(r"^\| ([^|]+?) \| \[[^\]]+\]\(([^)]+)\) \|$", (ROOT / LIST).read_text(), re.MULTILINE)
FIRST, ENOUGH = 3, 28
NOTHING = "qqzzqq"


@pytest.fixture(scope="module")
def opened(site: Path) -> Iterator[Page]:
    with browser() as found:
        page = found.new_page()
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").click()
        yield page


def hits(page: Page, site: Path, question: str) -> list[str]:
    """The pages that the search shows for it, best first, as paths of the site."""
    box, told = page.locator(".md-search__input"), page.locator(".md-search-result__meta")
    box.fill(NOTHING)
    box.dispatch_event("keyup")
    told.filter(has_text="No matching").wait_for(state="attached")
    box.fill(question)
    box.dispatch_event("keyup")
    told.filter(has_not_text="No matching").wait_for(state="attached")
    links = page.locator(".md-search-result__item > .md-search-result__link:first-child").all()
    prefix = site.as_uri() + "/"
    return list(dict.fromkeys(re.split(r"[?#]", link.get_attribute("href") or "")[0].removeprefix(prefix) for link in links))


def answer(target: str) -> str:
    """The page of the site for a link of the list."""
    path = PurePosixPath(normpath(f"tests/docs/{target.partition('#')[0]}"))
    return str(path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html"))


def test_there_are_thirty_and_their_answers_exist() -> None:
    assert len({question for question, _ in ROWS}) == len(ROWS) == 30
    texts = {**pages(ROOT), LIST: (ROOT / LIST).read_text()}
    assert [wrong for wrong in broken(texts, existing(ROOT)) if wrong.startswith(LIST)] == []
    assert len({answer(target) for _, target in ROWS}) >= 20


@pytest.mark.nodes
def test_the_search_finds_the_answers(opened: Page, site: Path) -> None:
    missed = {}
    for question, target in ROWS:
        found = hits(opened, site, question)
        if answer(target) not in found[:FIRST]:
            missed[question] = found[:FIRST]
    assert len(ROWS) - len(missed) >= ENOUGH, missed


@pytest.mark.nodes
@pytest.mark.rotating
def test_a_question_about_something_else_finds_nothing_of_it(opened: Page, site: Path) -> None:
    assert "docs/quickstart.html" not in hits(opened, site, "prometheus alerts grafana")[:FIRST]
