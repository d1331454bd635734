"""The scripts of `idioms/`: cells in the percent format of VS Code and Jupytext, each of which is a script with the cell above it.

A file of `idioms/` is about one subject. What stands before its first `# %%` begins each of its scripts: imports, data, a model, an
optimizer. A cell is headed `# %% NAME: what people do`, and may have lines `# arguments: WORD …`, a case for each word, and
`# training: FIELD=VALUE`, for the manifest. `# %% NAME, OTHER [FIELD=VALUE]: …` is the same text twice, once with that field. The line
`# and the loop` stands for the file's last cell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WORKERS, SHARDS = 2, 2
HERE = Path(__file__).parent / "idioms"
HEAD = re.compile(r"^# %% (?P<names>[^:\n]+): (?P<sentence>.+)\n", re.MULTILINE)
NAME = re.compile(r"(\w+)(?: \[(\w+)=(\w+)\])?")


@dataclass(frozen=True)
class Script:
    """What runs, the cases that its argument makes, and what the manifest's `training` has besides."""

    text: str
    arguments: tuple[str, ...]
    training: dict[str, str]


def scripts_of(file: Path) -> dict[str, Script]:
    """By name."""
    text, _, loop = file.read_text(encoding="utf-8").partition("# %% loop\n")
    first, *cells = re.split(r"^(?=# %% )", text, flags=re.MULTILINE)
    found = {}
    for cell in cells:
        head = HEAD.match(cell)
        assert head is not None, cell
        body = cell[head.end() :].replace("# and the loop\n", loop)
        arguments = tuple(word for line in re.findall(r"^# arguments: (.+)$", body, re.MULTILINE) for word in line.split())
        training = dict(re.findall(r"^# training: (\w+)=(\w+)$", body, re.MULTILINE))
        for name, field, value in NAME.findall(head["names"]):
            found[name] = Script(f"{first}\n{body}", arguments, training | ({field: value} if field else {}))
    return found


def scripts_in(folder: Path) -> dict[str, Script]:
    """Of all files, by name."""
    return {name: script for file in sorted(folder.glob("*.py")) for name, script in scripts_of(file).items()}


SCRIPTS = scripts_in(HERE)


def command_of(folder: Path, case: str, scripts: Mapping[str, Script] = SCRIPTS) -> list[str]:
    """The script of a case, written into `folder`, and its argument."""
    name, *words = case.split()
    path = folder / f"{name}.py"
    path.write_text(scripts[name].text, encoding="utf-8")
    return [str(path), *words]


def manifest(folder: Path, command: list[str], training: dict[str, str] | None = None) -> Path:
    """A job whose workers run `python COMMAND`."""
    containers = [{"name": "worker", "image": "none", "command": ["python", *command]}]
    spec = {
        "training": {"mode": "sync", "seed": 0, **(training or {})},
        "shards": {"replicas": SHARDS},
        "workers": {"replicas": WORKERS, "template": {"spec": {"containers": containers}}},
        "checkpoint": {"periodSeconds": 3600, "everySteps": 3},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps({"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "job"}, "spec": spec}))
    return path
