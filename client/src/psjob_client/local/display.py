"""What the user sees: a live part at the foot of a terminal, a plain line each few seconds elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from psjob_client.local.screen import PENDING, checkpoint, happened, progress, screen
from psjob_client.local.watch import Watch
from psjob_operator.api.status import JobStatus
from psjob_operator.printable import LINE_ENDS, coloured, printable

PLAIN_EVERY = 5.0
LIVE_EVERY = 0.25
COMMAND = "  "
"""A line that begins so is a command to copy, and is not broken."""


class Display:
    """One way out for everything: the script's own lines go to standard output, psjob's to standard error (a terminal shows both)."""

    def __init__(self, job: str, *, progress: bool, unit: str = "step") -> None:
        self._job = job
        self.unit = unit
        """What the job counts: step, or round in mode local."""
        self._progress = progress
        self._shown = 0.0
        self._said = ""
        self._console = Console(stderr=False, highlight=False)
        self._live: Live | None = None
        if progress and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()

    def say(self, text: str, style: str = "") -> None:
        """A line of psjob's own."""
        if self._live is not None:
            self._console.print(Text(printable(text, LINE_ENDS), style), soft_wrap=text.startswith(COMMAND))
        else:
            print(printable(text, LINE_ENDS), file=sys.stderr, flush=True)

    def output(self, line: str) -> None:
        """A line of the script's, or a result."""
        if self._live is not None:
            self._console.print(Text.from_ansi(coloured(line)), soft_wrap=True)
        else:
            print(line, flush=True)

    def refresh(self, status: JobStatus | None, watch: Watch, drawn: str = "") -> None:
        """Show where the job stands, if it is time to. `drawn`: a line that the script draws again and again, such as tqdm's."""
        now = time.time()
        if self._live is not None:
            if now - self._shown >= LIVE_EVERY:
                self._shown = now
                self._live.update(screen(self._job, status, watch, now, self.unit, drawn), refresh=True)
        elif self._progress and now - self._shown >= PLAIN_EVERY:
            self._shown = now
            line = plain(status, watch, now, self.unit)
            if line != self._said:
                self._said = line
                self.say(line)

    def close(self) -> None:
        """Take the live part off the terminal; what is printed stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def plain(status: JobStatus | None, watch: Watch, now: float, unit: str = "step") -> str:
    """The job in one line: `Running  step 120/368  loss 0.21  45.2 steps/s  eta 6 s  shards 0:a1 serving 1:a1 serving  checkpoint …`."""
    told = watch.coordinator
    shards = " ".join(f"{shard.index}:a{shard.attempt} {shard.state.lower()}" for shard in (status.shards if status else ())[:8])
    kept = checkpoint(told, now, unit)
    words = [
        (status and status.phase) or PENDING,
        *progress(told, unit),
        f"shards {shards}" if shards else "",
        f"checkpoint {kept}" if kept else "",
        *happened(status, watch),
        str(told.get("waiting") or ""),
    ]
    return "  ".join(word for word in words if word)
