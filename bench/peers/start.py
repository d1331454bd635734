"""From nothing to the first training step on a laptop: the commands of the README, in an empty folder, by a user without psjob.

The packages that psjob needs come from pip's cache, which a first install has filled; psjob's own three are wheels of this checkout.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import clock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hack import wheels  # noqa: E402
from hack.newcomer import Typed, environment, first_step, follow  # noqa: E402
from hack.readme import commands  # noqa: E402

MOST = 120.0
"""Seconds that may pass until the first step."""
LIMIT = 1500.0


def main() -> None:
    page = [command for command in commands((ROOT / "README.md").read_text(), "On a laptop") if "--fault" not in command]
    installing = next(number for number, command in enumerate(page) if "pip install" in command) + 1
    with tempfile.TemporaryDirectory() as home:
        dist = Path(home, "dist")
        assert wheels.main([str(dist)]) == 0
        _typed(page[:installing], Path(home), dist, "cold")
        shutil.rmtree(Path(home, "cold"))
        done = _typed(page, Path(home), dist, "warm")
        seconds = first_step(Path(home, "warm")) - done.began
    note = ", ".join(f"{command.split(maxsplit=2)[0]} {command.split()[1]}: {took:.1f} s" for command, took in done.seconds() if took > 0.5)
    clock.answer_rows([clock.row("the first step, after the first command", seconds, "s", most=MOST, note=note)])


def _typed(page: list[str], home: Path, dist: Path, name: str) -> Typed:
    folder = home / name
    folder.mkdir()
    given = environment(home, "", {"PIP_FIND_LINKS": f"{dist} {os.environ.get('PIP_FIND_LINKS', '')}".strip()})
    # The index is what this machine's pip knows.
    pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_") and key not in given}
    for key in ("PIP_INDEX_URL", "PIP_CONFIG_FILE"):
        given.pop(key)
    done = follow(page, folder, {**pip, **given}, LIMIT)
    if done.code:
        raise SystemExit(f"{page[len(done.ended)]} failed: {done.output[-2000:]}")
    return done


if __name__ == "__main__":
    main()
