"""The pages for people who change psjob: the tutorials are carried out, the walk names functions that are there, the map is readable.

Each tutorial's blocks are applied to a copy of the repository, in which its commands then run: `add-a-rule.md`, `add-a-mode.md` and
`add-a-policy.md`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from graphlib import CycleError
from pathlib import Path
from typing import Any

import pytest

from hack import housemap, runpicture
from tests.docs import ROOT
from tests.docs.finding import blocks

PAGES = ROOT / "docs/contributing"
COPIED = ("operator", "runtime", "client", "tests", "hack", "docs", "crds", "charts", "examples")
NAMED = re.compile(r"^(?:# (\S+\.py)|<!-- (\S+\.md) -->)\n")
"""The first line of a block that is a whole new file."""
SOURCES = ("operator/src/", "runtime/src/", "client/src/")
GENERATED = [
    "charts/psjob/templates/crds/psjob.dev_pstrainingjobs.yaml", "crds/psjob.dev_pstrainingjobs.yaml", "docs/manifest/training.md",
    "operator/src/psjob_operator/contract.py",
]  # fmt: skip


class Copy:
    """A copy of the repository, to which a tutorial is applied."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "psjob"
        for name in COPIED:
            # With what Python has compiled: it fits by the time of its source, and what a block changes is compiled anew.
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("*.egg-info", ".psjob"))
        for name in ("pyproject.toml", "LICENSE", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
            shutil.copy(ROOT / name, self.root / name)

    def follow(self, page: str) -> tuple[list[str], list[str]]:
        """Do what the page says, in its order: the files that its blocks change, and what its commands wrote."""
        changed: list[str] = []
        said: list[str] = []
        for block in blocks(page, (PAGES / page).read_text()):
            if block.kind == "diff":
                self._run("git", "apply", "--whitespace=nowarn", "-", stdin=block.text)
                changed += re.findall(r"^\+\+\+ b/(\S+)$", block.text, re.MULTILINE)
            elif block.kind == "sh":
                said += [self._command(shlex.split(line)) for line in block.text.splitlines()]
            else:
                begins = NAMED.match(block.text)
                assert begins, f"{page}:{block.line}: a block begins with the path of its file"
                path = self.root / (begins[1] or begins[2])
                assert not path.exists(), f"{path} is there; show how it changes"
                path.write_text(block.text[begins.end() :])
                changed.append(str(path.relative_to(self.root)))
        return changed, said

    def _command(self, words: list[str]) -> str:
        program, *rest = words
        match program:
            case "python":
                return self._run(sys.executable, *rest)
            case "psjob":
                return self._run(sys.executable, "-m", "psjob_client.cli.main", *rest, "--summary", "summary.json")
        raise AssertionError(f"a tutorial runs python and psjob, not {program}")

    def _run(self, *words: str, stdin: str | None = None) -> str:
        parts = [self.root, *(self.root / source for source in SOURCES)]
        inside = {"PYTHONPATH": os.pathsep.join(map(str, parts)), "GIT_CEILING_DIRECTORIES": str(self.root.parent), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=self.root, input=stdin, capture_output=True, text=True, timeout=300, env={**os.environ, **inside})
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def summary(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.root / "summary.json").read_text())
        return told


def sources(changed: list[str]) -> list[str]:
    """Those that a person wrote for it to work; a test, a page, the navigation and the example it is tried on stand beside them."""
    for path in changed:
        assert path.startswith((*SOURCES, "tests/", "docs/", "examples/")) or path == "hack/site/mkdocs.yml", path
        assert path not in GENERATED, f"{path} is generated"
    return sorted({path for path in changed if path.startswith(SOURCES)})


def written(said: list[str]) -> list[str]:
    return sorted(line.removeprefix("written: ") for text in said for line in text.splitlines() if line.startswith("written: "))


def passed(said: list[str]) -> int:
    return sum(int(count) for text in said for count in re.findall(r"^(\d+) passed", text, re.MULTILINE))


def loss(said: list[str]) -> float:
    return float(re.findall(r"^loss (\S+)$", said[-1], re.MULTILINE)[-1])


@pytest.mark.rotating
@pytest.mark.timeout(600)
def test_a_rule_is_three_files_and_trains(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    changed, said = copy.follow("add-a-rule.md")
    assert len(sources(changed)) <= 3 and written(said) == GENERATED
    assert passed(said) >= 2
    told = copy.summary()
    assert (told["result"], told["applied"]) == ("Complete", 400) and loss(said) < 0.1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_mode_is_four_files_and_trains(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    changed, said = copy.follow("add-a-mode.md")
    assert len(sources(changed)) <= 4 and written(said) == GENERATED
    assert passed(said) > 50
    told = copy.summary()
    assert (told["result"], told["applied"], told["dropped"]) == ("Complete", 800, 0) and loss(said) < 0.1
    assert 400 <= told["steps"] < 500, "an update is of two pushes, but for the last ones, when workers have left"


@pytest.mark.rotating
@pytest.mark.timeout(600)
def test_a_policy_is_three_files_and_decides(tmp_path: Path) -> None:
    changed, said = Copy(tmp_path).follow("add-a-policy.md")
    assert len(sources(changed)) <= 3 and written(said) == []
    assert passed(said) == 13, "the order has a row more"


FUNCTION = re.compile(r"\[`([\w.]+)`\]\(\.\./\.\./([\w/.-]+\.py)\)")


def test_the_walk_names_functions_that_are_there() -> None:
    found = FUNCTION.findall((PAGES / "walk.md").read_text())
    assert len(found) >= 30
    assert [f"{name} is not in {path}" for name, path in found if not _defines(ast.parse((ROOT / path).read_text()), name.split("."))] == []


def _defines(tree: ast.Module | ast.ClassDef, parts: list[str]) -> bool:
    for node in tree.body:
        names = [target.id for target in getattr(node, "targets", [getattr(node, "target", None)]) if isinstance(target, ast.Name)]
        if getattr(node, "name", None) == parts[0] or parts[0] in names:
            return len(parts) == 1 or (isinstance(node, ast.ClassDef) and _defines(node, parts[1:]))
    return False


def test_the_map_has_a_row_for_each_package_above_what_it_imports() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \| (yes)? ?\|$", housemap.page(), re.MULTILINE)
    names = [name for name, _, _ in rows]
    packages = {
        f"{name}.{path.name}" for source, name in (("client", "psjob_client"), ("operator", "psjob_operator"), ("runtime", "psjob"))
        for path in (ROOT / source / "src" / name).iterdir() if (path / "__init__.py").exists()
    }  # fmt: skip
    assert packages <= set(names) and len(names) == len(set(names))
    assert {"psjob_operator.plan", "psjob.modes", "psjob.rules", "psjob.protocol"} <= {name for name, _, pure in rows if pure}
    for place, (name, imported, _) in enumerate(rows):
        assert not set(re.findall(r"`([\w.]+)`", imported)) & set(names[:place]), name


def test_the_picture_of_a_run_shows_its_faults() -> None:
    history = [
        {"time": 10.0, "step": 0, "metrics": {}, "passed": []},
        {"time": 12.0, "step": 900, "metrics": {"test_accuracy": 0.5}, "passed": [[50, 11.0], [900, 12.0]]},
        {"time": 14.0, "step": 1300, "metrics": {"test_accuracy": 0.5}, "passed": []},
        {"time": 20.0, "step": 2000, "metrics": {"test_accuracy": 0.9}, "passed": [[2000, 20.0]]},
    ]
    text = runpicture.picture(history, {"restarts": {"Signal": 1}, "steps": 2000, "updates_lost": 0})
    assert "Restarts: 1. Steps made: 2000." in text and text.count('class="kill"') == 2
    assert text.index("a process of shard 0 crashes") < text.index("shard 1 is killed")
    summary = {"restarts": {}, "steps": 1300, "updates_lost": 0}
    assert [runpicture.picture(history[:end], summary).count('class="kill"') for end in (2, 3)] == [0, 1]


def test_the_map_keeps_what_does_not_follow_and_names_a_circle() -> None:
    assert housemap.needed({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
    with pytest.raises(CycleError, match=r"'a', 'b'|'b', 'a'"):
        housemap.table({"a": {"b"}, "b": {"a"}}, set())


def test_every_record_has_its_parts_and_stands_in_the_index() -> None:
    index = (ROOT / "docs/design/index.md").read_text()
    records = sorted((ROOT / "docs/design").glob("[0-9]*.md"))
    assert [path.name for path in records if f"]({path.name})" not in index] == []
    parts = ("## Context", "## Decision", "## Consequences", "## Considered")
    for path in (path for path in records if int(path.name[:4]) > 7):
        text = path.read_text()
        assert len(text.splitlines()) <= 60 and all(part in text for part in parts), path.name
