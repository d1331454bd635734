"""Pages that other tests read too: what they show, quote and tell to type."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (
    "choose.md", "convert.md", "coming/ddp.md", "coming/horovod.md", "coming/tfjob.md", "doctor.md", "tutorials/first-async.md",
    "tutorials/embeddings.md",
)  # fmt: skip
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = DOCS / "python.md"
ON_A_CLUSTER = "<!-- test: on a cluster"
"""Above a block that tests/integration/test_operator_client.py runs."""


def blocks() -> list[str]:
    """The Python on the page, but for what is run on a cluster."""
    found = re.findall(r"([^\n]*)\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [code for before, code in found if ON_A_CLUSTER not in before]


TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^> (.+)$", TROUBLESHOOTING, re.MULTILINE)
GAP = "…"


@functools.cache
def said() -> frozenset[str]:
    """Every text of the sources, with a gap where something is filled in."""
    found = set()
    for folder in ("runtime/src", "client/src", "operator/src"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    whole = "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
                    found.add(re.sub(f"{GAP}+", GAP, whole))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(re.sub(r"\{\w*\}", GAP, node.value))
    return frozenset(found)


ROWS = [
    line
    for line in (ROOT / "docs/contributing/founding.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| ---")
]
CELLS = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in ROWS]
COMMANDS = sorted(
    {(words, cells[-1]) for cells in CELLS for words in re.findall(r"`((?:psjob|python -m bench|pytest) [^`]+)`", " ".join(cells[1:]))}
)
