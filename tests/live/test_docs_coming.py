"""The pages on coming from DDP, Horovod and a TFJob: what they show after is what `psjob convert` makes of what they show before.

Their commands run in test_docs_commands.py: the DDP script under torchrun, and each script after it in a job.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
import yaml

from psjob_client.convert.draft import Wishes
from psjob_client.convert.script.port import ported
from psjob_client.convert.write import from_text
from psjob_client.problems import BadInput
from tests.docs.pages import BLOCK, DOCS
from tests.unit.convert_sources import DDP

COMING = DOCS / "coming"


def blocks(page: str, kind: str) -> list[str]:
    return [text for of, text in BLOCK.findall((COMING / page).read_text()) if of == kind]


@pytest.mark.parametrize("page", ["ddp.md", "horovod.md"])
def test_the_script_after_is_made_of_the_one_before(page: str) -> None:
    before, after = blocks(page, "python")
    made = ported(before)
    assert made.after == after and made.is_whole
    assert ported(after).after == after


def test_the_manifest_after_is_made_of_the_one_before() -> None:
    before, after = blocks("tfjob.md", "yaml")
    ((made,), aside) = from_text(before, Wishes(image="registry.example.com/sums:1"))
    assert made.manifest == yaml.safe_load(after) and aside == []


def test_the_script_of_tensorflow_is_refused_and_the_one_after_is_left_as_it_is() -> None:
    before, after = blocks("tfjob.md", "python")
    assert any(isinstance(node, ast.Attribute) and node.attr == "ParameterServerStrategy" for node in ast.walk(ast.parse(before)))
    with pytest.raises(BadInput, match="trains with TensorFlow"):
        ported(before)
    assert ported(after).after == after and ported(after).is_whole


def test_what_the_pages_leave_to_the_user_is_told_by_convert() -> None:
    """The left column of the tables: each is a line that convert does not change and names."""
    lines = {
        "dist.all_reduce(loss)": "dist.all_reduce", "with model.no_sync(): pass": "model.no_sync", "model.to(dist.get_rank())": "GPU",
        "hvd.allreduce(loss)": "hvd.allreduce", "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)": "SyncBatchNorm",
        "hvd.elastic.run(f)": "hvd.elastic.run", "s = DistributedSampler(d) if x else None": "shuffle=True",
    }  # fmt: skip
    before = blocks("ddp.md", "python")[0].replace("import torch\n", "import torch\nimport horovod.torch as hvd\n", 1)
    for line, says in lines.items():
        made = ported(before.replace("dist.destroy", f"{line}\ndist.destroy"))
        assert [says in remark.sentence for remark in made.remarks if remark.by_hand] == [True], (line, made.remarks)


def test_the_diff_is_one_that_git_applies(tmp_path: Path) -> None:
    for text in (DDP, DDP.rstrip("\n"), DDP.replace("\n", "\r\n")):
        script, made = tmp_path / "train.py", ported(text)
        script.write_bytes(text.encode())
        subprocess.run(["git", "apply", "-p0"], cwd=tmp_path, input=made.diff("train.py").encode(), check=True, timeout=60)
        assert script.read_bytes().decode() == made.after
