"""A process group that was left in a script of a job: the job's last words name the line and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm


@pytest.mark.rotating
def test_a_left_in_process_group_is_the_failure_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nimport psjob as ps\n\ntorch.distributed.init_process_group('gloo')\nmodel = torch.nn.Linear(1, 1)\n"
        "model, opt = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    code, told = warm.run(tmp_path, ["run", "train.py", "--workers", "1", "--no-progress"])
    assert code == 1 and "environment variable RANK expected" in told
    assert "train.py:4 needs a process group of torch.distributed, and psjob starts none" in told.splitlines()[-1]
    # The remedy works.
    code, shown = warm.run(tmp_path, ["convert", "--write", "train.py"])
    assert code == 0, shown
    assert "init_process_group" not in (tmp_path / "train.py").read_text()
