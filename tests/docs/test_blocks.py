"""Every fenced block of README and docs has a kind that a test reads: manifests by the models of the API, JSON by its reader.

Python is run by `test_python.py`, commands are read by `test_shell.py`, and output is compared by `test_output.py`.

- The README's change of a DDP script: both sides train, and the plain one of a single process.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from psjob_operator.api.load import load_job
from tests.docs import ROOT
from tests.docs.finding import ALL, Block, around, of

READ = {
    "docs/topology.md": "tests/unit/test_topology_links.py",
    "docs/stages.md": "tests/unit/test_stages_solvers.py",
    "docs/contributing/add-a-rule.md": "tests/docs/test_contribute.py",
    "docs/contributing/add-a-mode.md": "tests/docs/test_contribute.py",
}
"""The test that reads the files of a page. It names the page."""


def test_every_block_has_a_kind_that_is_checked() -> None:
    assert len(ALL) > 100
    known = ("", "sh", "python", "pycon", "yaml", "json", "text", "console", "diff", "markdown")
    assert [f"{block.place} {block.kind!r}" for block in ALL if block.kind not in known] == []


@pytest.mark.parametrize(("page", "test"), READ.items())
def test_the_test_of_a_page_names_it(page: str, test: str) -> None:
    source = (ROOT / test).read_text()
    assert Path(page).name in source, f"{test} reads {page} no more"
    assert any(block.page == page for block in ALL)


def test_python_compiles() -> None:
    """Tests that run the blocks rotate."""
    wrong = []
    for block in (block for block in ALL if block.kind == "python"):
        text = block.text
        if block.page == "docs/reference.md" and re.match(r"[\w.]+\(", text):  # a signature, generated of the function
            named = re.sub(r"^[\w.]+", "named", text.strip())
            text = f"def {named}: ..."
        try:
            ast.parse(text)
        except SyntaxError as error:
            wrong.append(f"{block.place}: {error}")
    assert wrong == []


@pytest.mark.parametrize("block", of("json"))
def test_json_is_read(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_a_manifest_or_a_part_of_one(block: Block) -> None:
    for document in yaml.safe_load_all(block.text):
        assert isinstance(document, dict) and document
        if document.get("kind") == "PSTrainingJob":
            problems = load_job(yaml.safe_dump(document))[1]
            assert bool(problems) == block.text.startswith("# wrong.yaml\n"), problems
        elif set(document) == {"spec"}:
            assert load_job(yaml.safe_dump(around(document["spec"])))[1] == []


def test_a_part_that_the_models_refuse_is_found() -> None:
    assert load_job(yaml.safe_dump(around({"training": {"mode": "asnyc"}})))[1]


AROUND = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
model, loss_fn = torch.nn.Linear(4, 1), torch.nn.functional.mse_loss
"""
ENV = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}


def side(without: str) -> str:
    """The script before (`without` is "+") or after ("-") the change."""
    (shown,) = (block.text for block in ALL if block.page == "README.md" and block.kind == "diff")
    lines = shown.splitlines()
    return "\n".join(line[1:] for line in lines if not line.startswith(without)) + "\n"


@pytest.mark.rotating
@pytest.mark.parametrize("without", ["+", "-"], ids=["before", "after"])
def test_the_change_of_a_script(tmp_path: Path, without: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{AROUND}{side(without)}print('learned', loss.item() < 0.05)\n")
    done = subprocess.run([sys.executable, str(script)], env=ENV, capture_output=True, text=True, timeout=100)
    assert done.stdout == "learned True\n", done.stderr[-2000:]
