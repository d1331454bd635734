"""The site as a reader opens it from the file system, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request

from hack.site.__main__ import main
from hack.site.stage import pages
from tests.docs import ROOT
from tests.support.pages import SECONDS, barriers, browser, complaints
from tests.support.quick import rest_rotates

PHONE, DESK = {"width": 400, "height": 800}, {"width": 1280, "height": 900}
SHOWN = [path.replace("README.md", "index.html").replace(".md", ".html") for path in pages(ROOT)]
LOOKED_AT = [
    "index.html", "docs/quickstart.html", "docs/concepts.html", "docs/troubleshooting.html", "docs/manifest/index.html",
    "docs/architecture.html",
]  # fmt: skip
"""Pages whose kinds of parts (tables, code of each language, quotes, lists, pictures) are those of all."""


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as found:
        yield found


def show(opened: Browser, site: Path, page: str, size: dict[str, int], scheme: str) -> Page:
    context = opened.new_context(
        viewport={"width": size["width"], "height": size["height"]}, color_scheme="dark" if scheme == "dark" else "light"
    )
    made = context.new_page()
    made.set_default_timeout(SECONDS * 1000)
    made.goto((site / page).as_uri())
    return made


@pytest.mark.nodes
@pytest.mark.parametrize("page", rest_rotates(LOOKED_AT, ["docs/quickstart.html"]))
@pytest.mark.parametrize("scheme", rest_rotates(["light", "dark"], ["light"]))
def test_nothing_keeps_people_out(opened: Browser, site: Path, page: str, scheme: str) -> None:
    shown = show(opened, site, page, DESK, scheme)
    assert shown.locator("body").get_attribute("data-md-color-scheme") == {"light": "default", "dark": "slate"}[scheme]
    assert barriers(shown) == []
    shown.context.close()


@pytest.mark.nodes
@pytest.mark.soak
def test_no_page_scrolls_sideways_on_a_phone(opened: Browser, site: Path) -> None:
    shown = show(opened, site, "index.html", PHONE, "light")
    wide = {}
    for page in SHOWN:
        shown.goto((site / page).as_uri())
        width = shown.evaluate("document.scrollingElement.scrollWidth")
        if width > PHONE["width"]:
            wide[page] = width
    assert wide == {}
    shown.context.close()


@pytest.mark.nodes
@pytest.mark.parametrize("page", rest_rotates([*LOOKED_AT, "docs/coming/tfjob.html"], ["index.html", "docs/coming/tfjob.html"]))
def test_no_code_is_cut_off_on_a_desk(opened: Browser, site: Path, page: str) -> None:
    shown = show(opened, site, page, DESK, "light")
    every = shown.locator("article .highlight:not(.drawing) code")
    assert every.count() > 0 or page == "docs/troubleshooting.html"
    assert every.evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText.slice(0, 40))") == []
    # A drawing is one line a line, and scrolls.
    drawings = shown.locator("article .drawing code").evaluate_all("all => all.map(one => getComputedStyle(one).whiteSpace)")
    assert set(drawings) <= {"pre"} and bool(drawings) == (page == "docs/architecture.html")
    shown.context.close()


@pytest.mark.nodes
@pytest.mark.rotating
def test_nothing_is_fetched_from_elsewhere_and_no_script_complains(opened: Browser, site: Path) -> None:
    shown = show(opened, site, "index.html", DESK, "light")
    asked: list[str] = []
    told = complaints(shown)

    def note(request: Request) -> None:
        asked.append(request.url)

    shown.on("request", note)
    for page in LOOKED_AT:
        shown.goto((site / page).as_uri(), wait_until="networkidle")
    assert asked and [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert told == []
    shown.context.close()


@pytest.mark.nodes
@pytest.mark.rotating
def test_the_search_finds_a_page_and_leads_to_it(opened: Browser, site: Path) -> None:
    shown = show(opened, site, "index.html", DESK, "light")
    shown.locator(".md-search__input").fill("NetworkPolicy")
    first = shown.locator(".md-search-result__link").first
    first.wait_for()
    first.click()
    shown.wait_for_url(lambda url: "?h=" in url)
    assert "networkpolic" in shown.locator("article").inner_text().lower()
    shown.context.close()


def test_a_folder_that_is_no_site_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} exists and is no site that was built before; name another folder\n"
    assert (tmp_path / "mine.txt").read_text() == "kept"
