"""People's scripts continue after a restart: rank 0 prints the lines of the undisturbed run, and weights and buffers are its bits.

Each script of `scripts/` loops over `ps.epochs` and keeps in `ps.state` what it carries. The same script with plain loops and variables is
equal too, or it is not Complete and says why. In one process they are started again from every record (`tests/tensors`); here are real
processes, two workers, and the faults.

- A whole job whose workers come apart: what its script hears, and what is left in status, summary and exit code.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests import frameworks
from tests.e2e.workloads.running import Ran, faults, finish, script_job, start
from tests.restarts.rewritten import FRAMEWORKS, SENTENCES, plain, scripts
from tests.support import warm
from tests.support.soaking import rotating, soak

SCRIPTS = scripts()
TOLD = "told.txt"
"""Where `psjob run` says what it does."""


@dataclass(frozen=True)
class Fault:
    """`what` are those of `--fault`; `place` is where rank 0 waits for them, None: nowhere."""

    what: tuple[str, ...]
    place: str | None = None

    def prelude(self) -> str:
        """What the script begins with, in its first line: places are told by lines."""
        steps = {f"fault {what}:": int(what.rpartition("=")[2]) for what in self.what}
        if self.place is None:
            held = f"hold_steps({steps}, {TOLD!r})"
        else:
            held = f"hold({self.place!r}, {steps[f'fault {self.what[0]}:']}, {list(steps)}, {TOLD!r})"
        return f"__import__('tests.restarts.holding').restarts.holding.{held}; "

    def earlier(self) -> Fault:
        """The same in half as many steps, for workers that may be done with theirs before others; where rank 0 waits it strikes in time."""
        halved = tuple(re.sub(r"\d+$", lambda step: str(int(step[0]) // 2), what) for what in self.what)
        return self if self.place is not None else Fault(halved)


FAULTS = {
    "shard 0 in a pass": Fault(("kill:shard-0@step=14",)),
    "shard 1 at the end of a pass": Fault(("kill:shard-1@step=16",)),
    "a worker in a pass": Fault(("kill:worker-0@step=14",)),
    "the other worker at the end of a pass": Fault(("kill:worker-1@step=12",)),
    "shard 0 in a tail": Fault(("kill:shard-0@step=13",), "tail"),
    "a worker in a tail": Fault(("kill:worker-0@step=13",), "tail"),
    "shard 1 in an evaluation": Fault(("kill:shard-1@step=13",), "evaluation"),
    "a worker in an evaluation": Fault(("kill:worker-0@step=13",), "evaluation"),
    "all at once": Fault(("kill:shard-0@step=13", "kill:shard-1@step=13", "kill:worker-1@step=13", "kill:worker-0@step=13"), "tail"),
    "before the first checkpoint": Fault(("kill:shard-0@step=2",)),
    "twice": Fault(("kill:shard-1@step=10", "kill:shard-0@step=18")),
}
ASYNC = ("shard 0 in a pass", "shard 1 at the end of a pass", "a worker in a pass", "a worker in a tail", "all at once", "twice")
PLAIN_QUICK = "early_stopping: shard 1 at the end of a pass"
RESUMED = "stopped and resumed"


def cells(names: list[str], kinds: list[str], quick: str | None = None) -> list[object]:
    """All pairs of a script and what befalls it. Of each script one rotates, in turn; the others are left to soak."""
    found: list[object] = []
    for number, name in enumerate(names):
        fit = [kind for kind in kinds if "evaluation" not in kind or "eval()" in SCRIPTS[name] or name in FRAMEWORKS]
        for kind in fit:
            cell = f"{name}: {kind}"
            found.append(cell if cell == quick else rotating(cell) if kind == fit[number % len(fit)] else soak(cell))
    assert quick is None or quick in found
    return found


def lines(*runs: Ran) -> list[str]:
    """What rank 0 printed, without what came again."""
    return list(dict.fromkeys(line for ran in runs for line in (ran.out + ran.err).splitlines() if line.startswith("line ")))


def begun(folder: Path, name: str, source: str, *words: str, mode: str = "sync") -> warm.Started | subprocess.Popen[str]:
    """Start the job of a script in this folder."""
    job = script_job(folder, source, mode)
    return start(folder, job, *words, imports=frameworks.IMPORTS if name in FRAMEWORKS else warm.COMPILING, environment=frameworks.OFFLINE)


def run(folder: Path, name: str, source: str, fault: Fault | None = None, mode: str = "sync") -> Ran:
    """Run it to its end, with that fault, which has struck."""
    words = () if fault is None else faults(*fault.what)
    ran = finish(begun(folder, name, ("" if fault is None else fault.prelude()) + source, *words, mode=mode), folder)
    assert fault is None or all(f"fault {what}:" in ran.err for what in fault.what), ran.err[-3000:]
    return ran


@cache
def undisturbed(name: str, folder: Path) -> Ran:
    ran = run(folder / name, name, SCRIPTS[name])
    assert ran.code == 0, ran.err[-3000:]
    assert len(lines(ran)) > 3
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", cells(list(SCRIPTS), list(FAULTS), "early_stopping: shard 0 in a pass"))
def test_a_restart_changes_no_line_and_no_bit(tmp_path: Path, once: Path, cell: str) -> None:
    name, fault = cell.split(": ")
    wanted = undisturbed(name, once)
    ran = run(tmp_path / "hit", name, SCRIPTS[name], FAULTS[fault])
    equal(ran, wanted)
    assert lines(ran) == lines(wanted), ran.err[-4000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", cells([name for name in SCRIPTS if name not in FRAMEWORKS], list(FAULTS), PLAIN_QUICK))
def test_a_plain_loop_is_equal_or_says_why_it_is_not(tmp_path: Path, once: Path, cell: str) -> None:
    name, fault = cell.split(": ")
    wanted = undisturbed(name, once)
    ran = run(tmp_path / "hit", name, plain(SCRIPTS[name]), FAULTS[fault])
    if ran.code == 0:
        equal(ran, wanted)
        assert ran.summary["passes_again"] > 0 or cell != PLAIN_QUICK, "it was killed at the end of its second pass"
    else:
        assert any(sentence in ran.out + ran.err for sentence in SENTENCES), ran.err[-4000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", cells([name for name in SCRIPTS if "RMSprop" not in SCRIPTS[name]], list(ASYNC)))
def test_in_async_each_tail_has_its_effect_once(tmp_path: Path, cell: str) -> None:
    name, fault = cell.split(": ")
    ran = run(tmp_path / "hit", name, SCRIPTS[name], FAULTS[fault].earlier(), mode="async")
    assert ran.code == 0, ran.err[-4000:]
    made = re.findall(r"^line tails (\d+) of (\d+)", ran.out + ran.err, re.MULTILINE)
    assert made and made[-1][0] == made[-1][1], (made, ran.err[-3000:])


def stop(folder: Path, name: str) -> Ran:
    """Run it to step 13, and stop it there as Ctrl-C does."""
    hold = Fault(("stop@step=13",), "tail").prelude().replace("fault stop@step=13:", "stopping")
    process = begun(folder, name, hold + SCRIPTS[name])
    until = time.monotonic() + 200
    while not (folder / "held").exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stopped = finish(process, folder)
    assert stopped.code == 130 and stopped.summary["result"] == "Suspended", stopped.err[-3000:]
    return stopped


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", cells(list(SCRIPTS), [RESUMED]))
def test_a_stop_and_resume_changes_no_line_and_no_bit(tmp_path: Path, once: Path, cell: str) -> None:
    name, _ = cell.split(": ")
    wanted = undisturbed(name, once)
    stopped = stop(tmp_path / "hit", name)
    again = finish(begun(tmp_path / "hit", name, SCRIPTS[name], "--resume", f".psjob/{stopped.summary['run']}"), tmp_path / "hit")
    equal(again, wanted)
    assert lines(stopped, again) == lines(wanted), again.err[-4000:]


@pytest.mark.timeout(900)
@pytest.mark.rotating
def test_another_job_goes_on_from_a_job_by_name_as_from_its_run(tmp_path: Path, once: Path) -> None:
    """Both have the bits of the undisturbed run. By name it is the newest run of that job, not the newest of all."""
    name, folder = "early_stopping", tmp_path / "hit"
    wanted, stopped = undisturbed(name, once), stop(folder, name)
    job = json.loads((folder / "job.yaml").read_text())
    (folder / "train.py").write_text(SCRIPTS[name])
    for number, source in enumerate(({"run": stopped.summary["run"]}, {"job": "job"})):
        job["metadata"]["name"], job["spec"]["checkpoint"]["resumeFrom"] = f"next-{number}", source
        path = folder / f"next-{number}.yaml"
        path.write_text(json.dumps(job))
        ran = finish(start(folder, path), folder)
        equal(ran, wanted)
        assert f"of .psjob/{stopped.summary['run']}" in ran.err and lines(stopped, ran) == lines(wanted), ran.err[-4000:]


SCRIPT = """
import torch
import psjob as ps

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SyncBatchNorm(4), torch.nn.Linear(4, 1))
if WAY == "frozen":
    torch.manual_seed(ps.rank())
    model.append(torch.nn.Linear(1, 1).requires_grad_(False))
torch.manual_seed(0)
model, opt = ps.attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
head = torch.nn.Linear(1, 1)
second = torch.optim.AdamW(head.parameters())
for (x,) in ps.shard(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(96, 4)), batch_size=4)):
    opt.zero_grad()
    second.zero_grad()
    y = model(x)
    (head(y) if WAY == "second" else y).pow(2).mean().backward()
    opt.step()
    if WAY == "second":
        second.step()
"""
SAID = {
    "frozen": "weights differ at the beginning: frozen parameter 3.weight and 1 more of worker 1 is not that of worker 0; it was built",
    "second": "of worker 1 is not that of worker 0; an optimizer that was not attached steps",
    "none": "",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["frozen", rotating("second"), rotating("none")])
def test_a_job_whose_workers_come_apart_says_so(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(f"WAY = {way!r}\n{SCRIPT}")
    code, told = warm.run(tmp_path, ["run", "train.py", "--workers", "2", "--no-progress", "--summary", "s.json"])
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (code, summary["result"], summary["buffers_differ"]) == (0 if way == "none" else 4, "Complete", None), told
    assert SAID[way] in (summary["drift"] or "") and told.count(f"Workers differ: {summary['drift']}") == (way != "none")
    assert ("Complete: " in told) == (way == "none")
    assert told.count("psjob: SyncBatchNorm (1) is BatchNorm in a job, which has no process group") == 1
    apart = "psjob: AdamW was not given to attach, and steps 2 parameters (of shape (1, 1), of shape (1,))"
    assert told.count(apart) == (way == "second")
    listed = warm.run(tmp_path, ["list"])[1]
    assert ("Complete, workers differ" in listed) == (way != "none"), listed
