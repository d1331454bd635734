"""docs/scripts.md: its code runs in a job, and the scripts that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts.cells import SCRIPTS, manifest
from tests.support import warm

pytestmark = pytest.mark.timeout(300)
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scripts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"\n```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.rotating
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_page_runs_in_a_job(tmp_path: Path, number: int) -> None:
    (tmp_path / "page.py").write_text(BLOCKS[number], encoding="utf-8")
    job = manifest(tmp_path, ["page.py"])
    code, output = warm.run(tmp_path, ["run", str(job), "--no-progress"])
    assert code == 0 and "changed by hand" not in output, output[-3000:]
    assert "Complete: 6 steps" in output
    assert (
        float(re.findall(r"^(?:\[.*\] )?(?:average|largest) (\S+)$", (tmp_path / "output.txt").read_text() + output, re.MULTILINE)[0]) < 0.5
    )


def test_the_scripts_of_the_page_are_those_that_are_tested() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    named = {word for row in rows for word in re.findall(r"`([a-z_0-9]+)`", row.rsplit("|", 2)[1])}
    assert len(named) > 50 and named <= set(SCRIPTS)
