"""`make test-unit` starts on macOS: nothing that its files import needs Linux to be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hack.cluster.paths import REPO

# It imports 150 files, which takes 10 s of a core.
pytestmark = [pytest.mark.rotating, pytest.mark.timeout(600)]
MADE_UP = {
    "reads_proc": "open('/proc/self/status').read()",
    "lists_sys": "import os; os.listdir('/sys')",
    "asks_affinity": "import os; os.sched_getaffinity(0)",
    "loads_libc": "import ctypes; ctypes.CDLL('libc.so.6')",
    "sees_linux": "import sys; assert sys.platform == 'linux'",
}
FINE = "import os, sys, ctypes, multiprocessing, selectors\nassert sys.platform == 'darwin' and not hasattr(os, 'sched_getaffinity')\n"


def test_what_unit_tests_import_needs_no_linux(tmp_path: Path) -> None:
    for name, text in MADE_UP.items():
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
    (tmp_path / "fine.py").write_text(FINE)
    command = [sys.executable, "-m", "tests.macos", "fine", *MADE_UP, "tests.conftest", "tests/unit", "tests/simulation"]
    done = subprocess.run(command, cwd=REPO, env={**os.environ, "PYTHONPATH": f"{tmp_path}"}, capture_output=True, text=True, timeout=580)
    *failed, _ = done.stdout.splitlines() or [""]
    assert [line.partition(":")[0] for line in failed] == list(MADE_UP), done.stdout[-3000:] + done.stderr[-1000:]
