"""What several processes per worker do not go with is refused with a sentence that names it."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

from psjob.api.attachable import check_processes
from psjob.api.rulechoice import LrScaling
from psjob.process.config import CheckpointConfig, Config
from psjob.process.errors import Refused

JOB = Config("job", "run", "0", "sync", 0, None, 3, (), CheckpointConfig(1.0, None, 2, True, None), "AllWorkers", 10.0, 10.0, processes=2)


@pytest.mark.parametrize(
    ("job", "given", "says"),
    [
        (JOB, (True, False, 0), "overlap=True"),
        (replace(JOB, update_rule="dana-slim"), (False, True, 0), "training.updateRule dana-slim"),
        (JOB, (False, False, 1), "ps.Embedding and ps.Table"),
        (replace(JOB, mode="local"), (False, False, 0), "training.mode local"),
    ],
)
def test_what_needs_one_process_is_refused(job: Config, given: tuple[bool, bool, int], says: str) -> None:
    with pytest.raises(Refused) as refused:
        check_processes(job, *given)
    assert says in str(refused.value) and "spec.workers.processes is 2; " in str(refused.value)
    check_processes(replace(job, processes=1), *given)


def test_libraries_that_would_make_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accelerate", "lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    check_processes(JOB, False, False, 0)
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    with pytest.raises(Refused, match="Accelerate does not go with several processes per worker yet"):
        check_processes(JOB, False, False, 0)


def test_the_rate_is_scaled_by_all_processes() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    assert LrScaling.of(replace(JOB, lr_scaling="linear"), optimizer).factor(0) == 6.0
    assert LrScaling.of(replace(JOB, lr_scaling="linear", processes=1), optimizer).factor(0) == 3.0
