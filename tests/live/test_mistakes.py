"""Mistakes that users make first: one message each, without a traceback, with a remedy that works when it is followed.

- `psjob init`, then `psjob run`: what is written trains, passes validation, and is never written over.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from psjob_client.cli import main
from psjob_client.cli.manifest_commands import TESTED
from psjob_client.lint import judge_text
from psjob_client.problems import BadInput
from tests.frameworks import IMPORTS, OFFLINE
from tests.live.cli_inside import psjob
from tests.support import warm
from tests.support.soaking import rotating
from tests.support.typed import CliRunner

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


def init(*words: str) -> str:
    done = CliRunner().invoke(main.cli, ["init", *words], catch_exceptions=False)
    if isinstance(done.exception, BadInput):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


LEARNED = {
    "pytorch": ("accuracy", lambda value: value > 0.8),
    "transformers": ("eval_loss", lambda value: value < 1.5),  # ln 16 = 2.8 at first, ln 4 / 15 = 0.1 at best
    "lightning": ("accuracy", lambda value: value > 0.8),
    "accelerate": ("accuracy", lambda value: value > 0.8),
}


def preloaded(template: str) -> Sequence[str]:
    """What its processes have imported before they begin."""
    return warm.PRELOADED if template == "pytorch" else IMPORTS


@pytest.mark.parametrize("template", ["pytorch", *map(rotating, sorted(LEARNED.keys() - {"pytorch"}))])
def test_what_init_writes_trains(tmp_path: Path, template: str) -> None:
    told = init(str(tmp_path / "first"), "--template", template)
    folder = tmp_path / "first"
    assert f"psjob run {folder}/job.yaml" in told and f"psjob submit {folder}/job.yaml" in told
    words = ["run", "first/job.yaml", "--summary", "summary.json", "--no-progress"]
    code, output = warm.run(tmp_path, words, OFFLINE, preloaded=preloaded(template))
    assert code == 0, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["result"] == "Complete" and summary["restarts"] == {} and summary.get("warning") is None
    assert "same data" not in output, output
    name, learned = LEARNED[template]
    assert learned(summary["metrics"][name]), summary["metrics"]


def test_every_template_is_trained() -> None:
    with pytest.raises(BadInput, match=f"take {', '.join(sorted(LEARNED))}$"):
        main.cli(["init", "--template", "keras"], standalone_mode=False)


@pytest.mark.parametrize("template", ["pytorch", *map(rotating, sorted(LEARNED.keys() - {"pytorch"}))])
def test_a_script_trains_without_a_job(tmp_path: Path, template: str) -> None:
    init(str(tmp_path), "--template", template)
    imports = warm.COMPILING if template == "pytorch" else IMPORTS
    code, output = warm.call(tmp_path, "train", ["--epochs", "1"], OFFLINE, warm.SECONDS, imports)
    assert code == 0, output


def test_versions_that_are_named_are_those_that_are_tested() -> None:
    pins = (Path(__file__).resolve().parents[2] / "requirements" / "dev.txt").read_text()
    assert all(f"\n{package}=={tested} " in pins for package, tested in TESTED.items())


def test_a_package_that_is_not_there_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install" not in init(str(tmp_path / "a"), "--template", "lightning")

    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("psjob_client.cli.manifest_commands.version", version)
    told = init(str(tmp_path / "b"), "--template", "lightning")
    assert f"pip install -r {tmp_path}/b/requirements.txt" in told
    assert f"lightning=={TESTED['lightning']}" in (tmp_path / "b" / "requirements.txt").read_text()


def test_manifest_script_and_image_agree(tmp_path: Path) -> None:
    init(str(tmp_path / "My Job"), "--image", "registry.example.com/a/b:7", "--workers", "3", "--shards", "2")
    folder = tmp_path / "My Job"
    result = judge_text("job.yaml", (folder / "job.yaml").read_bytes(), strict=True)
    assert result.jobs == ("my-job",) and result.findings == ()
    ast.parse((folder / "train.py").read_text())
    assert not [file for file in folder.iterdir() if "$" in file.read_text()]
    assert "registry.example.com/a/b:7" in (folder / "Dockerfile").read_text()


@pytest.mark.parametrize("template", LEARNED)
def test_the_dockerfile_is_one(tmp_path: Path, template: str) -> None:
    """Its instructions, in an order that builds: a base with a tag, pinned packages, files that are there, no root."""
    init(str(tmp_path), "--template", template)
    lines = [line for line in (tmp_path / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    steps = [line.split(" ", 1) for line in lines]
    assert [name for name, _ in steps] == ["FROM", "WORKDIR", "COPY", "RUN", "COPY", "USER", "CMD"]
    assert [words for name, words in steps if name == "COPY"] == ["requirements.txt ./", "train.py ./"]
    told = dict(steps)
    assert re.fullmatch(r"python:3\.\d+-slim", told["FROM"])
    assert told["RUN"] == "pip install --no-cache-dir -r requirements.txt"
    packages = (tmp_path / "requirements.txt").read_text().split()
    assert packages and all(re.fullmatch(r"[a-z]+==\d+\.\d+\.\d+", package) for package in packages)
    imported = {name.partition(".")[0] for name in re.findall(r"^(?:import|from) (\S+)", (tmp_path / "train.py").read_text(), re.MULTILINE)}
    asked = {package.partition("==")[0] for package in packages}
    assert imported - {"argparse", "psjob"} <= asked and (template == "pytorch" or template in asked)
    manifest = (tmp_path / "job.yaml").read_text()
    assert f"command: [{', '.join(json.loads(told['CMD']))}]" in manifest
    assert not told["USER"].startswith(("0", "root"))


def test_nothing_is_written_over_without_force(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(BadInput, match=r"train\.py already.*--force"):
        main.cli(["init", str(tmp_path)], standalone_mode=False)
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"] and (tmp_path / "train.py").read_text() == "mine"
    init(str(tmp_path), "--force")
    assert "ps.attach" in (tmp_path / "train.py").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--template", "_common"], "take accelerate, lightning, pytorch, transformers"),
        (["--name", "Not A Name"], "metadata.name"),
        (["--workers", "0"], "1..4000"),
        (["--shards", "999"], "1..256"),
        (["--image", "a: b\nc"], "not YAML"),
        (["--image", "#x"], "--image #x"),
    ],
)
def test_what_cannot_be_written_is_said_and_nothing_is(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        main.cli(["init", str(tmp_path / "new"), *words], standalone_mode=False)
    assert said in str(refused.value) and not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        main.cli(["init", str(tmp_path / "file" / "x")], standalone_mode=False)
