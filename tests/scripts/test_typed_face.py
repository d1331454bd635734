"""What editors and type checkers see of psjob: mypy --strict and pyright over a user's script and a notebook's cells, and jedi.

pyright is basedpyright here: the same checker, which brings its node with it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

import psjob
from tests.docs.pages import blocks

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".mypy_cache" / "user"
MYPY = "[mypy]\nstrict = true\nuntyped_calls_exclude = torch\n"
PYRIGHT = {"typeCheckingMode": "strict", "reportUnknownMemberType": False, "include": ["*.py"]}
"""But for members: those of torch, such as Tensor.backward, are not whole."""
TYPOS = ("psjob.typo_name", "psjob.Client.local().typo_name", "psjob.integrations.typo_name", "from psjob import typo_name")
CELLS = """
from typing import assert_type as _is
from psjob_client.jobs.view import JobView as _View
_is(client, psjob.Client)
_is(job, psjob.Job)
_is(view, _View)
_is(view.progress.loss, float | None)
"""


def cells() -> str:
    """The code of the notebook, a cell after the other, and what is known of its variables then."""
    found = json.loads((HERE / "notebook.ipynb").read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in found if cell["cell_type"] == "code") + CELLS


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A user's folder."""
    (tmp_path / "script.py").write_text((HERE / "typed_script.py").read_text())
    (tmp_path / "notebook.py").write_text(cells())
    (tmp_path / "page.py").write_text("\n".join(blocks()))
    (tmp_path / "typos.py").write_text("import psjob\n\n" + "\n".join(TYPOS) + "\n")
    (tmp_path / "mypy.ini").write_text(MYPY)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    return tmp_path


def lines_of(told: str) -> dict[str, set[int]]:
    """Lines with an error, by file."""
    found: dict[str, set[int]] = {}
    for name, line in re.findall(r"(\w+)\.py:(\d+):.*?error", told):
        found.setdefault(name, set()).add(int(line))
    return found


WRONG = {"typos": set(range(3, 3 + len(TYPOS)))}


@pytest.mark.rotating
def test_mypy_sees_every_name_and_each_typo(written: Path) -> None:
    words = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(CACHE)]
    done = subprocess.run([*words, *(path.name for path in written.glob("*.py"))], cwd=written, capture_output=True, text=True)
    assert lines_of(done.stdout) == WRONG, done.stdout + done.stderr


@pytest.mark.rotating
def test_pyright_sees_every_name_and_each_typo(written: Path) -> None:
    words = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    done = subprocess.run(words, cwd=written, capture_output=True, text=True)
    assert lines_of(done.stdout) == WRONG, done.stdout + done.stderr


def test_an_editor_completes_every_name() -> None:
    found = {one.name for one in jedi.Script("import psjob\npsjob.").complete(2, 6)}
    assert set(psjob.__all__) <= found and "integrations" in found


@pytest.mark.parametrize(("before", "name", "says"), [
    ("psjob.Client.local()", "train", "Start a job that trains `what`."),
    ("psjob.Client.local().train('x.py')", "wait", "Wait for the job;"),
    ("psjob.Client.local().job('x')", "load_weights", "The weights of a job"),
    ("psjob.Client.local().train('x.py').wait()", "phase", ""),
    ("psjob", "epochs", ""),
])  # fmt: skip
def test_an_editor_follows_a_call_and_shows_its_promise(before: str, name: str, says: str) -> None:
    code = f"import psjob\n{before}.{name}"
    (found,) = jedi.Script(code).complete(2, len(before) + 1 + len(name))
    assert found.name == name and says in found.docstring()
