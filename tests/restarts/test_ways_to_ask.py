"""Loops that take their batches in other ways than one by one in a `for` loop: a killed worker and a killed shard change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.workloads.running import Ran, faults, finish, manifest, start
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.timeout(600)
SCRIPT = """import itertools
import queue
import threading

import torch

import psjob as ps

torch.manual_seed(0)
x = torch.randn(36, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
model, opt = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = ps.shard(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
noise = torch.nn.Dropout(0.1)
play = torch.Generator().manual_seed(ps.rank())


def step(batch, divide=1, last=True):
    inputs, targets = batch
    (torch.nn.functional.mse_loss(model(noise(inputs)), targets) / divide).backward()
    if last:
        opt.step()
        opt.zero_grad()


def infinite():
    while True:
        for batch in loader:
            yield batch


def main():
BODY


main()
"""
"""Nine batches for two workers: five steps a pass, and in the fifth worker 1 is given a batch again."""
LOOPS = {
    "the whole epoch in a list": """
for epoch in range(4):
    for batch in list(loader):
        step(batch)
""",
    "a list in ps.epochs": """
for epoch in ps.epochs(4):
    for batch in list(loader):
        step(batch)
""",
    "one list for all epochs": """
batches = list(loader)
for epoch in range(4):
    for batch in batches:
        step(batch)
""",
    "one batch ahead": """
for epoch in range(4):
    batches = iter(loader)
    following = next(batches, None)
    while following is not None:
        batch, following = following, next(batches, None)
        step(batch)
""",
    "a thread reads ahead": """
def read(into):
    for batch in loader:
        into.put(batch)
    into.put(None)

for epoch in ps.epochs(4):
    batches = queue.Queue(2)
    threading.Thread(target=read, args=(batches,), daemon=True).start()
    while (batch := batches.get()) is not None:
        step(batch)
""",
    "a new iterator each step": """
for _ in range(20):
    step(next(iter(loader)))
""",
    "next in a for loop": """
batches = iter(loader)
for _ in range(20):
    try:
        batch = next(batches)
    except StopIteration:
        batches = iter(loader)
        batch = next(batches)
    step(batch)
""",
    "next in a while loop": """
batches, number = iter(loader), 0
while number < 20:
    try:
        batch = next(batches)
    except StopIteration:
        batches = iter(loader)
        batch = next(batches)
    step(batch)
    number += 1
""",
    "an infinite generator": """
batches = infinite()
for _ in range(20):
    step(next(batches))
""",
    "zip with a range": """
for number, batch in zip(range(20), infinite()):
    step(batch)
""",
    "itertools.cycle": """
for batch in itertools.islice(itertools.cycle(loader), 20):
    step(batch)
""",
    "an epoch of ps.epochs for each step": """
batches = infinite()
for number in ps.epochs(20):
    step(next(batches))
""",
    "epochs of a number of steps": """
batches = infinite()
for epoch in ps.epochs(5):
    for _ in range(4):
        step(next(batches))
""",
    "accumulation in evaluation mode": """
model.eval()
for epoch in range(8):
    for number, batch in enumerate(loader):
        step(batch, 2, number % 2 == 1)
""",
    "evaluation mode": """
model.eval()
for epoch in range(4):
    for batch in loader:
        step(batch)
""",
    "two loaders side by side": """
other = ps.shard(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
for epoch in range(4):
    for batch, (inputs, _) in zip(loader, other):
        step((batch[0] + 0.1 * inputs[: len(batch[0])].mean(), batch[1]))
""",
    "a zip in each epoch, with validation": """
other = ps.shard(torch.utils.data.DataLoader(data, batch_size=8))
best = 0.0
for epoch in range(6):
    for batch, (inputs, _) in zip(loader, other):
        step((batch[0] + 0.1 * inputs[: len(batch[0])].mean(), batch[1]))
    model.eval()
    with torch.no_grad():
        best = max(best, sum(model(inputs).abs().mean().item() for inputs, _ in other))
    model.train()
    opt.param_groups[0]["lr"] = 0.05 / (1 + best)
""",
    "validation within a pass": """
other = ps.shard(torch.utils.data.DataLoader(data, batch_size=8))
number = 0
for epoch in range(4):
    for batch in loader:
        step(batch)
        number += 1
        if number % 3 == 0:
            model.eval()
            with torch.no_grad():
                loss = sum(model(inputs).abs().mean().item() for inputs, _ in other)
            model.train()
            opt.param_groups[0]["lr"] = 0.05 / (1 + loss)
""",
    "training within a pass": """
other = ps.shard(torch.utils.data.DataLoader(data, batch_size=12))
for epoch in range(2):
    for inputs, _ in other:
        for batch in loader:
            step((batch[0] + 0.1 * inputs[: len(batch[0])].mean(), batch[1]))
""",
    "a scheduler that nobody keeps": """
scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)
groups = [list(model.parameters()), [p for p in model.parameters() if p.dim() == 1]]
bias = [p for p in model.parameters() if p.dim() == 1]
for epoch in range(4):
    for batch in loader:
        step(batch)
        scheduler.step()
""",
    "schedulers in a class": """
class Schedules:
    def __init__(self):
        first, then = torch.optim.lr_scheduler.LinearLR(opt, 0.1), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        self.both = torch.optim.lr_scheduler.SequentialLR(opt, [first, then], [6])

schedules = Schedules()
for epoch in range(4):
    for batch in loader:
        step(batch)
        schedules.both.step()
""",
    "a look before the loop, and samples within it": """
looks = iter(loader)
shown, _ = next(looks)
other = ps.shard(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
samples = iter(other)
for epoch in ps.epochs(5):
    for batch in loader:
        step(batch)
    extra, _ = next(samples)
    opt.param_groups[0]["lr"] = 0.05 / (1 + (extra.abs().mean() + shown.abs().mean()).item())
""",
    "enumerate decides": """
for epoch in range(4):
    for number, batch in enumerate(loader, 1):
        if number % 2 == 0 or number == len(loader):
            step((batch[0] * number, batch[1]))
        else:
            step(batch)
""",
    "a policy plays": """
held = None
for number in range(20):
    with torch.no_grad():
        played = model(torch.randn(8, 4, generator=play)) > 0
    held = number
    inputs = torch.randn(8, 4, generator=play) + played
    step((inputs, inputs.sum(1, keepdim=True)))
""",
    "batches are left out": """
for epoch in range(5):
    for number, batch in enumerate(loader):
        if number == 1:
            continue
        step(batch)
""",
    "a pass in a function": """
def passes(epoch):
    for batch in loader:
        step(batch)

for epoch in range(4):
    passes(epoch)
""",
}
FAULTS = ("kill:worker-1@step=8", "kill:shard-0@step=13")


def run(folder: Path, name: str, *what: str) -> Ran:
    folder.mkdir()
    body = LOOPS[name].strip("\n").replace("\n", "\n    ")
    (folder / "train.py").write_text(SCRIPT.replace("BODY", f"    {body}"))
    job = manifest(folder, ["train.py"], training={"mode": "sync", "seed": 0}, checkpoint={"periodSeconds": 3600, "everySteps": 3})
    return finish(start(folder, job, *faults(*what)), folder)


IN_SLICES = ("one batch ahead", "a thread reads ahead", "an infinite generator", "zip with a range", "a policy plays")
"""Of the others, tests in memory restart the like from each record that they make (`tests/tensors/test_restarted_scripts.py`)."""


@pytest.mark.parametrize("name", [rotating(name) if name in IN_SLICES else soak(name) for name in LOOPS])
def test_two_kills_change_no_bit(tmp_path: Path, name: str) -> None:
    wanted = run(tmp_path / "undisturbed", name)
    assert wanted.code == 0, wanted.err[-3000:]
    found = run(tmp_path / "killed", name, *FAULTS)
    assert found.code == 0, found.err[-4000:]
    assert found.summary["steps"] == wanted.summary["steps"] and sum(found.summary["restarts"].values()) == 2
    there = found.weights()
    for key, value in wanted.weights().items():
        assert there[key].equal(value), f"{key}: {found.err[-3000:]}"
