"""Mistakes that users make first: one message each, without a traceback, with a remedy that works when it is followed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.live.cli_inside import psjob
from tests.support import warm
from tests.support.soaking import rotating

NAN = """
import torch

import psjob as ps

model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e9)
loader = torch.utils.data.DataLoader([torch.ones(2)] * 160, batch_size=8)
model, opt = ps.attach(model, opt)
for epoch in ps.epochs(2):
    for x in ps.shard(loader):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        ps.report(loss=loss.item())
"""
DDP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader([torch.ones(2)] * 160, batch_size=8)
for epoch in range(2):
    for x in loader:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
"""
Edit = Callable[[str], str]


@pytest.fixture
def hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what `psjob init hello` writes, on a machine without a cluster."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert psjob(tmp_path, "init", "hello").returncode == 0
    return tmp_path


@dataclass(frozen=True)
class Mistake:
    """What is typed, after an edit of the manifest; what is said in one line each; and what is typed then."""

    words: str
    said: tuple[str, ...]
    then: str
    edit: Edit = str
    corrected: Edit = str
    code: int = 2


def replaced(one: str, other: str) -> Edit:
    def edit(text: str) -> str:
        assert re.search(one, text)
        return re.sub(one, other, text)

    return edit


def both(first: Edit, second: Edit) -> Edit:
    return lambda text: second(first(text))


TABLE = {
    "a wrong path": Mistake(
        "run helo/job.yaml",
        ("helo/job.yaml: cannot be read: No such file or directory; did you mean hello/job.yaml?",),
        "validate hello/job.yaml",
    ),
    "a typo in a mode": Mistake(
        "validate hello/job.yaml",
        ('hello/job.yaml:9: spec.training.mode: Unsupported value: "asynch": supported values: "sync", "bounded", "softsync", "async", '
         '"threshold", "local"; did you mean async?',),
        "validate hello/job.yaml", replaced("mode: sync", "mode: asynch"), replaced("mode: sync", "mode: async"), code=1,
    ),
    "a typo in an option's mode": Mistake(
        "run hello/job.yaml --mode asynch",
        ("--mode asynch: did you mean async? The modes are sync, bounded, softsync, async, threshold, local",),
        "render hello/job.yaml",
    ),
    "a number in quotes": Mistake(
        "run hello/job.yaml",
        ('hello/job.yaml: spec.shards.replicas: Invalid value: "2": must be of type integer; write it without quotes',),
        "validate hello/job.yaml", replaced("replicas: 1", 'replicas: "2"'), replaced("replicas: 1", "replicas: 2"),
    ),
    "a word for a number": Mistake(
        "run hello/job.yaml",
        ('hello/job.yaml: spec.shards.replicas: Invalid value: "two": must be of type integer; Number of shards; 1..256.',),
        "validate hello/job.yaml", replaced("replicas: 1", 'replicas: "two"'), replaced("replicas: 1", "replicas: 2"),
    ),
    "two errors of two kinds": Mistake(
        "run hello/job.yaml",
        ('hello/job.yaml: spec.shards.replicas: Required value; Number of shards; 1..256.',
         'hello/job.yaml: spec.shards.replica: unknown field "spec.shards.replica"; did you mean spec.shards.replicas?',
         "hello/job.yaml: spec.workers.replicas: Invalid value: -1: must be 1..4000; to run none for a while set spec.suspend: true"),
        "validate hello/job.yaml", both(replaced("replicas: 1", "replica: 1"), replaced("replicas: 2", "replicas: -1")),
    ),
    "a mode that decides what else may be said": Mistake(
        "run hello/job.yaml",
        ('hello/job.yaml: spec.training.mode: Unsupported value: "softsinc": supported values: "sync", "bounded", "softsync", "async", '
         '"threshold", "local"; did you mean softsync?',),
        "validate hello/job.yaml", replaced("mode: sync", "softsync: {splits: 1}\n    mode: softsinc"),
        replaced("mode: sync", "mode: softsync"),
    ),
    "an option before the manifest": Mistake(
        "submit --forec hello/job.yaml", ("No such option: --forec; did you mean --folder?",), "submit --help",
    ),
    "no image": Mistake(
        "submit hello/job.yaml",
        ("hello/job.yaml: the container worker of the workers has no image, which only this machine does without; name one that the "
         "cluster can pull: --image registry.example.com/me/train:1",),
        "validate hello/job.yaml", replaced("image: [^\n]*", "tty: false"),
    ),
    "no checkpoint yet": Mistake(
        "run hello/job.yaml --resume .psjob/none",
        ("--resume .psjob/none: .psjob/none is not the folder of a run of psjob; there is no run in {folder}/.psjob; "
         "start in the folder that the run was started in, or start anew without --resume",),
        "validate hello/job.yaml",
    ),
    "an option's name": Mistake("run hello/job.yaml --worker 4", ("No such option: --worker; did you mean --workers?",), "run --help"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", TABLE.values(), ids=TABLE)
def test_a_mistake_is_told_once_with_a_remedy(hello: Path, mistake: Mistake) -> None:
    file = hello / "hello/job.yaml"
    whole = file.read_text()
    file.write_text(mistake.edit(whole))
    done = psjob(hello, *mistake.words.split())
    lines = [line.removeprefix("psjob: ").removeprefix("Error: ") for line in (done.stdout + done.stderr).splitlines()]
    lines = [line.replace(str(hello), "{folder}") for line in lines if line and not line.startswith(("Usage:", "Try "))]
    assert (done.returncode, lines) == (mistake.code, [*mistake.said])
    file.write_text(mistake.corrected(whole))
    assert psjob(hello, *mistake.then.split()).returncode == 0


@pytest.mark.parametrize("case", [rotating("nan"), rotating("ddp"), rotating("delete")])
def test_a_mistake_that_is_seen_as_it_trains(hello: Path, case: str) -> None:
    script = hello / "train.py"
    script.write_text(DDP if case == "ddp" else NAN if case == "nan" else NAN.replace("lr=1e9", "lr=1e-3"))
    code, told = warm.run(hello, ["run", "train.py", "--workers", "1"])
    if case == "nan":
        assert code == 3 and told.count("Diverged: worker 0 reported loss") == 1 and "Complete" not in told, told
        assert "lower the learning rate" in told, told
        script.write_text(NAN.replace("lr=1e9", "lr=1e-3"))
        assert warm.run(hello, ["run", "train.py", "--workers", "1"])[0] == 0
    elif case == "ddp":
        assert code == 1 and told.count("\nFailed: ") == 1, told
        # Whether the script has imported psjob or not: here it is a fork of a process that has.
        assert "psjob convert train.py shows the edits" in told or "`psjob convert SCRIPT.py` shows how" in told, told
        assert psjob(hello, "convert", "--write", "train.py").returncode == 0
        assert warm.run(hello, ["run", "train.py", "--workers", "1"])[0] == 0
    else:
        assert code == 0, told
        (run,) = (hello / ".psjob").glob("train-*")
        done = psjob(hello, "delete", "train")
        (line,) = done.stderr.splitlines()
        assert (done.returncode, "nothing was removed: to remove" in line, "for good, add --yes" in line) == (2, True, True)
        assert run.is_dir()
        assert psjob(hello, "delete", "train", "--yes").returncode == 0 and not run.exists()
