"""The scripts of `idioms/`: cells in the percent format of VS Code and Jupytext, each of which is a script with the cell above it.

A file of `idioms/` is about one subject. What stands before its first `# %%` begins each of its scripts: imports, data, a model, an
optimizer. A cell is headed `# %% NAME: what people do`, and may have lines `# arguments: WORD …`, a case for each word, and
`# training: FIELD=VALUE`, for the manifest. `# %% NAME, OTHER [FIELD=VALUE]: …` is the same text twice, once with that field.

A script that differs from another one in an idiom says only that. The line `# and the loop` stands for `LOOP`.
`# and the loop over EXPRESSION` is one over another loader. `# before each step:` and the other comments of `LOOP` head the code that is
put there. The line `# as NAME` stands for the text of a cell above. Lines ``# with `NEW` for `OLD` `` after one of the two change its text.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WORKERS, SHARDS = 2, 2
HERE = Path(__file__).parent / "idioms"
HEAD = re.compile(r"^# %% (?P<names>[^:\n]+): (?P<sentence>.+)\n", re.MULTILINE)
NAME = re.compile(r"(\w+)(?: \[(\w+)=(\w+)\])?")
LOADER = "ps.shard(DataLoader(data, batch_size=4, shuffle=True))"
LOOP = f"""\
for epoch in range(2):
    # before each epoch:
    for inputs, targets in {LOADER}:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        # before each step:
        optimizer.step()
        # after each step:
    # after each epoch:
# at the end:
"""
PLACE = re.compile(r"^( *)# ((?:before|after) each \w+|at the end):\n", re.MULTILINE)
CHANGE = re.compile(r"^# with `(.+)` for `(.+)`\n", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """What its cell says that people do, what runs, the cases of its argument, and what the manifest's `training` has besides."""

    sentence: str
    text: str
    arguments: tuple[str, ...]
    training: dict[str, str]


def changed(text: str, changes: str) -> str:
    """A text with the changes that lines of `changes` say."""
    for new, old in CHANGE.findall(changes):
        assert old in text, f"{old} is not in {text}"
        text = text.replace(old, new)
    return text


def loop_of(words: str) -> str:
    """The loop with what `words` put into it: changes, and code under the comments that name its places."""
    first, *parts = PLACE.split(words)
    code = dict(zip(parts[1::3], parts[2::3], strict=True))
    assert code.keys() <= {when for _, when in PLACE.findall(LOOP)} and not CHANGE.sub("", first).strip(), words
    return PLACE.sub(lambda place: textwrap.indent(code.get(place[2], ""), place[1]), changed(LOOP, first))


def body_of(cell: str, above: Mapping[str, str]) -> str:
    """The text of a cell, with the loop or a cell above that it names."""
    cell = re.sub(r"^# as (\w+)\n((?:# with .+\n)*)", lambda said: changed(above[said[1]], said[2]), cell, flags=re.MULTILINE)
    before, asked, after = cell.partition("# and the loop")
    if not asked:
        return before
    over, words = re.match(r"(?: over (.+))?\n", after), after.partition("\n")[2]
    assert over is not None, cell
    return before + loop_of(f"# with `{over[1] or LOADER}` for `{LOADER}`\n{words.rstrip()}\n")


def scripts_of(file: Path) -> dict[str, Script]:
    """By name."""
    first, *cells = re.split(r"^(?=# %% )", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, Script] = {}
    bodies: dict[str, str] = {}
    for cell in cells:
        head = HEAD.match(cell)
        assert head is not None, cell
        body = body_of(cell[head.end() :], bodies)
        arguments = tuple(word for line in re.findall(r"^# arguments: (.+)$", body, re.MULTILINE) for word in line.split())
        training = dict(re.findall(r"^# training: (\w+)=(\w+)$", body, re.MULTILINE))
        for name, field, value in NAME.findall(head["names"]):
            bodies[name] = body
            found[name] = Script(head["sentence"], f"{first}\n{body}", arguments, training | ({field: value} if field else {}))
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
