"""The commands and files of the PAGES, run as they stand there: each works, and prints what follows it.

- docs/python.md, run as one script in an empty folder: what a reader types, in the order of the page; and the code of docs/data.md.
- The examples of `psjob.Client`'s verbs, in docs/reference.md and in `help`: each runs as a doctest, over real jobs of this machine.
- The pages on coming from DDP, Horovod and a TFJob: what they show after is what `psjob convert` makes of what they show before.
  Their commands run in test_docs_pages.py: the DDP script under torchrun, and each script after it in a job.
- docs/contributing/founding.md: the command that simulates schedules prints the figures of its line.
- The script that hack/readme.py makes of a page's commands.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.readme import script
from psjob import Client, Job
from psjob_client.convert.draft import Wishes
from psjob_client.convert.script.port import ported
from psjob_client.convert.sources import from_text
from psjob_client.problems import BadInput
from tests.docs.pages import BLOCK, COMMANDS, DOCS, PAGE, PAGES, blocks
from tests.support import warm
from tests.support.soaking import rotating
from tests.unit.convert_sources import DDP

QUICK = {"convert.md"}
"""They need no runtime."""
PROGRAMS = {
    "psjob": ["-m", "psjob_client.cli.main"],
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--local-addr", "127.0.0.1"],
}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""A machine's own name may lead nowhere."""
FORGIVEN = " || true"


@pytest.mark.parametrize("page", [page if page in QUICK else rotating(page) for page in PAGES])
def test_a_page_does_what_it_says(tmp_path: Path, page: str) -> None:
    said, ran = "", 0
    for kind, text in BLOCK.findall((DOCS / page).read_text()):
        if kind in ("yaml", "python") and text.startswith("# "):
            (tmp_path / text.split("\n")[0].removeprefix("# ")).write_text(text)
        elif kind == "sh":
            for line in text.splitlines():
                code, said = typed(tmp_path, line, warm.LIGHT if page in QUICK else warm.PRELOADED)
                ran += 1
                assert (code == 0 or line.endswith(FORGIVEN)) and "Traceback" not in said, f"{line}\n{said}"
        elif kind == "text":
            assert all(shown(line, said) for line in text.splitlines()), f"{text}\nis not in\n{said}"
    assert ran >= 1


def typed(folder: Path, line: str, preloaded: Sequence[str]) -> tuple[int, str]:
    """Exit code of a command, and what it printed. It and its processes are forks."""
    program, *words = shlex.split(line.removesuffix(FORGIVEN))
    streams = folder / ".printed", folder / ".told"
    started = warm.start_python(folder, PROGRAMS[program] + words, LOOPBACK, *streams, preloaded)
    try:
        return started.wait(100), "".join(started.communicate())
    finally:
        started.kill()


def shown(line: str, said: str) -> bool:
    """The line, in which `…` stands for what differs from run to run, is in what was said."""
    return re.search(".*".join(re.escape(part) for part in line.split("…")), said) is not None


@pytest.mark.rotating
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    code = "\n".join(blocks())
    assert code.count("client.train(train") == 3 and "Client.kube" not in code
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    ended, told = warm.call(tmp_path, "page", [], {"PYTHONPATH": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")}, seconds=300)
    lines = told.splitlines()
    assert ended == 0, told[-3000:]
    assert lines[0].startswith("Complete 60 ") and "kind: PSTrainingJob" in lines
    assert 'there is no job "trian"' in told and "did you mean train" in told
    assert (tmp_path / "job.yaml").read_text().startswith("apiVersion: psjob.dev/v1alpha1\n")
    assert "          - |\n" in (tmp_path / "job.yaml").read_text(), "the script is readable in Git"


def test_the_code_of_the_page_of_data_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (PAGE.parent / "data.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    space = runpy.run_path(str(tmp_path / "page.py"))
    assert capsys.readouterr().out == "16\n" and space["last"] is True and space["epoch"] == 2


SCRIPT = """
import sys, time, torch
import psjob as ps

model = torch.nn.Linear(8, 1)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
while ps.step() < 368:
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ps.report(loss=0.021, test_accuracy=0.978)
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
print("accuracy 0.978", flush=True)
"""
CALM = ("train", "submit", "job", "get", "list", "events", "metrics", "timeline", "checkpoints", "wait", "logs", "watch", "load_weights")
"""Verbs whose examples speak of a job that has ended, or start one."""
STEERING = ("checkpoint", "suspend", "resume", "delete")
"""Verbs whose examples speak of a job that runs, in an order that leaves one for the next."""


def manifest(pause: float) -> dict[str, Any]:
    worker = {"name": "worker", "image": "none", "command": ["python", "train.py", str(pause)]}
    spec = {"shards": {"replicas": 1}, "workers": {"replicas": 1, "template": {"spec": {"containers": [worker]}}}}
    return {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "digits"}, "spec": spec}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(SCRIPT)
    with Client.local() as local:
        yield local
        for job in local.list():
            local.delete(job.id)


OF_A_JOB = ("get", "events", "metrics", "logs", "watch", "wait", "load_weights", "save")
"""Verbs of a handle whose examples speak of a job that has ended; those that steer have the client's examples."""


def shown_reference(client: Client, name: str, kind: type = Client) -> None:
    """Run the example of a verb."""
    text = inspect.getdoc(getattr(kind, name)) or ""
    space = {"client": client, "Client": Client} if kind is Client else {"job": client.job("digits")}
    example = doctest.DocTestParser().get_doctest(text, space, name, None, None)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0, name


@pytest.mark.rotating
@pytest.mark.timeout(300)
def test_examples_of_a_job_that_has_ended(client: Client) -> None:
    shown_reference(client, "local")
    shown_reference(client, "kube")
    client.submit(manifest(0.0)).wait(timeout=120)
    for name in OF_A_JOB:
        shown_reference(client, name, Job)
    for name in sorted(CALM, key=("train", "submit").__contains__):
        if name == "submit":
            Path("job.yaml").write_text(json.dumps(manifest(0.0)))
        shown_reference(client, name)


@pytest.mark.rotating
@pytest.mark.timeout(300)
def test_examples_of_a_job_that_runs(client: Client) -> None:
    client.submit(manifest(0.015)).wait(phases=["Running"], timeout=120)
    for name in STEERING:
        shown_reference(client, name)


def test_no_verb_is_without_one() -> None:
    verbs = {
        name
        for name, value in vars(Client).items()
        if not name.startswith("_") and (inspect.isfunction(value) or name in ("local", "kube"))
    }
    assert verbs - {"close"} == {"local", "kube", *CALM, *STEERING}


COMING = DOCS / "coming"


def blocks_coming(page: str, kind: str) -> list[str]:
    return [text for of, text in BLOCK.findall((COMING / page).read_text()) if of == kind]


@pytest.mark.parametrize("page", ["ddp.md", "horovod.md"])
def test_the_script_after_is_made_of_the_one_before(page: str) -> None:
    before, after = blocks_coming(page, "python")
    made = ported(before)
    assert made.after == after and made.is_whole
    assert ported(after).after == after


def test_the_manifest_after_is_made_of_the_one_before() -> None:
    before, after = blocks_coming("tfjob.md", "yaml")
    ((made,), aside) = from_text(before, Wishes(image="registry.example.com/sums:1"))
    assert made.manifest == yaml.safe_load(after) and aside == []


def test_the_script_of_tensorflow_is_refused_and_the_one_after_is_left_as_it_is() -> None:
    before, after = blocks_coming("tfjob.md", "python")
    assert any(isinstance(node, ast.Attribute) and node.attr == "ParameterServerStrategy" for node in ast.walk(ast.parse(before)))
    with pytest.raises(BadInput, match="trains with TensorFlow"):
        ported(before)
    assert ported(after).after == after and ported(after).is_whole


def test_what_the_pages_leave_to_the_user_is_told_by_convert() -> None:
    """The left column of the tables: each is a line that convert does not change and names."""
    lines = {
        "dist.all_reduce(loss)": "dist.all_reduce", "with model.no_sync(): pass": "model.no_sync", "model.to(dist.get_rank())": "GPU",
        "hvd.allreduce(loss)": "hvd.allreduce", "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)": "SyncBatchNorm",
        "hvd.elastic.run(f)": "hvd.elastic.run", "s = DistributedSampler(d) if x else None": "shuffle=True",
    }  # fmt: skip
    before = blocks_coming("ddp.md", "python")[0].replace("import torch\n", "import torch\nimport horovod.torch as hvd\n", 1)
    for line, says in lines.items():
        made = ported(before.replace("dist.destroy", f"{line}\ndist.destroy"))
        assert [says in remark.sentence for remark in made.remarks if remark.by_hand] == [True], (line, made.remarks)


def test_the_diff_is_one_that_git_applies(tmp_path: Path) -> None:
    for text in (DDP, DDP.rstrip("\n"), DDP.replace("\n", "\r\n")):
        script, made = tmp_path / "train.py", ported(text)
        script.write_bytes(text.encode())
        subprocess.run(["git", "apply", "-p0"], cwd=tmp_path, input=made.diff("train.py").encode(), check=True, timeout=60)
        assert script.read_bytes().decode() == made.after


def test_the_schedules_have_the_figures_of_their_line(tmp_path: Path) -> None:
    ((words, figure),) = [one for one in COMMANDS if one[0].startswith("psjob simulate schedule")]
    code, said = warm.run(tmp_path, shlex.split(words)[1:])
    assert code == 0, said
    wanted = re.findall(r"`([^`]+)`", figure)
    assert wanted and [one for one in wanted if one not in said] == []


def test_a_script_ends_at_what_fails_and_notes_the_rest(tmp_path: Path) -> None:
    marks = tmp_path / "it's marks"
    done = subprocess.run(
        ["bash", "-c", script(["cd /", "pwd", "false", "echo no"], str(marks))], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1 and done.stdout == "/\n"
    times = [float(line) for line in marks.read_text().split()]
    assert len(times) == 2 and times == sorted(times)
