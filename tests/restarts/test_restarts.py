"""Scripts as people have them go on after a restart: rank 0 prints the lines of the undisturbed run, and weights and buffers are its bits.

Each script of `scripts/` loops over `ps.epochs` and keeps in `ps.state` what it carries. The same script with plain loops and variables is
equal too, or it is not Complete and says why.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.e2e.workloads.running import Ran, faults, finish, manifest, start
from tests.quick import rest_rotates

pytestmark = pytest.mark.timeout(900)
HERE = Path(__file__).parent / "scripts"
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py"))
STEPS = 4
"""Of a pass of one of two workers."""
FAULTS = {
    "shard 0 in a pass": ("kill:ps-0@step=14",),
    "shard 1 at the end of a pass": ("kill:ps-1@step=16",),
    "a worker in a pass": ("kill:worker-0@step=14",),
    "a worker at the end of a pass": ("kill:worker-1@step=12",),
    "before the first checkpoint": ("kill:ps-0@step=3",),
    "twice": ("kill:ps-1@step=10", "kill:ps-0@step=18"),
}
QUICK = ["early_stopping: shard 0 in a pass", "phases: a worker in a pass"]
SENTENCE = "the script ended before it stood where it was"
UNKEPT = "nobody keeps it"


def lines(ran: Ran) -> list[str]:
    """What rank 0 printed, without what came again."""
    return list(dict.fromkeys(line for line in (ran.out + ran.err).splitlines() if line.startswith("line ")))


def plain(source: str) -> str:
    """A script without `ps.epochs` and `ps.state`."""
    source = source.replace("ps.epochs()", "itertools.count()").replace("ps.epochs(", "range(").replace("ps.state(", "SimpleNamespace(")
    return source.replace("import torch\n", "import itertools\nfrom types import SimpleNamespace\n\nimport torch\n", 1)


def run(folder: Path, source: str, *what: str) -> Ran:
    folder.mkdir()
    (folder / "train.py").write_text(source)
    job = manifest(folder, ["train.py"], training={"mode": "sync", "seed": 0}, checkpoint={"everySteps": 3, "interval": "1h"})
    return finish(start(folder, job, *faults(*what)), folder)


@cache
def undisturbed(name: str, folder: Path) -> Ran:
    ran = run(folder / name, (HERE / f"{name}.py").read_text())
    assert ran.code == 0, ran.err[-3000:]
    assert len(lines(ran)) > STEPS
    return ran


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the undisturbed runs."""
    return tmp_path_factory.mktemp("undisturbed")


def equal(ran: Ran, wanted: Ran) -> None:
    assert ran.code == 0, ran.err[-4000:]
    found, expected = ran.weights(), wanted.weights()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), f"{name}: {ran.err[-3000:]}"


CASES = [f"{name}: {fault}" for name in SCRIPTS for fault in FAULTS]


@pytest.mark.parametrize("case", rest_rotates(CASES, QUICK))
def test_a_restart_changes_no_line_and_no_bit(tmp_path: Path, once: Path, case: str) -> None:
    name, fault = case.split(": ")
    wanted = undisturbed(name, once)
    ran = run(tmp_path / "hit", (HERE / f"{name}.py").read_text(), *FAULTS[fault])
    equal(ran, wanted)
    assert lines(ran) == lines(wanted), ran.err[-4000:]


@pytest.mark.parametrize("case", rest_rotates(CASES, ["early_stopping: shard 1 at the end of a pass"]))
def test_a_plain_loop_is_equal_or_says_why_it_is_not(tmp_path: Path, once: Path, case: str) -> None:
    name, fault = case.split(": ")
    wanted = undisturbed(name, once)
    ran = run(tmp_path / "hit", plain((HERE / f"{name}.py").read_text()), *FAULTS[fault])
    if ran.code == 0:
        equal(ran, wanted)
    else:
        assert SENTENCE in ran.out + ran.err or UNKEPT in ran.out + ran.err, ran.err[-4000:]
