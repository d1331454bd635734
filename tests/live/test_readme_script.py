"""The script that hack/readme.py makes of a page's commands."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hack.readme import script


def test_a_script_ends_at_what_fails_and_notes_the_rest(tmp_path: Path) -> None:
    marks = tmp_path / "it's marks"
    done = subprocess.run(
        ["bash", "-c", script(["cd /", "pwd", "false", "echo no"], str(marks))], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1 and done.stdout == "/\n"
    times = [float(line) for line in marks.read_text().split()]
    assert len(times) == 2 and times == sorted(times)
