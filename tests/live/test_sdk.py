"""A shipped function or file runs in a process of its own, with its arguments and packages.

- A mistake made from Python ends at the user's line: one exception that can be caught, and no chain through psjob or asyncio.
- A job as a notebook sees it: its weights in the plain model, its phase, its numbers as a table, and `wait` that is shown once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import CapturedIO, capture_output

import psjob
import psjob as ps
from psjob_client.jobs.verbs import checked_job
from psjob_client.local.manifest import worker_commands
from psjob_client.sdk import manifest
from psjob_client.sdk.manifest import script_of


def plain(a: int, b: str = "x") -> None:
    print(json.dumps([a, b, os.path.basename("/y/z"), Path("p").name]))


def nested() -> None:
    def inner(value: int) -> int:
        return value + len([one + 1 for one in range(value)])

    class Own:
        pass

    print(inner(2), Own.__name__, "$(HOME) $$ $HOME", __name__)


def ran(script: str, folder: Path) -> str:
    (folder / "alone.py").write_text(script)
    done = subprocess.run([sys.executable, "-I", "alone.py"], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_function_runs_alone_with_its_modules_and_arguments(tmp_path: Path) -> None:
    script = script_of(plain, {"a": 5, "b": 'it\'s "q"\n'})
    assert "import json\n" in script and "from pathlib import Path\n" in script
    assert json.loads(ran(script, tmp_path)) == [5, 'it\'s "q"\n', "z", "p"]
    assert ran(script_of(nested), tmp_path) == "4 Own $(HOME) $$ $HOME __main__"


def test_the_manifest_runs_the_text_as_a_file_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import sys, helper\nprint(helper.ONE, sys.argv[1:], __file__.endswith('.py'), '$(HOME)', '$$', sys.orig_argv[1:] == [__file__])\n"
    )
    (tmp_path / "helper.py").write_text("ONE = 1\n")
    made = manifest.build(file, packages=["pytest>=1"], env={"N": 1})
    command = worker_commands(checked_job(made), tmp_path)[0]
    done = subprocess.run(
        command.argv, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **command.env, "TMPDIR": str(tmp_path)}
    )
    assert done.stdout == "1 [] True $(HOME) $$ True\n", done.stderr
    assert len(list(tmp_path.glob("psjob-scripts-*/train-*.py"))) == 1


def test_what_pip_cannot_install_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    command = worker_commands(checked_job(manifest.build(tmp_path / "train.py", packages=["pytest<1"])), tmp_path)[0]
    env = {**os.environ, "PIP_NO_INDEX": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command.argv, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith("packages: pip could not install pytest<1")


MOST_LINES = 12
MOST_IN_A_CELL = 16
"""With the lines around the user's, and a line on hidden frames."""
MOST_FRAMES = 2
"""Of psjob, below the user's line: the call, and where it is refused."""

MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a wrong name": (lambda: ps.Client.local().get("trian"), ps.NoSuchJob, "`client.list()` shows"),
    "a wrong name of logs": (lambda: list(ps.Client.local().logs("trian")), ps.NoSuchJob, "no job"),
    "a handle of nothing": (lambda: ps.Client.local().job("trian"), ps.NoSuchJob, "no job"),
    "no folder": (lambda: ps.Client.local("nowhere").list(), ps.JobProblem, "is no folder"),
    "no cluster": (lambda: ps.Client.kube(kubeconfig="nowhere").list(), ps.Unreachable, "runs of this machine: `psjob.Client.local()`"),
    "a lambda": (lambda: ps.Client.local().train(lambda: None), ps.CannotShip, "write it with `def`"),
    "a wrong value": (lambda: ps.Client.local().train(["true"], workers=-1), ps.BadManifest, "spec.workers.replicas"),
    "a wrong file": (lambda: ps.Client.local().submit("nowhere.yaml"), ps.BadManifest, "nowhere.yaml"),
    "epochs": (lambda: ps.epochs(-1), ps.Refused, "takes a number of epochs"),
    "attach": (lambda: ps.attach(torch.nn.Linear(1, 1), None), ps.Refused, ""),
    "shard": (lambda: ps.shard(3), ps.Refused, ""),  # type: ignore[arg-type]
    "state": (lambda: (ps.state(twice=1), ps.state(twice=2)), ps.Refused, "twice"),
    "pipeline": (lambda: ps.pipeline(print, print), ps.Refused, "takes a torch Module"),  # type: ignore[arg-type]
    "mirror": (lambda: ps.mirror(torch.nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), "star"), ps.Refused, "star"),
}


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("PSJOB_ROLE", raising=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_exception_whose_traceback_is_short(mistake: str) -> None:
    call, kind, says = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert type(error) is kind and says in str(error)
    assert "--" not in str(error) and "`psjob " not in str(error), "Python is not told of commands"
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    assert error.__traceback__ is not None
    frames = traceback.extract_tb(error.__traceback__)[2:]  # without this test and the lambda
    assert 1 <= len(frames) <= MOST_FRAMES and all("/psjob" in frame.filename for frame in frames), frames
    told = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
    assert len("".join(told).splitlines()) <= MOST_LINES
    assert told[-1].startswith(f"psjob.{kind.__name__}: ")


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """IPython's own shell, which is told that it has a kernel."""
    monkeypatch.setattr(sys, "ps1", "", raising=False)  # IPython sets it: the next test is no interactive session
    shell = InteractiveShell.instance()
    shell.kernel = object()
    shell.colors = "nocolor"
    hook = sys.excepthook
    yield shell
    sys.excepthook = hook
    InteractiveShell.clear_instance()


@pytest.mark.usefixtures("alone")
def test_a_cell_with_a_mistake_shows_the_users_line(notebook: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    for code, name in (("psjob.Client.local().get('trian')", "NoSuchJob"), ("psjob.epochs(-1)", "Refused")):
        done = notebook.run_cell(f"import psjob\n{code}")
        assert type(done.error_in_exec).__name__ == name, "the kernel lives on"
        lines = capsys.readouterr().out.splitlines()
        assert code in "\n".join(lines) and len(lines) <= MOST_IN_A_CELL, lines
        shown = [line for line in lines if line.startswith("File ")]
        assert len(shown) <= 1 and "sdk/blocking.py" not in shown[0] and "api/" not in shown[0], "only if it was raised"


@pytest.mark.usefixtures("alone")
def test_a_cell_can_catch_it(notebook: InteractiveShell) -> None:
    done = notebook.run_cell("import psjob\ntry:\n    psjob.epochs(-1)\nexcept psjob.Refused as refused:\n    told = str(refused)\ntold")
    assert "takes a number of epochs" in str(done.result)


SCRIPT = """
import sys, torch
import psjob as ps

def build():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4))
    model[3].weight = model[2].weight
    return model

if __name__ == "__main__":
    model = build()
    model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    while ps.step() < 40:
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ps.report(loss=loss)
    ps.export("exported.safetensors")
"""
CELL = """
import psjob
job = psjob.Client.local().job("{}")
job.wait(timeout=60)
"""


def pictures(io: CapturedIO) -> list[str]:
    """What a cell has displayed as HTML and not replaced."""
    found: dict[str, str] = {}
    for number, output in enumerate(io.outputs):
        if (html := output.data.get("text/html")) is not None:
            key = (output.transient or {}).get("display_id") or str(number)
            found[key] = html
    return list(found.values())


@pytest.mark.rotating
@pytest.mark.timeout(300)
def test_what_a_notebook_gets_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notebook: InteractiveShell) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    client = psjob.Client.local()
    job = client.train(["python", "train.py"], name="tied", workers=2, spec={"checkpoint": {"everySteps": 10}})
    job.wait(timeout=200)
    assert job.phase == "Complete"

    space: dict[str, object] = {"__name__": "script"}
    exec(compile(SCRIPT, "train.py", "exec"), space)  # noqa: S102
    model: torch.nn.Module = space["build"]()  # type: ignore[operator]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(job.load_weights(), strict=True)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    final = job.load_weights()

    run = Path(job.get().place)
    (run / "final.safetensors").rename(run / "away")
    newest = client.load_weights(job.id)
    assert newest.keys() == final.keys() and all(torch.equal(newest[name], final[name]) for name in final), "of the newest checkpoint"
    for path in run.glob("manifest-*"):
        path.unlink()
    with pytest.raises(psjob.NoWeights, match="no checkpoint yet"):
        job.load_weights()

    table = job.metrics().to_pandas()
    assert isinstance(table, pandas.DataFrame) and table.index.name == "step" and table.index[-1] == 40
    assert {"time", "loss", "rate"} <= set(table.columns) and table["loss"].iloc[-1] == job.metrics()["loss"].last

    shown: list[dict[str, str]] = []
    monkeypatch.setattr(notebook.displayhook, "write_format_data", lambda data, _metadata=None: shown.append(data))
    assert "import" not in repr(client.list()) and len(repr(client.list())) < 120
    with capture_output() as io:
        done = notebook.run_cell(CELL.format(job.id), store_history=True)
    assert done.result.phase == "Complete"
    assert len(pictures(io)) == 1 and shown == [{"text/plain": repr(done.result)}], "the board, and a line as the cell's value"
    notebook.run_cell("job.get()", store_history=True)
    assert "text/html" in shown[-1], "a cell of its own shows it"
