"""A whole job whose workers come apart: what its script hears, and what is left in status, summary and exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.soaking import rotating

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
