"""Every fenced block of README and docs, and the commands in them."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hack.site.links import FENCE
from hack.site.stage import pages
from tests.docs import ROOT


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, of which kind it is, and its text."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        """`page:line`."""
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    begun: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and begun is None:
            begun, lines = (number, line.strip().lstrip("`~")), []
        elif mark and begun is not None:
            found.append(Block(page, *begun, textwrap.dedent("\n".join(lines)) + "\n"))
            begun = None
        else:
            lines.append(line)
    return found


TEXTS = pages(ROOT)
ALL = [block for page, text in TEXTS.items() for block in blocks(page, text)]


def of(*kinds: str) -> list[Any]:
    """The blocks of these kinds, as parameters of a test."""
    return [pytest.param(block, id=block.place) for block in ALL if block.kind in kinds]


def indented(page: str, text: str) -> Iterator[Block]:
    """Commands that a page shows by four spaces: runs of such lines below an empty line, outside fences."""
    fence = False
    lines: list[tuple[int, str]] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence ^= bool(FENCE.match(line))
        if not fence and line.startswith("    ") and re.match(r"[a-z./]", line[4:]):
            lines.append((number, line[4:]))
            continue
        if lines and before_is_empty(text, lines[0][0]):
            yield Block(page, lines[0][0], "sh", "\n".join(line for _, line in lines) + "\n")
        lines = []


def before_is_empty(text: str, number: int) -> bool:
    """The line above that one is empty."""
    return number == 1 or not text.splitlines()[number - 2].strip()


def python_blocks() -> dict[str, Block]:
    """The blocks of Python by `page#n`, n from 1 in each page."""
    found = {}
    for page, group in itertools.groupby((block for block in ALL if block.kind == "python"), key=lambda block: block.page):
        found |= {f"{page}#{number}": block for number, block in enumerate(group, 1)}
    return found


def around(spec: dict[str, Any]) -> dict[str, Any]:
    """A whole job around a part of its spec."""
    worker = {"name": "worker", "image": "example", "command": ["python", "train.py"]}
    replicas = {} if "stages" in spec else {"replicas": 8}
    workers = {**replicas, "template": {"spec": {"containers": [worker]}}, **spec.get("workers", {})}
    whole = {**spec, "shards": {"replicas": 2, **spec.get("shards", {})}, "workers": workers}
    for stage in whole.get("stages", []):
        if stage.get("template") == "…":  # a pod template that the page leaves out
            stage["template"] = workers["template"]
    return {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "part"}, "spec": whole}
