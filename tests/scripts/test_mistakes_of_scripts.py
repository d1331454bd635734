"""A mistake in a script is one sentence with a remedy and the script's line, and ends the job: no line of psjob's own code is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import mistakes
from tests.scripts.cells import manifest
from tests.support import warm
from tests.support.quick import rest_rotates

pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(mistakes.__file__)
QUICK = {"weights_by_hand", "a_lazy_module"}


@pytest.mark.parametrize("case", rest_rotates(sorted(mistakes.SAYS), QUICK))
def test_a_mistake_is_a_sentence(tmp_path: Path, case: str) -> None:
    words = ["run", str(manifest(tmp_path, [str(SCRIPT), case])), "--no-progress"]
    code, output = warm.run(tmp_path, words, seconds=200)
    said = mistakes.SAYS[case]
    assert code == 1 and "Traceback" not in output and 'File "' not in output, output[-3000:]
    lines = [line for line in output.splitlines() if said in line]
    assert [line for line in lines if re.search(r"\(mistakes\.py:\d+\)", line)] == lines, output[-3000:]
    by_script = [line for line in lines if line.startswith("psjob: ")]
    assert 1 <= len(by_script) <= 2, "by the worker that is shown, and by another one if that ended first"
    assert len(lines) - len(by_script) <= 1, "a long sentence is shortened in the last line"
    assert re.match(r"Failed: Refused: worker \d: ", output.splitlines()[-1]), output[-3000:]


def test_each_is_listed() -> None:
    helpers = {"net", "sgd", "attached", "step"}
    there = {name for name, one in vars(mistakes).items() if getattr(one, "__module__", "") == mistakes.__name__ and callable(one)}
    assert there - helpers == set(mistakes.SAYS)
