"""docs/python.md, run as one script in an empty folder: what a reader types, in the order of the page; and the code of docs/data.md."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests import warm
from tests.docs.pages import PAGE, blocks


@pytest.mark.rotating
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    code = "\n".join(blocks())
    assert code.count("client.train(train") == 3 and "Client.kube" not in code
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    ended, told = warm.call(tmp_path, "page", [], {"PYTHONPATH": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")}, seconds=300)
    lines = told.splitlines()
    assert ended == 0, told[-3000:]
    assert lines[0].startswith("Complete 60 ") and "kind: PSTrainingJob" in lines
    assert 'there is no job "trian"' in told and "did you mean train" in told
    assert (tmp_path / "job.yaml").read_text().startswith("apiVersion: psjob.dev/v1alpha1\n")
    assert "          - |\n" in (tmp_path / "job.yaml").read_text(), "the script is readable in Git"


def test_the_code_of_the_page_of_data_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (PAGE.parent / "data.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    space = runpy.run_path(str(tmp_path / "page.py"))
    assert capsys.readouterr().out == "16\n" and space["last"] is True and space["epoch"] == 2
