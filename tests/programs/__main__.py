"""`python -m tests.programs [NAME …]`: run programs in all modes, write their results and the page.

`--show` prints outputs of what is wrong; `--modes sync,shard` runs these only; results of others are left.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.frameworks import IMPORTS
from tests.programs import packages, page
from tests.programs.running import Program, farthest, in_job, referred, table, verdict
from tests.support import warm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--modes", default="")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        warm.call(Path(folder), "tests.frameworks.alone", [__file__.replace("__main__", "__init__")], None, 300, IMPORTS)
    wrong = 0
    for name in asked.names or table():
        program = table()[name]
        try:
            found = tried(program, tuple(asked.modes.split(",")) if asked.modes else page.MODES, asked.show)
        except (AssertionError, KeyError, OSError, ValueError) as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            wrong += 1
            continue
        wrong += any(bool(said) != bool(program.wrong_in(mode)) for mode, said in found["modes"].items())
        page.keep(name, found)
    return 1 if wrong else 0


def tried(program: Program, modes: tuple[str, ...], show: bool) -> page.Result:
    """What came out, for the page."""
    with tempfile.TemporaryDirectory(prefix="psjob-program-") as scratch:
        folder = Path(scratch)
        reference = referred(program, folder / "reference")
        print(f"{program.name}: {program.lines()} lines, reference {reference.seconds:.1f} s, losses {reference.losses[-3:]}", flush=True)
        said: dict[str, str] = {}
        seconds = differs = spread = 0.0
        for mode in modes:
            ran = in_job(program, folder / mode, mode)
            said[mode] = verdict(program, mode, ran, reference)
            if mode == "sync" and ran.weights:
                seconds, differs = ran.seconds, farthest(ran.weights, reference.weights)[0]
            print(f"  {mode}: {said[mode] or 'right'} ({ran.seconds:.1f} s)", flush=True)
            if show and said[mode]:
                print(ran.output[-5000:])
        if differs:
            spread = farthest(referred(program, folder / "again").weights, reference.weights)[0]
            print(f"  weights differ by {differs:.2g}, those of two references by {spread:.2g}")
    return {
        "package": program.package,
        "version": packages.version(program.package),
        "source": program.source,
        "lines": program.lines(),
        "modes": said,
        "differs": differs,
        "spread": spread,
        "times": round(seconds / reference.seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
