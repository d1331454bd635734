"""The page of `psjob ui` in a real browser: what is drawn, for whom, and how soon."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from psjob_client.compare import outcome
from psjob_client.compare.outcome import Comparison, SideOutcome
from psjob_client.compare.report import page as report
from psjob_client.sdk.client import AsyncClient
from psjob_client.ui.server import Page as Served
from tests.e2e.local_job import manifest
from tests.support import pages
from tests.support.soaking import rotating

pytestmark = pytest.mark.nodes


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with pages.browser() as found:
        yield found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """100 runs of 10,000 points, and a comparison."""
    folder = tmp_path_factory.mktemp("runs")
    for number in range(100):
        pages.a_run(folder, run_name(number), 10_000, made=1.79e9 + 100 * number, result=("Complete", "Failed")[number % 2])
    assert outcome.keep(folder, compared(), time.time()) is not None
    with Served((AsyncClient.local(folder),), folder) as page:
        yield page


def run_name(number: int) -> str:
    return f"job{number % 7}-1124-{number:06d}"


def address(served: Served) -> str:
    """Without its token, which the browser has."""
    return served.address.partition("#")[0]


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
    assert pages.drawn(page, ".plot") > 3_000, "a curve, its axes and its grid"
    assert errors == []


@pytest.mark.rotating
def test_a_hundred_runs_are_drawn_over_one_another_in_as_many_charts_as_ten(chromium: Browser, served: Served) -> None:
    """What grows with the runs is rows of tables. `python -m bench page` measures how long it takes."""
    page, errors = opened(chromium, served)
    sizes = []
    for count in (10, 100):
        page.goto(f"{address(served)}#/runs/" + ",".join(f"0%2F{run_name(number)}" for number in range(count)))
        expect(page.get_by_role("heading", name=f"{count} runs over one another")).to_be_visible()
        expect(page.locator("main tbody tr")).to_have_count(count)
        assert page.locator("main canvas").count() == 3 and pages.drawn(page, ".plot") > 2_000
        sizes.append(page.evaluate("document.querySelector('main').querySelectorAll('*').length"))
        asked = page.evaluate("performance.getEntriesByType('resource').filter(e => e.name.includes('api/runs')).at(-1).decodedBodySize")
        assert asked < 5_000_000
    rows = 90 * 25
    assert sizes[1] - sizes[0] < rows, "elements of a run: its row"
    assert errors == []


@pytest.mark.rotating
def test_runs_are_ticked_and_drawn_by_keyboard(chromium: Browser, served: Served) -> None:
    page, errors = opened(chromium, served)
    page.get_by_label("Find a job").fill("job3")
    expect(page.locator("nav .run")).to_have_count(14)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Draw 14 over one another")).to_be_visible()
    page.get_by_role("button", name="None").focus()
    page.keyboard.press("Enter")
    for box in page.get_by_role("checkbox", name="over others").all()[:2]:
        box.focus()
        page.keyboard.press("Space")
    page.get_by_role("link", name="Draw 2 over one another").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="2 runs over one another")).to_be_visible()
    labels = page.locator("main tbody tr td:first-child").all_text_contents()
    assert len(set(labels)) == 2 and all(label.startswith("job3 ") for label in labels), "one name, told apart"
    plot = page.locator(".plot").first
    assert all(label in (plot.get_attribute("aria-label") or "") for label in labels)
    page.get_by_role("checkbox", name=labels[0]).focus()
    page.keyboard.press("Space")
    expect(plot).not_to_have_attribute("aria-label", re.compile(labels[0]))
    assert labels[1] in (plot.get_attribute("aria-label") or "") and errors == []


@pytest.mark.rotating
def test_smoothing_axis_and_scale_are_chosen_and_kept(chromium: Browser, served: Served) -> None:
    page, errors = opened(chromium, served)
    said = page.locator(".read").first
    expect(said).to_contain_text("smoothed")
    page.get_by_label("Smoothing").focus()
    page.keyboard.press("Home")
    expect(said).not_to_contain_text("smoothed")
    pixels = pages.drawn(page, ".plot")
    page.keyboard.press("End")
    expect(said).to_contain_text("smoothed")
    assert pages.drawn(page, ".plot") != pixels
    expect(said).to_contain_text("at 9,999")
    page.get_by_label("Against").select_option("time")
    expect(said).to_contain_text("at 69.99")
    page.get_by_label("Logarithmic").check()
    expect(page.locator(".read").nth(2)).to_contain_text("not logarithmic")  # accuracy begins at 0
    page.reload()
    expect(page.get_by_label("Smoothing")).to_have_value("0.99")
    expect(page.get_by_label("Against")).to_have_value("time")
    expect(page.locator(".read").first).to_contain_text("at 69.99")
    assert errors == []


@pytest.mark.rotating
def test_a_colour_of_the_time_line_means_one_thing_and_a_killed_shard_was_healthy_before(chromium: Browser, served: Served) -> None:
    page, _ = opened(chromium, served)
    kinds = page.locator(".lanes rect").evaluate_all(
        "all => all.map(one => [one.querySelector('title').textContent.match(/: ([A-Za-z]+),/)[1], getComputedStyle(one).fill])"
    )
    by_state = {state: {fill for other, fill in kinds if other == state} for state, _ in kinds}
    assert all(len(fills) == 1 for fills in by_state.values()) and by_state["Serving"] == by_state["Running"]
    assert len({fill for fills in by_state.values() for fill in fills}) == len(by_state) - 1, "each other state has a colour of its own"
    legend = page.locator(".keys rect").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")
    assert set(legend) == {fill for fills in by_state.values() for fill in fills} and len(legend) == len(set(legend))
    killed = page.locator(".lane:has(svg[data-lane='shard 0'])")
    expect(killed.locator(".m-fail")).to_have_attribute("title", re.compile("Serving.*signal 9"))
    assert "Failed" not in by_state


@pytest.mark.rotating
def test_a_word_is_not_said_twice_and_every_file_is_there(chromium: Browser, tmp_path: Path) -> None:
    pages.a_run(tmp_path, "job-1", 30, made=1.79e9)
    with Served((AsyncClient.local(tmp_path),), tmp_path) as served:
        context = chromium.new_context()
        page = context.new_page()
        lost: list[str] = []
        page.on("response", lambda answer: lost.append(answer.url) if answer.status >= 400 else None)
        page.goto(served.address)
        expect(page.locator(".plot canvas").first).to_be_visible()
        icon = page.locator("link[rel=icon]").get_attribute("href")
        assert page.request.get(f"{address(served)}{icon}").headers["content-type"] == "image/svg+xml"
        for head in page.locator(".head").all_text_contents():
            assert len(head.split()) == len(set(head.split())), head
    assert lost == []


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
    assert pages.barriers(page, pages.EVERY) == [] and errors == []


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
        assert pages.barriers(page, pages.EVERY) == []
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
    expect(phases).to_have_count(4)
    widths = phases.evaluate_all("all => all.map(one => Number(one.getAttribute('width')))")
    assert min(widths) > 50, "each phase takes what it took of 1000; the last one is an end"


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


def test_where_a_step_goes_is_a_bar_with_a_colour_a_part(chromium: Browser, tmp_path: Path) -> None:
    parts = {"compute": 0.026, "copyOut": 0.009, "wire": 0.12, "others": 0.002, "update": 0.04, "copyBack": 0.01, "psjob": 0.0}
    pages.a_run(tmp_path, "slow-1124-000002", 50, made=1.79e9 + 100, stepParts=parts, stepAdvice="workers compute for 13% <b>of</b> it")
    pages.a_run(tmp_path, "whole-1124-000001", 50, made=1.79e9)
    with Served((AsyncClient.local(tmp_path),), tmp_path) as served:
        page, errors = opened(chromium, served)
        bar = page.get_by_role("img", name="A step takes 207 ms: compute 26 ms, copy out 9 ms, wire 120 ms")
        expect(bar).to_be_visible()
        wide = {one.get_attribute("data-part"): one.bounding_box() for one in bar.locator("rect").all()}
        box = bar.bounding_box()
        assert box is not None and set(wide) == set(parts)
        for name, seconds in parts.items():
            assert abs((wide[name] or {"width": 0.0})["width"] / box["width"] - seconds / 0.207) < 0.01, name
        fills = bar.locator("rect").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")
        assert len(set(fills)) == len(parts)
        expect(page.get_by_text("workers compute for 13% <b>of</b> it")).to_be_visible()
        assert pages.barriers(page, pages.EVERY) == []
        page.get_by_role("link", name="whole").click()
        expect(page.get_by_role("heading", name="whole", exact=True)).to_be_visible()
        expect(page.get_by_role("heading", name="Where a step")).to_have_count(0)
        assert errors == []


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
        assert cells.all_text_contents() == ["front", "2/2", "9", "0", "25 %", "5.0 MiB", "7.0 MiB", "–"]
        assert table.locator("tbody tr").nth(1).locator("td").all_text_contents() == [
            "<b>back</b>", "0/1", "8", "–", "–", "–", "–", "activations of micro-batch 1 of step 8 from worker 1",
        ]  # fmt: skip
        assert pages.barriers(page, pages.EVERY) == []
        page.get_by_role("link", name="whole").click()
        expect(page.get_by_role("heading", name="whole", exact=True)).to_be_visible()
        expect(table).to_have_count(0)
        assert errors == []
