"""A shipped function or file runs in a process of its own, with its arguments and packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from psjob_client.local.manifest import worker_commands
from psjob_client.sdk import manifest
from psjob_client.sdk.manifest import script_of


def plain(a: int, b: str = "x") -> None:
    print(json.dumps([a, b, os.path.basename("/y/z"), Path("p").name]))


def nested() -> None:
    def inner(value: int) -> int:
        return value + len([one + 1 for one in range(value)])

    class Own:
        pass

    print(inner(2), Own.__name__, "$(HOME) $$ $HOME", __name__)


def ran(script: str, folder: Path) -> str:
    (folder / "alone.py").write_text(script)
    done = subprocess.run([sys.executable, "-I", "alone.py"], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_function_runs_alone_with_its_modules_and_arguments(tmp_path: Path) -> None:
    script = script_of(plain, {"a": 5, "b": 'it\'s "q"\n'})
    assert "import json\n" in script and "from pathlib import Path\n" in script
    assert json.loads(ran(script, tmp_path)) == [5, 'it\'s "q"\n', "z", "p"]
    assert ran(script_of(nested), tmp_path) == "4 Own $(HOME) $$ $HOME __main__"


def test_the_manifest_runs_the_text_as_a_file_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import sys, helper\nprint(helper.ONE, sys.argv[1:], __file__.endswith('.py'), '$(HOME)', '$$', sys.orig_argv[1:] == [__file__])\n"
    )
    (tmp_path / "helper.py").write_text("ONE = 1\n")
    made = manifest.build(file, packages=["pytest>=1"], env={"N": 1})
    command = worker_commands(manifest.job_of(made), tmp_path)[0]
    done = subprocess.run(
        command.argv, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **command.env, "TMPDIR": str(tmp_path)}
    )
    assert done.stdout == "1 [] True $(HOME) $$ True\n", done.stderr
    assert len(list(tmp_path.glob("psjob-scripts-*/train-*.py"))) == 1


def test_what_pip_cannot_install_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    command = worker_commands(manifest.job_of(manifest.build(tmp_path / "train.py", packages=["pytest<1"])), tmp_path)[0]
    env = {**os.environ, "PIP_NO_INDEX": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command.argv, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith("packages: pip could not install pytest<1")
