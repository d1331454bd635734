"""`psjob compare`: what is compared, what a page says of it, and a small simulated comparison from the command line."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from psjob_client.compare import report, sides
from psjob_client.compare.outcome import Comparison, SideOutcome
from psjob_client.compare.sides import outcome
from psjob_client.local.manifest import read_job
from psjob_client.local.record import News
from psjob_client.problems import BadInput
from psjob_operator.api.spec import Training
from tests.live.cli_inside import psjob
from tests.support.simulated import asked
from tests.support.soaking import rotating

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "job.yaml"


def compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return psjob(folder, "compare", *words)


class Simulator:
    """`psjob simulate` in the process of the test, in place of the Popen that starts it."""

    returncode = 0

    def __init__(self, argv: Sequence[str], **_: Any) -> None:
        self._words = argv[argv.index("simulate") + 1 :]

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def communicate(self, timeout: float) -> tuple[str, None]:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.returncode = asked(list(self._words))
        return printed.getvalue(), None

    def kill(self) -> None:
        pass


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator is in the process of the test."""
    monkeypatch.setattr(sides.subprocess, "Popen", Simulator)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sync,async", ["sync", "async"]),
        ("backup:2,bounded:1,sync,backup:2", ["backup:2", "bounded:1", "sync"]),
        ("sync,sync:delay=1,bounded:5:delay=2,async:delay=4", ["sync", "sync:delay=1", "bounded:5:delay=2", "async:delay=4"]),
        ("bounded:5,delay=2,async", ["bounded:5,delay=2", "async"]),
        ("local:50,quorum=6,grace=30,threshold:4", ["local:50,quorum=6,grace=30", "threshold:4"]),
    ],
)
def test_modes_are_read_as_the_simulator_writes_them(text: str, found: list[str]) -> None:
    assert sides.words(text) == found


@pytest.mark.parametrize("text", ["", "sync,", "hogwild", "sync,bounded:", "quorum=6", "sync,quorum=6", "sync,delay=1"])
def test_a_word_that_is_no_mode_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is no mode; there are sync, backup"):
        sides.words(text)


@pytest.mark.parametrize(
    ("word", "training", "settings"),
    [
        ("sync", {}, ["mode=sync"]),
        ("sync", {"mode": "bounded", "bounded": {"staleness": 5}}, ["mode=sync", "bounded=null"]),
        ("sync:delay=1", {}, ["mode=sync", "delay=1"]),
        ("sync:delay=1", {"sync": {"backupWorkers": 3}}, ["mode=sync", "delay=1", "sync.backupWorkers=0"]),
        ("sync", {"delay": 1}, ["mode=sync", "delay=0"]),
        ("backup:1", {"delay": 1}, ["mode=sync", "sync.backupWorkers=1", "delay=0"]),
        ("async:delay=4", {"delay": 1}, ["mode=async", "delay=4"]),
        ("bounded:5:delay=2", {"delay": 1}, ["mode=bounded", "bounded.staleness=5", "delay=2"]),
        ("bounded:5,delay=2", {}, ["mode=bounded", "bounded.staleness=5", "delay=2"]),
        ("bounded:delay=2", {"mode": "bounded", "bounded": {"staleness": 5}}, ["mode=bounded", "delay=2"]),
        ("backup", {}, ["mode=sync", "sync.backupWorkers=1"]),
        ("backup", {"sync": {"backupWorkers": 3}}, ["mode=sync"]),
        ("backup:2", {"sync": {"backupWorkers": 3}}, ["mode=sync", "sync.backupWorkers=2"]),
        ("sync", {"sync": {"backupWorkers": 3}}, ["mode=sync", "sync.backupWorkers=0"]),
        ("bounded", {"mode": "bounded", "bounded": {"staleness": 5}}, ["mode=bounded"]),
        ("threshold:9", {"sync": {"backupWorkers": 3}}, ["mode=threshold", "threshold.staleness=9", "sync=null"]),
        ("threshold:staleness=9", {}, ["mode=threshold", "threshold.staleness=9"]),
        (
            "local:7,quorum=2",
            {"mode": "softsync", "softsync": {"splits": 2}},
            ["mode=local", "local.innerSteps=7", "local.quorum=2", "softsync=null"],
        ),
        (
            "local-async:7",
            {"mode": "local", "local": {"quorum": 2}},
            ["mode=local", "local.innerSteps=7", "updateRule=delayed-nesterov", "local.quorum=0"],
        ),
        (
            "local",
            {"mode": "local", "updateRule": "delayed-nesterov", "ruleOptions": {"every": 2}},
            ["mode=local", "updateRule=null", "ruleOptions=null"],
        ),
        ("backup:2", {"delay": 1}, ["mode=sync", "sync.backupWorkers=2", "delay=0"]),
        ("local", {"mode": "async", "delay": 4}, ["mode=local", "delay=0"]),
    ],
)
def test_a_side_is_the_manifest_with_its_mode(word: str, training: Mapping[str, Any], settings: list[str]) -> None:
    side = sides.side_of(word, DIGITS, Training.model_validate(training))
    assert list(side.settings) == [f"spec.training.{setting}" for setting in settings] and side.title == word


@pytest.mark.parametrize("word", ["sync:delay=", "sync:delay=x", "async:delay=1,delay=2", "bounded:3:delay=-1"])
def test_a_delay_that_is_no_number_is_refused(word: str) -> None:
    with pytest.raises(BadInput, match=f"--modes {word}: a delay is one whole number, as in sync:delay=1"):
        sides.side_of(word, DIGITS, Training())


def test_a_delay_that_no_job_has_is_refused_in_the_manifests_words() -> None:
    for word, sentence in {"sync:delay=2": "must be 0 or 1", "softsync:2:delay=1": "must be 0 but in"}.items():
        with pytest.raises(BadInput, match=sentence):
            read_job(DIGITS, sides.side_of(word, DIGITS, Training()).settings)


@pytest.mark.parametrize("word", ["sync:3", "async:4", "backup:1,2", "softsync:2,by_staleness=false"])
def test_a_number_that_no_job_takes_is_refused(word: str) -> None:
    with pytest.raises(BadInput, match="is no hyperparameter that a job in this mode takes"):
        sides.side_of(word, DIGITS, Training())


@pytest.mark.parametrize(
    ("word", "training", "simulated"),
    [
        ("bounded", {"mode": "bounded", "bounded": {"staleness": 5}}, "bounded:staleness=5"),
        ("bounded:2", {"mode": "bounded", "bounded": {"staleness": 5}}, "bounded:2"),
        ("bounded", {"mode": "async"}, "bounded"),
        ("bounded:delay=2", {"mode": "bounded", "bounded": {"staleness": 5}}, "bounded:staleness=5:delay=2"),
        ("sync:delay=1", {"delay": 1}, "sync:delay=1"),
        ("sync", {"delay": 1}, "sync"),
        ("backup", {"sync": {"backupWorkers": 2}}, "backup:backup_workers=2"),
        ("local", {"mode": "local", "local": {"innerSteps": 9, "graceSeconds": 3}}, "local:inner_steps=9"),
        ("local-async", {"mode": "local", "local": {"innerSteps": 9, "quorum": 3}}, "local-async:inner_steps=9"),
    ],
)
def test_the_simulator_is_told_the_manifests_numbers(word: str, training: Mapping[str, Any], simulated: str) -> None:
    assert sides.simulated(word, Training.model_validate(training)) == simulated


def test_news_are_told_once() -> None:
    def told(step: int, *passed: list[float], **metrics: float) -> dict[str, Any]:
        workers = [{"state": "joined" if passed else "absent"}, {"state": "absent"}]
        return {"coordinator": {"step": step, "metrics": metrics, "passed": list(passed), "workers": workers}}

    news = News()
    assert news.of({"state": "waiting"}, 1.0) is None, "a shard without a coordinator says nothing of the job"
    assert news.of(told(0), 1.0) == {"time": 1.0, "began": None, "step": 0, "metrics": {}, "passed": []}
    assert news.of(told(0), 2.0) is None
    assert news.of(told(1, [1, 2.5], loss=3.0), 3.0) == {
        "time": 3.0,
        "began": 3.0,
        "step": 1,
        "metrics": {"loss": 3.0},
        "passed": [[1, 2.5]],
    }
    assert news.of(told(3, [1, 2.5], [2, 3.5], [3, 3.6], loss=3.0), 4.0)["passed"] == [[2, 3.5], [3, 3.6]]  # type: ignore[index]
    assert news.of(told(3, [3, 3.6], loss=2.0), 5.0) == {"time": 5.0, "began": 3.0, "step": 3, "metrics": {"loss": 2.0}, "passed": []}


def test_a_run_is_told_from_its_history() -> None:
    lines = [
        {"time": 10.0, "began": None, "step": 0, "metrics": {}, "passed": []},
        {"time": 11.0, "began": 8.5, "step": 2, "metrics": {"loss": 4.0}, "passed": [[1, 10.5], [2, 10.9]]},
        {"time": 12.0, "step": 5, "metrics": {"loss": 2.0, "accuracy": 0.5}, "passed": [[5, 12.5]]},
        {"time": 13.0, "step": 5, "metrics": {"loss": 2.0, "accuracy": 0.7}, "passed": []},
    ]
    found = outcome("sync", "psjob run", "Complete", lines, {"metrics": {"accuracy": 0.75}})
    assert (found.elapsed, found.steps, found.rate) == (4.0, 5.0, 1.25), "from when the first worker trained"
    assert found.curves == {"loss": [(2.5, 2.0, 4.0), (3.5, 5.0, 2.0)], "accuracy": [(3.5, 5.0, 0.5), (4.5, 5.0, 0.7)]}
    assert found.final == {"accuracy": 0.75} and found.staleness == 0
    assert outcome("sync", "psjob run", "stopped", lines, {}).staleness is None, "without a summary it is not known"
    assert not found.staleness_histogram and not found.gaps and not found.idle, "a run that was killed has no last line"
    assert outcome("async", "psjob run", "Complete", lines, {"staleness": {"mean": 2.5}}).staleness == 2.5
    nothing = outcome("sync", "psjob run", "Failed: x", [], {})
    assert nothing.rate is None and nothing.staleness is None and nothing.waiting is None


EMPTY = {"count": 0, "sum": 0, "max": 0, "buckets": []}


LAST = {"time": 13.0, "step": 5, "metrics": {}, "passed": [[1, 10.0], [5, 12.0]]}


def real(title: str, staleness: Mapping[str, Any], gap: Mapping[str, Any], idle: list[float | None], mean: float | None) -> SideOutcome:
    """A job of 30 pushes on each of two shards, by the last line of its history."""
    last = {**LAST, "staleness": staleness, "gap": gap, "idle": idle}
    return outcome(title, "psjob run", "Complete", [last], {"applied": 60, "staleness": mean and {"mean": mean}})


def test_a_real_page_has_the_histograms_and_idle_times_of_a_simulated_one() -> None:
    staleness = {"count": 60, "sum": 150, "max": 2000, "buckets": [[0, 0], [1, 20], [4, 20], [6, 59]]}
    gap = {"count": 60, "sum": 1.0, "max": 0.1, "buckets": [[0.01, 15], [0.03, 60]]}
    late = real("async", staleness, gap, [0.01, 0.02], 2.5)
    assert late.staleness_histogram == [(0, 0), (1, 20), (4, 0), (6, 39), (None, 1)] and late.gaps == [(0.01, 15), (0.03, 45), (None, 0)]
    assert late.staleness == 2.5 and late.waiting == pytest.approx(0.015)
    steady = real("sync", EMPTY, EMPTY, [0.5, 0.0], None)
    assert steady.staleness_histogram == steady.gaps == [(0.0, 60)] and steady.staleness == 0 and list(steady.idle) == [0.5, 0.0]
    last = {**LAST, "staleness": EMPTY, "gap": EMPTY, "idle": [0.0]}
    delayed = outcome("sync:delay=1", "psjob run", "Complete", [last], {"applied": 60}, late=1)
    assert delayed.staleness == 1 and delayed.staleness_histogram == [(1.0, 60)]
    assert not delayed.gaps, "how far its weights are apart is not known"
    assert not real("async", staleness, gap, [0.5, None], 2.5).idle, "of one worker it is not known"
    comparison = Comparison("job", "s", {}, "", [steady, late])
    text = report.page(comparison)
    page = Page(text)
    assert is_alone(page, text) and page.tags["svg"] == 3 + swatches(page)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert [word for word in words if word in ("0", "1", "2-4", "5-6", "≥ 7")][:5] == ["0", "1", "2-4", "5-6", "≥ 7"]
    assert {"≤ 1e-02", "≤ 3e-02"} <= set(words) and "more" not in words and words.count("pushes (%)") == 2
    assert {"2.50", "25.0", "1.5"} <= set(page.cells)
    json.dumps(comparison.as_json(), allow_nan=False)


def fall(title: str, every: float, *losses: float) -> SideOutcome:
    curve = [(every * step, float(step), loss) for step, loss in enumerate(losses)]
    return SideOutcome(title, f"run {title}", "Complete", curve[-1][0], curve[-1][1], {"loss": curve}, {"loss": losses[-1]})


def test_time_to_the_loss_is_of_the_lowest_that_all_reached() -> None:
    found = Comparison("job", "s", {}, "", [fall("slow", 2.0, 8, 8, 8, 4), fall("quick", 1.0, 8, 4, 1, 1)])
    assert found.target == pytest.approx(8 - 0.2 * 4), "of the smoothed curves"
    assert [found.time_to(one) for one in found.sides] == [6.0, 1.0]
    named = Comparison("job", "s", {}, "", found.sides, wanted=5.0)
    assert [named.time_to(one) for one in named.sides] == [None, 3.0]
    assert Comparison("job", "s", {}, "", [SideOutcome("a", "b", "Complete", 1.0, 1.0)]).target is None


def test_a_side_that_ends_above_where_it_began_has_diverged_and_is_the_best_in_nothing() -> None:
    """The loss that all reached is that of those that have learned."""
    worse = fall("worse", 0.1, 2.0, 2.4, 2.5)
    never = SideOutcome(
        "never", "", "Complete", 1.0, 2.0, {"loss": [(0.0, 0.0, 2.0), (1.0, 2.0, 1.0)]}, {}, diverged=True, warnings=["NaN"]
    )
    good = fall("good", 1.0, 2.0, 1.0, 0.5)
    found = Comparison("job", "s", {}, "", [worse, never, good, fall("late", 3.0, 2.0, 1.5, 1.2)])
    assert [one.verdict for one in found.sides] == ["diverged", "diverged", "learned", "learned"]
    assert found.target == pytest.approx(1.76) and found.time_to(worse) is None
    assert [row[1] for row in report.report_rows(found)] == ["verdict", "diverged", "diverged", "learned", "learned"]
    text = report.page(found)
    lines = [line for line in re.findall(r"<tr>.*?</tr>", text) if "<td" in line]
    assert "class=best" not in lines[0] and "class=best" in lines[2] and "class=bad" in lines[0]
    assert "<b>never</b>: NaN" in text


class Page(HTMLParser):
    """What a page has of elements, links, ids, words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.cells: list[str] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self._cell = tag == "td" or (self._cell and tag in ("svg", "line"))
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.cells.append(data)
            self._cell = False


def swatches(page: Page) -> int:
    """One beside each side of the table."""
    return page.tags["tr"] - 1


def is_alone(page: Page, text: str) -> bool:
    """It needs nothing except itself: no script, no style sheet, every link into the page."""
    fetched = [link for link in page.links if not link.startswith("#")] + re.findall(r"url\((?!#)[^)]*\)|@import", text)
    return not fetched and not {"script", "link", "img", "iframe"} & page.tags.keys() and len(page.ids) == len(set(page.ids))


def test_a_page_says_what_failed_and_escapes_every_word() -> None:
    bad = SideOutcome("<b>&", "run '<i>'", "Failed: <script>alert(1)</script>", 0.0, 0.0)
    text = report.page(Comparison("<u>", "s", {"<q>": "<q>"}, "<pre>", [bad, fall("good", 1.0, 2, 1)]))
    page = Page(text)
    assert is_alone(page, text) and page.tags["svg"] == 2 + swatches(page)
    assert not {"u", "i", "q"} & page.tags.keys() and page.tags["pre"] == 1 and page.tags["b"] == 1
    assert page.cells[0] == "<b>&" and set(page.cells[1 : page.cells.index("good")]) == {"–"}


@pytest.mark.parametrize("simulator", ["inside", rotating("process")])
def test_a_simulated_comparison_is_a_page_of_its_own(tmp_path: Path, request: pytest.FixtureRequest, simulator: str) -> None:
    if simulator == "inside":
        request.getfixturevalue("inside")
    words = ["--modes", "sync,backup,bounded:2,async,local:4,sync:delay=1", "--simulate", "--slow", "0=4", "--pushes", "400"]
    ended = compare(tmp_path, str(DIGITS), *words, "--report", "page.html", "-o", "json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    by = {one["title"]: one for one in found["sides"]}
    assert list(by) == ["sync", "backup:1", "bounded:2", "async", "local:4", "sync:delay=1"] and found["unit"] == "mean steps"
    # A worker that takes four times as long: sync waits for it, the others do not.
    assert by["sync"]["idle"][0] == 0 and by["sync"]["idle"][1:] == pytest.approx([0.75] * 3, abs=0.02)
    assert by["async"]["waiting"] == 0 and by["backup:1"]["waiting"] < 0.1 and by["backup:1"]["dropped"] > 0.05
    assert by["sync"]["staleness"] == 0 and by["sync:delay=1"]["staleness"] == pytest.approx(1, abs=0.02)
    assert by["async"]["staleness"] == pytest.approx(3, abs=0.2)
    assert by["async"]["rate"] > 2.5 * by["sync"]["rate"]
    assert all(len(one["curves"]["loss"]) >= 20 and one["curves"]["loss"][0][2] > one["curves"]["loss"][-1][2] for one in by.values())
    for one in (by["sync"], by["async"]):
        assert sum(pushes for _, pushes in one["gaps"]) == sum(pushes for _, pushes in one["staleness_histogram"])
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert is_alone(page, text) and page.tags["svg"] == 7 + swatches(page), "loss and accuracy against steps and time, staleness, gap, idle"
    assert f"{by['sync']['rate']:.3g}" in page.cells and f"{by['async']['timeToLoss']:.3g}" in page.cells
    assert text.index("<table") < text.index("<svg") < text.index("psjob simulate compare --workers 4") < text.index("kind: PSTrainingJob")


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--modes", "sync"], "there is one side only"),
        ([], "there is one side only"),
        (["--modes", "sync,hogwild"], "'hogwild' is no mode"),
        (["--modes", "sync,async", "--slow", "0=4"], "--slow: is for --simulate"),
        (["--modes", "sync,async", "--report", "no/where.html"], "--report no/where.html: is no file that can be written"),
        (["--modes", "sync,async", "--deadline", "0"], "--deadline 0: must be a number of seconds above 0"),
        (["--modes", "sync,async", "--deadline", "inf"], "--deadline inf: must be a number of seconds above 0, at most 1000000000"),
        (["--modes", "sync,async", "--loss", "nan"], "--loss nan: must be a finite number; leave it out"),
        (["--modes", "sync,async", "--loss", "1e400"], "--loss inf: must be a finite number"),
        (["--modes", "sync,async", "--loss", "much"], "Invalid value for '--loss'"),
        (["--modes", "sync,async", "--simulate", "--loss", "-1"], "--loss -1: must be 0 or more with --simulate"),
        (["--modes", "sync,async", "--set", "spec.training.updateAt=worker"], "async: "),
        (["--modes", "sync,async", "--simulate", "--slow", "9=4"], "worker 9 is not one of the 4 workers"),
        (["--simulate"], "--simulate: give two modes or more"),
        ([str(DIGITS)], "the same manifest is given twice"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(tmp_path: Path, words: list[str], sentence: str) -> None:
    ended = compare(tmp_path, str(DIGITS), *words)
    assert ended.returncode == 2 and sentence in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr and ended.stdout == ""
    assert list(tmp_path.iterdir()) == []
