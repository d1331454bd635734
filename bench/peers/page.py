"""The live page in a browser: how long it takes until all of 100 is painted, from the opening of the address on.

Each number is the median of several openings, each in a new browser context: nothing is cached in the browser.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import clock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from psjob_client.compare import outcome  # noqa: E402
from psjob_client.compare.outcome import Comparison, SideOutcome  # noqa: E402
from psjob_client.sdk.client import AsyncClient  # noqa: E402
from psjob_client.ui.server import Page as Served  # noqa: E402
from tests.support import pages  # noqa: E402

RUNS, POINTS, SIDE_POINTS = 100, 10_000, 1_000
TIMES = 5
MOST = 1.0
"""Seconds until all is painted."""
PAINTED = """rows => new Promise(done => {
    const full = () => {
        const canvases = [...document.querySelectorAll('main section:not([hidden]) canvas')];
        return document.querySelectorAll('main tbody tr').length >= rows && canvases.length > 1 && canvases.every(one => {
            const pixels = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;
            for (let at = 3; at < pixels.length; at += 4) if (pixels[at]) return true;
            return false;
        });
    };
    const look = () => full() ? requestAnimationFrame(() => setTimeout(() => done(performance.now() / 1000))) : setTimeout(look, 10);
    look();
})"""


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name, pages.browser() as chromium:
        folder = Path(name)
        names = [f"job{number % 7}-1124-{number:06d}" for number in range(RUNS)]
        for number, run in enumerate(names):
            pages.a_run(folder, run, POINTS, made=1.79e9 + 100 * number)
        made = outcome.keep(folder, comparison(), time.time())
        assert made is not None
        views = {
            f"{RUNS} runs over one another": "#/runs/" + ",".join(f"0%2F{run}" for run in names),
            f"a comparison of {RUNS} sides": f"#/comparisons/{made.stem}",
            "one run": f"#/jobs/0/{names[0]}",
        }
        for title, place in views.items():
            took = []
            for _ in range(TIMES):
                # Another server too, which remembers no record.
                with Served((AsyncClient.local(folder),), folder) as served, chromium.new_context() as context:
                    page = context.new_page()
                    page.goto(served.address + place)
                    took.append(page.evaluate(PAINTED, 1 if title == "one run" else RUNS))
            note = f"{min(took):.2f} to {max(took):.2f} s"
            rows.append(clock.row(f"{title}, painted", statistics.median(took), "s", most=MOST, note=note))
    clock.answer_rows(rows)


def comparison() -> Comparison:
    sides = []
    for number in range(RUNS):
        curve = [(float(at), float(at), math.exp(-at / (200 + number)) + 0.01 * (at % 7)) for at in range(SIDE_POINTS)]
        sides.append(
            SideOutcome(f"side {number}", "psjob run job.yaml", "Complete", 100.0, 1000.0, {"loss": curve}, {"loss": curve[-1][2]})
        )
    return Comparison("many", "s", {}, "kind: PSTrainingJob", sides)


if __name__ == "__main__":
    main()
