"""A picture of a terminal in which `psjob run` trains: the job that `psjob init` writes, with a shard that is killed.

`python -m hack.displaypicture` runs it and writes docs/display.svg, in half a minute. Times differ from run to run, so that `make verify`
does not compare it.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from hack.terminal import Terminal, terminal

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/display.svg"
COMMAND = ("psjob", "run", "hello/job.yaml", "--fault", "kill:shard-0@step=100")
COLUMNS, LINES = 108, 18
SHOWN_AT = 200
"""Step from which the screen is taken: the shard is back, and the epoch after that has ended."""
SECONDS = 180.0
STEP = re.compile(r"\bstep (\d+)/\d+")
THEME = TerminalTheme(
    (20, 24, 31), (226, 231, 239),
    [(20, 24, 31), (255, 123, 135), (126, 201, 138), (242, 185, 94), (127, 184, 255), (210, 160, 255), (110, 205, 215), (226, 231, 239)],
    [(91, 101, 117), (255, 123, 135), (126, 201, 138), (242, 185, 94), (127, 184, 255), (210, 160, 255), (110, 205, 215), (255, 255, 255)],
)  # fmt: skip
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
FACES = re.compile(r"@font-face \{.*?\n    \}\n", re.DOTALL)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, terminal(COLUMNS, 60) as screen:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **screen.environment, "PATH": path}
        subprocess.run(["psjob", "init", "hello"], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        process = subprocess.Popen(COMMAND, cwd=folder, env=environment, stdin=screen.theirs, stdout=screen.theirs, stderr=screen.theirs)
        try:
            lines = taken(screen, process)
        finally:
            process.terminate()
            process.wait(60)
    PICTURE.write_text(picture(lines))
    print(f"written: {PICTURE.relative_to(ROOT)}")
    return 0


def taken(screen: Terminal, process: subprocess.Popen[bytes]) -> list[Text]:
    """The screen as the job makes step SHOWN_AT or a later one. Raises LookupError if it does not."""
    until = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < until:
        lines = screen.styled()
        steps = [int(found[1]) for line in lines if (found := STEP.search(line.plain))]
        if steps and steps[-1] >= SHOWN_AT and any("SIGKILL" in line.plain for line in lines):
            return lines
        time.sleep(0.1)
    raise LookupError("\n".join(["the job did not come to that step:", *screen.shown()]))


def picture(lines: Sequence[Text]) -> str:
    """Those lines as SVG, without the empty ones at the end and without a font from elsewhere."""
    shown = list(lines)
    while shown and not shown[-1].plain.strip():
        shown.pop()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", force_terminal=True, legacy_windows=False)
    for line in (Text(f"$ {' '.join(COMMAND)}", "bold"), *shown):
        console.print(line, no_wrap=True, crop=True)
    drawn = console.export_svg(title="psjob", theme=THEME, unique_id="psjob")
    drawn = FACES.sub("", drawn).replace("Fira Code, monospace", FONT)
    return re.sub(r"<!-- Generated.*?-->", "<!-- drawn by `make docs` from a run; do not edit -->", drawn)


if __name__ == "__main__":
    sys.exit(main())
