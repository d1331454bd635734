"""A job as a notebook sees it: its weights in the plain model, its phase, its numbers as a table, and `wait` that is shown once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pandas
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import CapturedIO, capture_output

import psjob

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


@pytest.fixture
def notebook() -> Iterator[InteractiveShell]:
    """IPython's own shell, which is told that it has a kernel."""
    shell, hook = InteractiveShell.instance(), sys.excepthook
    shell.kernel = object()
    yield shell
    sys.excepthook = hook
    InteractiveShell.clear_instance()


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
