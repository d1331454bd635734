"""Pictures of each view of the page and of the report, for people to look at and approve.

`python -m tests.e2e.test_page_pictures` redraws them.

The test compares coarse shades of gray, so that another machine's fonts make no difference and a lost chart, table or colour does.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Browser, Page, expect

from psjob_client.compare import outcome
from psjob_client.compare.outcome import Comparison, SideOutcome
from psjob_client.compare.report import page as report
from psjob_client.sdk.client import AsyncClient
from psjob_client.ui.server import Page as Served
from tests.support import pages

pytestmark = [pytest.mark.nodes, pytest.mark.rotating]
PICTURES = Path(__file__).with_name("pictures")
VIEWS = ("job", "runs", "comparison", "report")
LOOKS = (("light", 1280), ("dark", 1280), ("light", 400), ("dark", 400))
MADE = 1.79e9
TALL = 1800
COARSE = (32, 24)
SHADE = 12
"""Mean difference of the coarse pictures, of 255, that other fonts may make."""


def compared() -> Comparison:
    """Three sides: one that learns fast, one that learns late, one that does not."""
    fast = [(float(at) / 2, float(at), 2.0 / (at / 5 + 1)) for at in range(80)]
    late = [(float(at), float(at), 2.0 / (at / 8 + 1)) for at in range(80)]
    bad = [(float(at) / 3, float(at), 1.5 + at / 40) for at in range(80)]
    run = "psjob run job.yaml --set spec.training.mode="
    finals = {"loss": 0.2, "accuracy": 0.96}, {"loss": 0.12, "accuracy": 0.97}, {"loss": 3.4, "accuracy": 0.1}
    warnings = ["lr 0.2 is 1.7 times what async bears"]
    sides = [
        SideOutcome("sync", f"{run}sync", "Complete", 80.0, 80.0, {"loss": late}, finals[0], idle=(0.4, 0.3), mean_staleness=0.0),
        SideOutcome("async", f"{run}async", "Complete", 40.0, 80.0, {"loss": fast}, finals[1], idle=(0.1, 0.1), mean_staleness=0.9),
        SideOutcome("bounded:3", f"{run}bounded", "Complete", 27.0, 80.0, {"loss": bad}, finals[2], mean_staleness=1.9, warnings=warnings),
    ]
    return Comparison("digits", "s", {"machine": "2 cores", "when": "2026-11-24 16:08 UTC"}, "kind: PSTrainingJob", sides)


@contextmanager
def shown(folder: Path) -> Iterator[Served]:
    """Four runs of one name and a comparison, of times that stay."""
    for number in range(4):
        result = "Failed" if number == 1 else "Complete"
        pages.a_run(folder, f"hello-1124-{number:06d}", 240 + number, made=MADE + 100 * number, result=result, lr=0.1 * (1 + number % 2))
    made = outcome.keep(folder, compared(), MADE)
    assert made is not None
    os.utime(made, (MADE, MADE))
    (folder / "report.html").write_text(report(compared()))
    with Served((AsyncClient.local(folder),), folder) as served:
        yield served


@contextmanager
def view(chromium: Browser, served: Served, folder: Path, what: str, scheme: str, width: int) -> Iterator[tuple[Page, list[str]]]:
    """One view in a browser, drawn to its end; with what its console complains of."""
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, timezone_id="UTC", locale="en-GB", reduced_motion="reduce"
    )  # type: ignore[arg-type]
    page = context.new_page()
    complaints = pages.complaints(page)
    runs = [f"hello-1124-{number:06d}" for number in range(4)]
    named = outcome.names(folder)[0]["name"]
    place = {
        "job": f"#/jobs/0/{runs[3]}",
        "runs": "#/runs/" + ",".join(f"0%2F{run}" for run in runs),
        "comparison": f"#/comparisons/{named}",
    }
    try:
        if what == "report":
            page.goto(f"file://{folder}/report.html")
            expect(page.locator("figure svg").first).to_be_visible()
        else:
            page.goto(served.address)
            page.goto(served.address.partition("#")[0] + place[what])
            expect(page.locator(".plot canvas").first).to_be_visible()
            expect(page.locator("nav li")).to_have_count(5)
            heading = {"job": "hello", "runs": "4 runs over one another", "comparison": "Comparison: digits"}[what]
            expect(page.locator("main h2").first).to_have_text(heading)
        yield page, complaints
    finally:
        context.close()


def taken(page: Page) -> Image.Image:
    """The upper part of the page: enough to approve, and small."""
    page.wait_for_timeout(200)
    whole = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    return whole.crop((0, 0, whole.width, min(whole.height, TALL)))


def apart(one: Image.Image, other: Image.Image) -> float:
    """Mean difference of two pictures' coarse shades, of 255."""
    coarse = [picture.convert("L").resize(COARSE, Image.Resampling.BOX) for picture in (one, other)]
    return float(ImageStat.Stat(ImageChops.difference(*coarse)).mean[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with shown(folder) as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with pages.browser() as found:
        yield found


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
@pytest.mark.parametrize("what", VIEWS)
def test_a_view_keeps_nobody_out_and_looks_as_it_was_approved(
    chromium: Browser, served: Served, folder: Path, what: str, scheme: str, width: int
) -> None:
    with view(chromium, served, folder, what, scheme, width) as (page, complaints):
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls in one direction"
        tables = page.locator(".scroll").evaluate_all(
            "all => all.filter(one => one.offsetParent && one.scrollWidth > one.clientWidth + 1).length"
        )
        assert tables == 0, "each table is seen whole"
        assert pages.barriers(page, pages.EVERY) == []
        assert complaints == []
        picture = taken(page)
    approved = Image.open(PICTURES / f"{what}-{scheme}-{width}.png").convert("RGB")
    assert picture.size[0] == approved.size[0]
    found = apart(picture, approved)
    assert found < SHADE, f"it looks otherwise by {found:.1f} of 255: look, and approve by python -m tests.e2e.test_page_pictures"


def test_what_is_missing_is_seen_in_a_coarse_picture() -> None:
    """The comparison above can fail: another scheme, a page without its charts."""
    light, dark = (Image.open(PICTURES / f"runs-{scheme}-1280.png").convert("RGB") for scheme in ("light", "dark"))
    assert apart(light, dark) > SHADE and apart(light, light) == 0
    bare = Image.new("RGB", light.size, light.getpixel((light.width - 2, 100)))
    assert apart(light, bare) > 0.5 * SHADE


def main() -> None:
    """Draw all of them anew."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, pages.browser() as chromium, shown(Path(name)) as served:
        for what in VIEWS:
            for scheme, width in LOOKS:
                with view(chromium, served, Path(name), what, scheme, width) as (page, _):
                    path = PICTURES / f"{what}-{scheme}-{width}.png"
                    taken(page).quantize(160, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
                    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
