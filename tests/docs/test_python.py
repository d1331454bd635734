"""Every block of Python of README and docs runs: here with what tests/docs/around.toml puts around it, or in a test that runs its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs import ROOT
from tests.docs.finding import Block, python_blocks
from tests.docs.pages import PAGES
from tests.frameworks import IMPORTS, OFFLINE
from tests.support import warm

BLOCKS = python_blocks()
AROUND: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tests/docs/around.toml").read_text())
WHOLE = {
    "docs/contributing/add-a-mode.md": "tests/docs/test_contribute.py",
    "docs/contributing/add-a-rule.md": "tests/docs/test_contribute.py",
    "docs/tutorials/embeddings.md": "tests/live/test_docs_pages.py",
    "docs/tutorials/first-async.md": "tests/live/test_docs_pages.py",
    "docs/data.md": "tests/live/test_docs_pages.py",
    "docs/coming/ddp.md": "tests/live/test_docs_pages.py",
    "docs/coming/horovod.md": "tests/live/test_docs_pages.py",
    "docs/coming/tfjob.md": "tests/live/test_docs_pages.py",
    "docs/python.md": "tests/live/test_docs_pages.py",
    "docs/reference.md": "tests/live/test_docs_pages.py",
    "docs/scripts.md": "tests/scripts/test_idioms.py",
}
"""Pages whose Python a test of their own runs, all of it."""
FRAMEWORKS = ("docs/accelerate.md", "docs/lightning.md", "docs/transformers.md")


def test_every_block_is_run() -> None:
    elsewhere = {name for name, block in BLOCKS.items() if block.page in WHOLE}
    assert set(BLOCKS) - elsewhere == set(AROUND), "say in tests/docs/around.toml what stands around a block"
    for page, test in WHOLE.items():
        assert page.removeprefix("docs/") in PAGES or Path(page).name in (ROOT / test).read_text(), f"{test} reads {page} no more"


@pytest.mark.rotating
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", AROUND)
def test_a_block_runs(tmp_path: Path, name: str) -> None:
    around = AROUND[name]
    code, output = HOW[around["how"]](tmp_path, written(tmp_path, BLOCKS[name], around), around, name)
    assert code == 0 and "Traceback" not in output, output[-4000:]
    for line in around.get("says", []):
        assert line in output, output[-4000:]
    if "steps" in around:
        assert f"Complete: {around['steps']} steps" in output, output[-4000:]


def written(folder: Path, block: Block, around: dict[str, Any]) -> Path:
    """The script of a block."""
    text = block.text
    if "file" in around:
        (folder / around["file"]).write_text(text)
        text = ""
    script = folder / "train.py"
    script.write_text(around.get("before", "") + text + around.get("after", ""))
    return script


def in_a_job(folder: Path, script: Path, around: dict[str, Any], name: str) -> tuple[int, str]:
    """`psjob run`: one worker and one shard, or the stages that it asks for."""
    template = {"spec": {"containers": [{"name": "worker", "image": "none", "command": ["python", script.name]}]}}
    given = around.get("spec", {})
    replicas = {} if "stages" in given else {"replicas": 1}
    spec = {"shards": {"replicas": 1}, **given, "workers": {**replicas, "template": template, **given.get("workers", {})}}
    job = {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "page"}, "spec": spec}
    (folder / "job.yaml").write_text(json.dumps(job))
    framework = name.partition("#")[0] in FRAMEWORKS
    preloaded = IMPORTS if framework else warm.PRELOADED
    environment = {"CUDA_VISIBLE_DEVICES": "", **(OFFLINE if framework else {})}
    return warm.run(folder, ["run", "job.yaml", "--no-progress"], environment, preloaded=preloaded)


def alone(folder: Path, script: Path, around: dict[str, Any], name: str) -> tuple[int, str]:
    """As a script, in no job."""
    return warm.call(folder, script.stem, [], {"PYTHONPATH": str(folder), "KUBECONFIG": str(folder / "none")}, warm.SECONDS)


def under_torchrun(folder: Path, script: Path, around: dict[str, Any], name: str) -> tuple[int, str]:
    """Two processes that torchrun starts."""
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    words = [sys.executable, "-m", "torch.distributed.run", *options, script.name]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=warm.SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr


HOW = {"job": in_a_job, "alone": alone, "torchrun": under_torchrun}


def test_a_block_that_is_wrong_is_found(tmp_path: Path) -> None:
    wrong = Block("docs/x.md", 1, "python", "import psjob as ps\nps.atach(None)\n")
    code, output = alone(tmp_path, written(tmp_path, wrong, {}), {}, "docs/x.md#1")
    assert code != 0 and "no attribute 'atach'" in output
