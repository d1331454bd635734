"""A picture of a real run: the digits example on this machine, with two faults, drawn from what the run told of itself.

`python -m hack.runpicture` runs the job and writes docs/run.svg; a run takes a minute. Times differ from run to run, so that
`make verify` does not compare it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/run.svg"
CRASH, KILL = 1000, 1400
"""Steps of the faults: late enough for what `docs/restarts.md` says of the first seconds of training."""
FAULTS = ["--fault", f"crash:shard-0@step={CRASH}", "--fault", f"kill:shard-1@step={KILL}"]
LONGER = ["--set", "spec.workers.template.spec.containers[0].args=[--epochs=90, --lr=0.004, --momentum=0]"]
COMMAND = ["run", "examples/digits/job.yaml", *LONGER, *FAULTS, "--no-progress"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 330, 58, 66, 64, 46
STYLE = """
:root { --paper: #ffffff; --ink: #1c2330; --soft: #5b6575; --grid: #e1e5eb; --step: #1667c0; --score: #b4540a; --kill: #c02a3a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e8ecf2; --soft: #a7b1c0; --grid: #2b3340; --step: #7fb8ff;
  --score: #f2a35e; --kill: #ff7b87; } }
text { font: 12px system-ui, sans-serif; fill: var(--soft); } .title { font-size: 15px; font-weight: 600; fill: var(--ink); }
.paper { fill: var(--paper); } .grid { stroke: var(--grid); } .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.step { stroke: var(--step); } .score { stroke: var(--score); } .kill { stroke: var(--kill); stroke-dasharray: 4 3; }
.steps { fill: var(--step); } .scores { fill: var(--score); } .killed { fill: var(--kill); }
"""
Points = list[tuple[float, float]]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        history, summary = Path(folder, "history.jsonl"), Path(folder, "summary.json")
        told = ["--history", str(history), "--summary", str(summary)]
        subprocess.run([sys.executable, "-m", "psjob_client.cli.main", *COMMAND, *told], cwd=ROOT, check=True)
        lines = [json.loads(line) for line in history.read_text().splitlines()]
        PICTURE.write_text(picture(lines, json.loads(summary.read_text())))
    print(f"written: {PICTURE.relative_to(ROOT)}")
    return 0


def picture(history: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """The run as SVG: steps and test accuracy over seconds, from the end of the first step on."""
    lines = list(history)
    begun = min(when for line in lines for _, when in line["passed"])
    steps: Points = [(0.0, 0.0)]
    scores: Points = []
    for line in lines:
        at = max(0.0, line["time"] - begun)
        # The lowest step that all have made: it goes back where a restart undoes some.
        steps += [*((max(0.0, when - begun), step) for step, when in line["passed"]), (at, line["step"])]
        score = line["metrics"].get("test_accuracy")
        if score is not None and (not scores or scores[-1][1] != score):
            scores.append((at, score))
    end = max(at for at, _ in steps)
    scores.append((end, scores[-1][1]))
    return "\n".join(_drawn(steps, scores, end, summary)) + "\n"


def _drawn(steps: Points, scores: Points, end: float, summary: Mapping[str, Any]) -> Iterable[str]:
    top = max(step for _, step in steps)

    def x(at: float) -> float:
        return LEFT + at / end * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    restarts = sum(summary["restarts"].values())
    title = "Digits, 4 workers and 2 shards, mode sync, with two faults"
    yield "<!-- drawn by `make docs` from a run of examples/digits/job.yaml; do not edit -->"
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
    yield f'<title>{title}</title><style>{STYLE}</style><rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>'
    yield f'<text class="title" x="{LEFT}" y="24">{title}</text>'
    yield f'<text x="{LEFT}" y="42">Restarts: {restarts}. Steps made: {summary["steps"]}. Updates lost: {summary["updates_lost"]}.</text>'
    for share in (0, 0.25, 0.5, 0.75, 1):
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>'
        yield f'<text class="scores" x="{WIDTH - RIGHT + 8}" y="{y(share) + 4:.1f}">{share:.0%}</text>'
    for step in range(0, int(top) + 1, 100 if top < 1000 else 500):
        yield f'<text class="steps" x="{LEFT - 8}" y="{y(step / top) + 4:.1f}" text-anchor="end">{step}</text>'
    for second in range(0, int(end) + 1, _every(end)):
        yield f'<text x="{x(second):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{second} s</text>'
    told = {CRASH: "a process of shard 0 crashes: on from its memory", KILL: "shard 1 is killed: on from the checkpoint"}
    for row, (fault, words) in enumerate(told.items()):
        at = next((at for at, step in steps if step >= fault), None)
        if at is None:
            continue
        yield f'<line class="kill" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{y(0):.1f}" y2="{y(1):.1f}"/>'
        yield f'<text class="killed" x="{x(at) + 6:.1f}" y="{y(0.17 - 0.09 * row):.1f}">{words}</text>'
    yield f'<polyline class="line step" points="{_points([(x(at), y(step / top)) for at, step in steps])}"/>'
    yield f'<polyline class="line score" points="{_points([(x(at), y(score)) for at, score in scores])}"/>'
    yield f'<text class="steps" x="{LEFT}" y="{HEIGHT - 8}">steps that all workers have made</text>'
    yield f'<text class="scores" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">test accuracy</text>'
    yield "</svg>"


def _every(seconds: float) -> int:
    return next(step for step in (1, 2, 5, 10, 20, 60) if seconds / step <= 12 or step == 60)


def _points(points: Sequence[tuple[float, float]]) -> str:
    """No more than one a pixel, and each turn of the line."""
    kept: Points = []
    for index, (x, y) in enumerate(points):
        turn = 0 < index < len(points) - 1 and (points[index - 1][1] - y) * (y - points[index + 1][1]) < 0
        if not kept or turn or index == len(points) - 1 or x - kept[-1][0] >= 1:
            kept.append((x, y))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in kept)


if __name__ == "__main__":
    sys.exit(main())
