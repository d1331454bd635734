"""Scripts as people have them, in one process: from each record a started one prints the lines and has the bits of the undisturbed one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.restarts.rewritten import FRAMEWORKS, SENTENCES, plain, scripts
from tests.tensors.restarted_files import restarts

SCRIPTS = {name: source for name, source in scripts().items() if name not in FRAMEWORKS}


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """What goes over an iterator is looked for in the whole heap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_restart_changes_no_line_and_no_bit(tmp_path: Path, name: str) -> None:
    found = restarts(tmp_path, SCRIPTS[name], most=5)
    assert found.undisturbed.ending == "through" and len(found.undisturbed.lines) > 3, found.undisturbed
    assert not found.wrong, found.wrong[0]
    assert found.made > 5 and not found.refusals, found.refusals


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_plain_loop_is_equal_or_refused(tmp_path: Path, name: str) -> None:
    found = restarts(tmp_path, plain(SCRIPTS[name]), most=4, every_line=False)
    assert found.undisturbed.ending == "through", found.undisturbed.ending
    assert not found.wrong, found.wrong[0]
    assert found.made > 2 and all(any(sentence in why for sentence in SENTENCES) for why in found.refusals), found.refusals


BEFORE = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(3)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))


def evaluate():
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


first, history = evaluate(), [evaluate()]
best = first
for epoch in range(4):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    best = min(best, evaluate())
    history.append(best / first)
    print("line epoch", epoch, best, first, history)
"""


def test_what_was_made_of_the_first_weights_is_put_back(tmp_path: Path) -> None:
    """Such as an evaluation before the loop, which a restart makes of later weights."""
    found = restarts(tmp_path, BEFORE, every_line=False)
    assert found.undisturbed.ending == "through" and found.made > 8 and not found.refusals
    assert not found.wrong, found.wrong[0]


def test_weights_that_are_moved_and_put_back_in_each_step_are_no_state(tmp_path: Path) -> None:
    """`moves` is made in a block of `torch.no_grad`, and read in the next one."""
    source = (Path(__file__).parents[1] / "scripts/idioms/sam.py").read_text()
    found = restarts(tmp_path, source.replace("    optimizer.step()\n", "    optimizer.step()\n    print('line', norm.item())\n"))
    assert found.undisturbed.ending == "through" and found.made > 8 and not found.refusals, found.refusals
    assert not found.wrong, found.wrong[0]


def test_a_loop_that_begins_where_its_snapshot_says_is_as_long_as_ever(tmp_path: Path) -> None:
    """As torch's tutorial has it. A start from its last snapshot would leave out what lies between that and the record."""
    found = restarts(tmp_path, plain(SCRIPTS["snapshot"]), every_line=False)
    assert found.undisturbed.ending == "through" and found.made > 8 and not found.refusals, found.refusals
    assert not found.wrong, found.wrong[0]


BY_STEP = """import glob
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(3)
x = torch.randn(64, 4)
model, average = nn.Linear(4, 1), nn.Linear(4, 1)
average.load_state_dict(model.state_dict())
step, best = 0, 1e9
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
if FOUND:
    kept = torch.load("last.pt")
    step, best = kept["step"], kept["best"]
    average.load_state_dict(kept["average"])
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True))
ps.state(average=average)
while step < 40:
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters()):
                old.lerp_(new, 0.1)
    if loss.item() < best:
        best = loss.item()
        torch.save(model.state_dict(), "best.pt")
    torch.save({"step": step, "best": best, "average": average.state_dict()}, "last.pt")
    print("line", step, best, loss.item(), sum(p.sum().item() for p in average.parameters()))
"""


def test_a_loop_by_step_with_a_snapshot_is_as_long_as_ever(tmp_path: Path) -> None:
    found = restarts(tmp_path, BY_STEP.replace("FOUND", "os.path.isfile('last.pt')"), every_line=False)
    assert found.undisturbed.ending == "through" and found.made > 8 and not found.refusals, found.refusals
    assert not found.wrong, found.wrong[0]


def test_a_script_that_knows_its_snapshot_from_elsewhere_is_refused_or_right(tmp_path: Path) -> None:
    found = restarts(tmp_path, plain(SCRIPTS["snapshot"]).replace("os.path.exists(path)", "path in os.listdir()"), every_line=False)
    assert found.undisturbed.ending == "through" and not found.wrong, found.wrong[:1]
    assert found.refusals and all("snapshot.pt was written later than this worker's record" in why for why in found.refusals)


def test_a_file_that_was_there_and_is_written_over_is_refused_or_right(tmp_path: Path) -> None:
    """A run that goes on from a file by an argument of its own, and writes that file: the first content is gone."""
    model = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))"
    first = f"torch.save({{'MODEL_STATE': {model}.state_dict(), 'EPOCHS_RUN': 2}}, 'snapshot.pt')"
    begin = f"import os\nimport torch\nif not os.path.exists('begun'):\n    open('begun', 'w').close()\n    {first}\n"
    source = begin + plain(SCRIPTS["snapshot"]).replace("max_epochs)", "8)")
    found = restarts(tmp_path, source, every_line=False)
    assert found.undisturbed.ending == "through" and not found.wrong, found.wrong[:1]
    own = "Write `for epoch in ps.epochs(n)`, which gives what is left of it wherever the script begins"
    assert any(own in why for why in found.refusals), found.refusals
