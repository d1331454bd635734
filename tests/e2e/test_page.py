"""The page of `psjob ui` in a real browser: what is drawn, for whom, and how soon."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from psjob_client.compare import kept
from psjob_client.compare.outcome import Comparison, SideOutcome
from psjob_client.compare.report import page as report
from psjob_client.sdk.client import AsyncClient
from psjob_client.ui.server import Page as Served
from tests import pages
from tests.e2e.local_job import manifest
from tests.soaking import rotating

pytestmark = pytest.mark.nodes
PAINT = 1.0
"""Seconds, on a machine that does nothing else."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with pages.browser() as found:
        yield found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """100 runs of 10,000 points, and a comparison."""
    folder = tmp_path_factory.mktemp("runs")
    for number in range(100):
        pages.a_run(
            folder, f"job{number % 7}-1124-{number:06d}", 10_000, made=1.79e9 + 100 * number, result=("Complete", "Failed")[number % 2]
        )
    assert kept.keep(folder, compared(), time.time()) is not None
    with Served((AsyncClient.local(folder),), folder) as page:
        yield page


def compared() -> Comparison:
    falls = [(float(at), float(at), 2.0 / (at + 1)) for at in range(50)]
    rises = [(float(at), float(at), 2.0 + at) for at in range(50)]
    finals = {"loss": 0.04, "accuracy": 0.97}, {"loss": 51.0, "accuracy": 0.1}
    warnings = ["lr 0.2 is 1.7 times what async bears"]
    other = "psjob run job.yaml --set spec.training.mode=async"
    sides = [
        SideOutcome("sync", "psjob run job.yaml", "Complete", 10.0, 50.0, {"loss": falls}, finals[0], idle=(0.0, 0.0)),
        SideOutcome("async", other, "Complete", 8.0, 50.0, {"loss": rises}, finals[1], idle=(0.1, 0.2), warnings=warnings, diverged=True),
    ]
    return Comparison("digits", "s", {"machine": "2 cores"}, "kind: PSTrainingJob", sides)


def opened(chromium: Browser, served: Served, *, width: int = 1280, scheme: str = "light") -> tuple[Page, list[str]]:
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    found = pages.complaints(page)
    page.goto(served.address)
    expect(page.locator(".plot canvas").first).to_be_visible()
    return page, found


def test_a_hundred_long_runs_are_listed_and_one_is_drawn(chromium: Browser, served: Served) -> None:
    page, errors = opened(chromium, served)
    expect(page.locator("nav li")).to_have_count(101)
    assert pages.drawn(page, ".plot") > 5_000, "a curve, its axes and its grid"
    assert errors == []


@pytest.mark.soak
@pytest.mark.serial
def test_a_hundred_long_runs_are_painted_at_once(chromium: Browser, served: Served) -> None:
    page, _ = opened(chromium, served)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    curve = page.evaluate("performance.getEntriesByType('resource').filter(e => e.name.includes('/curves'))[0].responseEnd") / 1000
    print(f"first paint {paint:.2f} s, first curve {curve:.2f} s")
    assert paint < PAINT and curve < PAINT


@pytest.mark.parametrize(
    ("scheme", "what"),
    [("light", "job"), rotating("dark", "job"), rotating("light", "comparison"), rotating("dark", "comparison")],
)
def test_nobody_is_kept_out(chromium: Browser, served: Served, scheme: str, what: str) -> None:
    page, errors = opened(chromium, served, scheme=scheme)
    if what == "comparison":
        page.get_by_role("link", name="digits-").click()
        expect(page.get_by_role("heading", name="Comparison: digits")).to_be_visible()
        expect(page.get_by_text("diverged").first).to_be_visible()
        expect(page.get_by_text("lr 0.2 is 1.7 times what async bears")).to_be_visible()
    assert pages.barriers(page) == [] and errors == []


@pytest.mark.rotating
@pytest.mark.parametrize("what", ["job", "comparison", "report"])
def test_a_phone_scrolls_in_one_direction(chromium: Browser, served: Served, what: str, tmp_path: Path) -> None:
    page, errors = opened(chromium, served, width=400)
    if what == "comparison":
        page.get_by_role("link", name="digits-").click()
        expect(page.get_by_role("heading", name="Comparison: digits")).to_be_visible()
    if what == "report":
        (tmp_path / "report.html").write_text(report(compared()))
        page.goto(f"file://{tmp_path}/report.html")
        table = page.locator("table").first.bounding_box()
        assert table is not None and table["width"] <= 400
        assert page.locator("td[data-head]").evaluate_all("cells => cells.every(cell => cell.scrollWidth <= cell.clientWidth + 1)")
        assert pages.barriers(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert errors == []


@pytest.mark.rotating
def test_what_a_job_prints_stays_text(chromium: Browser, served: Served) -> None:
    page, errors = opened(chromium, served)
    expect(page.get_by_role("log")).to_contain_text("<script>document.title='owned'</script>")
    assert page.title() != "owned" and errors == []


@pytest.mark.rotating
def test_the_time_line_shows_the_restart(chromium: Browser, served: Served) -> None:
    page, _ = opened(chromium, served)
    lanes = page.locator(".lanes svg")
    expect(lanes).to_have_count(3)
    starts = page.locator(".lanes svg[data-lane='shard 0'] rect")
    expect(starts).to_have_count(4)
    boxes = starts.evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
    assert all(width > 0 for width in boxes), "starting, serving until it was killed, starting, serving"
    expect(page.locator(".lanes svg[data-lane='shard 0'] title").nth(1)).to_contain_text("signal 9")


@pytest.mark.rotating
def test_the_time_line_of_a_run_of_last_week_is_the_run(chromium: Browser, served: Served) -> None:
    page, _ = opened(chromium, served)
    phases = page.locator(".lanes svg[data-lane='job'] rect")
    expect(phases).to_have_count(5)
    widths = phases.evaluate_all("all => all.map(one => Number(one.getAttribute('width')))")
    assert min(widths[:4]) > 50, "four phases before the last one take what they took of 1000"


@pytest.mark.rotating
def test_large_and_small_numbers_fit_beside_their_axis(chromium: Browser, tmp_path: Path) -> None:
    run = pages.a_run(tmp_path, "job-1", 2, made=1.79e9)
    lines = ({"time": 1.79e9 + at, "step": at, "rate": 50, "metrics": {"loss": 1.25e12 * at, "tiny": 1.25e-9 * at}} for at in range(100))
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Served((AsyncClient.local(tmp_path),), tmp_path) as served:
        page, errors = opened(chromium, served)
        edges = page.locator(".plot canvas").evaluate_all(
            "all => all.map(one => one.getContext('2d').getImageData(0, 0, 3, one.height).data.reduce((sum, value) => sum + value, 0))"
        )
    assert len(edges) == 3 and edges == [0] * 3 and errors == [], "no letter touches the left edge"


@pytest.mark.rotating
def test_what_is_gone_or_broken_is_a_sentence(chromium: Browser, served: Served, tmp_path: Path) -> None:
    run = pages.a_run(tmp_path, "half-1124-000001", 50, made=1.79e9)
    (run / "history.jsonl").write_bytes(b'{"time": 1, "step"\n\xff\xff\n[]\n')
    (run / "status.json").write_text("{")
    with Served((AsyncClient.local(tmp_path),), tmp_path) as page_served:
        page = chromium.new_page()
        errors = pages.complaints(page)
        page.goto(page_served.address)
        expect(page.get_by_text("No number yet")).to_be_visible()
        assert errors == []
        for path in sorted(run.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run.rmdir()
        expect(page.get_by_role("alert")).to_contain_text("half-1124-000001", timeout=10_000)
    expect(page.get_by_role("alert")).to_contain_text("start it again", timeout=10_000)


@pytest.mark.rotating
def test_a_run_is_watched_while_it_trains(chromium: Browser, tmp_path: Path) -> None:
    """`psjob run --ui`: the step rises, the curve grows, the log follows, the end is told; then the page says that it is gone."""
    job = manifest(tmp_path, "page.py")
    command = [sys.executable, "-m", "psjob_client.cli.main", "run", str(job), "--no-progress", "--ui"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        address = next(line for line in process.stdout if "http://" in line).split(" at ")[1].strip()
        page = chromium.new_page()
        errors = pages.complaints(page)
        page.goto(address)
        expect(page.locator(".plot canvas").first).to_be_visible(timeout=60_000)
        expect(page.get_by_role("log")).to_contain_text("told 5", timeout=30_000)
        first = page.locator(".plot").first.get_attribute("aria-label") or ""
        (tmp_path / "go").touch()
        expect(page.get_by_role("log")).to_contain_text("told 30", timeout=30_000)
        expect(page.locator(".plot").first).not_to_have_attribute("aria-label", first, timeout=10_000)
        assert pages.drawn(page, ".plot") > 1_000
        (tmp_path / "end").touch()
        rest = process.stdout.read()
        assert process.wait(60) == 0, rest
        expect(page.get_by_role("alert")).to_contain_text("start it again", timeout=10_000)
        assert all("ERR_CONNECTION_REFUSED" in error or "Failed to fetch" in error for error in errors), errors


@pytest.mark.rotating
def test_stages_have_a_table_and_a_job_without_them_has_none(chromium: Browser, tmp_path: Path) -> None:
    stages = [
        {"name": "front", "desired": 2, "ready": 2, "step": 9, "delay": 0.0, "idle": 0.25, "rssBytes": 5 << 20, "peakBytes": 7 << 20},
        {"name": "<b>back</b>", "desired": 1, "ready": 0, "step": 8, "waiting": "activations of micro-batch 1 of step 8 from worker 1"},
    ]
    pages.a_run(tmp_path, "cut-1124-000002", 50, made=1.79e9 + 100, stages=stages)
    pages.a_run(tmp_path, "whole-1124-000001", 50, made=1.79e9)
    with Served((AsyncClient.local(tmp_path),), tmp_path) as served:
        page, errors = opened(chromium, served)
        table = page.get_by_role("region", name="Stages:")
        expect(table.locator("tbody tr")).to_have_count(2)
        cells = table.locator("tbody tr").nth(0).locator("td")
        assert cells.all_text_contents() == ["front", "2/2", "9", "0", "25 %", "5.0 MiB", "7.0 MiB", "–", ""]
        assert table.locator("tbody tr").nth(1).locator("td").all_text_contents() == [
            "<b>back</b>", "0/1", "8", "–", "–", "–", "–", "–", "activations of micro-batch 1 of step 8 from worker 1",
        ]  # fmt: skip
        assert pages.barriers(page) == []
        page.get_by_role("link", name="whole").click()
        expect(page.get_by_role("heading", name="whole", exact=True)).to_be_visible()
        expect(table).to_have_count(0)
        assert errors == []
