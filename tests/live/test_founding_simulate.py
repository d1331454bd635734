"""docs/founding.md: the command that simulates schedules prints the figures of its line."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

from tests.unit.test_docs_founding import COMMANDS


def test_the_schedules_have_the_figures_of_their_line() -> None:
    ((words, figure),) = [one for one in COMMANDS if one[0].startswith("psjob simulate schedule")]
    command = [sys.executable, "-m", "psjob_client.cli.main", *shlex.split(words)[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    wanted = re.findall(r"`([^`]+)`", figure)
    assert wanted and [one for one in wanted if one not in done.stdout] == []
