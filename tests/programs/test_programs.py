"""Programs by others train in a job as they do under DDP, with a killed shard and a killed worker too; async trains, or says why not.

Their weights and their losses are the reference's, within what the table allows and says why. What psjob does not do right yet, or refuses,
stands in the table too, and must go from there when it is right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import page
from tests.programs.running import Ran, in_job, referred, table, verdict

pytestmark = pytest.mark.timeout(900)
KILLED_QUICK = "Accelerate: regression of its tests"
"""`make test` kills a worker of this one."""


def cells() -> list[object]:
    """All programs in all modes; `make test` has sync of the quick ones, and one kill."""
    found: list[object] = []
    for name, program in table().items():
        for mode in page.MODES:
            wrong = program.wrong_in(mode)
            marks = [pytest.mark.xfail(reason=wrong, strict=True)] if wrong else []
            quick = program.quick and (mode == "sync" or (mode == "worker" and name == KILLED_QUICK))
            found.append(pytest.param(name, mode, marks=marks if quick else [*marks, pytest.mark.soak], id=f"{name}: {mode}"))
    return found


@pytest.fixture(scope="module")
def references() -> dict[str, Ran]:
    """Of programs whose reference has run."""
    return {}


@pytest.mark.parametrize(("name", "mode"), cells())
def test_a_program_trains_as_with_ddp(tmp_path: Path, references: dict[str, Ran], name: str, mode: str) -> None:
    program = table()[name]
    if name not in references:
        references[name] = referred(program, tmp_path / "reference")
    ran = in_job(program, tmp_path / "job", mode)
    wrong = verdict(program, mode, ran, references[name])
    assert not wrong, f"{wrong}\n{ran.output[-4000:]}"
