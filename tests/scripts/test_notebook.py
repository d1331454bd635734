"""A function that is written in a cell of a notebook trains what it trains under torch.distributed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.scripts.cells import WORKERS
from tests.support import warm

pytestmark = pytest.mark.timeout(600)
NOTEBOOK = Path(__file__).parent / "notebook.ipynb"


@pytest.mark.rotating
def test_a_notebook_computes_what_ddp_computes(tmp_path: Path) -> None:
    code, told = warm.call(tmp_path, "tests.scripts.notebook", [str(NOTEBOOK)], {"KUBECONFIG": str(tmp_path / "none")}, 300)
    assert code == 0 and "Complete 12" in told, told[-3000:]
    (final,) = tmp_path.glob(".psjob/*/final.safetensors")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    (tmp_path / "script.py").write_text("".join(cells[1]["source"]) + "\n\ntrain(lr=0.02)\n")
    code, told = warm.call(tmp_path, "tests.scripts.ddp", [str(WORKERS), "weights", str(tmp_path / "script.py")], None, 120)
    assert code == 0, told[-3000:]
    wanted = load_file(tmp_path / "weights")
    for key, value in load_file(final).items():
        assert torch.allclose(value, wanted[f"0.{key}"] if key not in wanted else wanted[key], rtol=1e-5, atol=1e-5), key
