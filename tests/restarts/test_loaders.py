"""Loaders as people have them, in a job: each sample is trained once, with a kill too; or one sentence says why not.

A model of one weight sums up what it is trained on, so that its weight says which samples steps were made of.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.workloads.running import Ran, faults, run_script
from tests.support.soaking import rotating

pytestmark = pytest.mark.timeout(240)
HEAD = """
import itertools, random, sys
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, Subset, TensorDataset
import psjob as ps

data = TensorDataset(torch.arange(48.0, dtype=torch.float64)[:, None])

class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)

class Squares(DataLoader):
    def __iter__(self):
        return ([x * x] for (x,) in super().__iter__())

class Joins(DataLoader):
    def _get_iterator(self):
        return map(lambda batch: {"x": data.tensors[0][batch[0].flatten().long()]}, super()._get_iterator())

class Epochs(DataLoader):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

class Reads(IterableDataset):
    def __init__(self, begin, step, draw=lambda: 0.0):
        self.begin, self.step, self.draw = begin, step, draw

    def __iter__(self):
        return ((torch.tensor([float(n)], dtype=torch.float64) + self.draw(),) for n in range(self.begin, 48, self.step))
"""
LOOP = """
model = torch.nn.Linear(1, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
model, opt = ps.attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
for epoch in ps.epochs(EPOCHS):
    for step, batch in enumerate(ps.shard(loader)):
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        print("SEEN", *(int(n) for n in x.flatten()), flush=True)
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()
        if step + 1 == STEPS:
            break
print("WEIGHT", model.weight.item(), flush=True)
"""
WHOLE = list(range(48))
RIGHT: dict[str, tuple[str, list[int] | None]] = {
    "an __iter__ of its own": ("loader = Squares(data, batch_size=4, sampler=DistributedSampler(data))", [n * n for n in WHOLE]),
    "a _get_iterator of its own": ("loader = Joins(data, batch_size=4, shuffle=True)", WHOLE),
    "an iterator that lives on": ("loader = Epochs(data, batch_size=4, shuffle=True)", WHOLE),
    "DistributedSampler(data)": ("loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))", WHOLE),
    "DistributedSampler in batches": (
        "loader = DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, seed=3), 4, drop_last=True))", WHOLE
    ),
    "DistributedSampler again and again": (
        "loader = DataLoader(data, batch_sampler=Repeated(BatchSampler(DistributedSampler(data), 4, False)))", WHOLE
    ),
    "ten thousand million samples": (
        "loader = DataLoader(data, 4, sampler=torch.utils.data.RandomSampler(data, replacement=True, num_samples=10**10))", None
    ),
    "noise of each worker's own": (
        "draw = np.random.default_rng()\n"
        "loader = DataLoader(data, 4, shuffle=True, collate_fn=lambda rows: [torch.stack([x + 0.1 * draw.random() for (x,) in rows])])",
        None,
    ),
}  # fmt: skip
"""By name: what makes the loader; and what the two workers see in an epoch, each once; None: it is drawn."""
TOLD: dict[str, tuple[str, int, str]] = {
    "batches of other sizes": ("loader = DataLoader(data, batch_size=4 + 4 * ps.rank())", 77, "batches of 8 samples, worker 0 of 4"),
    "sliced by hand": (
        "loader = DataLoader(TensorDataset(data.tensors[0][ps.rank()::2]), batch_size=4)",
        77,
        "24 samples of TensorDataset are not the same",
    ),
    "a Subset of the rank": ("loader = DataLoader(Subset(data, range(ps.rank(), 48, 2)), batch_size=4)", 77, "the 24 samples of Subset"),
    "a stream of the rank": ("loader = DataLoader(Reads(ps.rank(), 2), batch_size=4)", 77, "reads other samples from Reads"),
    "a stream without a seed": (
        "draw = np.random.default_rng()\nloader = DataLoader(Reads(0, 1, lambda: float(draw.random())), batch_size=4)",
        0,
        "draws without a seed",
    ),
    "an order of the rank's seed": (
        "torch.manual_seed(ps.rank())\nloader = DataLoader(data, batch_size=4, sampler=torch.randperm(48).tolist())",
        77,
        "draws another order of TensorDataset",
    ),
    "a sampler of its part": (
        "class Half(DistributedSampler):\n    def __iter__(self): return iter(range(self.rank, 48, 2))\n"
        "loader = DataLoader(data, batch_size=4, sampler=Half(data))",
        77,
        "Half gives each rank its part",
    ),
}
"""By name: what makes the loader, the exit code, and words of what is said."""
QUICK = {"an __iter__ of its own", "sliced by hand"}


def cells(names: dict[str, object]) -> list[object]:
    return [name if name in QUICK else rotating(name) for name in names]


def run(folder: Path, made: str, *words: str, steps: int = -1, epochs: int = 2, mode: str = "sync") -> Ran:
    source = HEAD + made + LOOP.replace("EPOCHS", str(epochs)).replace("STEPS", str(steps))
    return run_script(folder, source, *words, mode=mode, every=2)


@pytest.mark.parametrize("name", cells(RIGHT))  # type: ignore[arg-type]
def test_each_sample_is_trained_once_and_a_kill_changes_no_bit(tmp_path: Path, name: str) -> None:
    made, samples = RIGHT[name]
    calm = run(tmp_path / "calm", made, steps=6)
    assert calm.code == 0 and not calm.summary["restarts"], calm.err[-3000:]
    if samples is not None:
        seen = [int(n) for rank in range(2) for line in re.findall("SEEN (.*)", calm.log(f"job-worker-{rank}")) for n in line.split()]
        assert sorted(seen) == sorted(samples * 2)
    if "noise" in name:
        return
    struck = run(tmp_path / "struck", made, *faults("kill:shard-1@step=3", "kill:worker-1@step=8"), steps=6)
    assert struck.code == 0 and struck.sha == calm.sha, struck.err[-3000:]


@pytest.mark.parametrize("name", cells(TOLD))  # type: ignore[arg-type]
def test_what_workers_do_not_share_is_told_in_one_sentence(tmp_path: Path, name: str) -> None:
    made, code, words = TOLD[name]
    ran = run(tmp_path, made, epochs=40)
    assert ran.code in {0: {0}, 77: {1, 77}}[code], (ran.code, ran.err[-3000:])
    assert re.search(words, ran.err + ran.out), ran.err[-3000:]
    assert "Traceback" not in ran.err + ran.log("job-worker")


@pytest.mark.rotating
@pytest.mark.parametrize("mode", ["async", "local"])
def test_in_every_mode(tmp_path: Path, mode: str) -> None:
    ran = run(tmp_path / "told", TOLD["batches of other sizes"][0], epochs=40, mode=mode)
    assert ran.code and "batches of 8 samples, worker 0 of 4" in ran.err + ran.out
    ran = run(tmp_path / "right", RIGHT["an __iter__ of its own"][0], mode=mode)
    assert ran.code == 0, ran.err[-3000:]
