"""The commands and files of the PAGES, run as they stand there: each works, and prints what follows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("choose.md", "convert.md", "doctor.md", "port.md", "tutorials/first-async.md", "tutorials/embeddings.md")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(tmp_path: Path, page: str) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    said, ran = "", 0
    for kind, text in BLOCK.findall((DOCS / page).read_text()):
        if kind in ("yaml", "python") and text.startswith("# "):
            (tmp_path / text.split("\n")[0].removeprefix("# ")).write_text(text)
        elif kind == "sh":
            for line in text.splitlines():
                done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
                said, ran = done.stdout + done.stderr, ran + 1
                assert done.returncode == 0 and "Traceback" not in said, f"{line}\n{said}"
        elif kind == "text":
            assert all(shown(line, said) for line in text.splitlines()), f"{text}\nis not in\n{said}"
    assert ran >= 1


def shown(line: str, said: str) -> bool:
    """The line, in which `…` stands for what differs from run to run, is in what was said."""
    return re.search(".*".join(re.escape(part) for part in line.split("…")), said) is not None
