"""The pages of the site, as the generator reads them: those of the repository at their own paths, so that links hold in both."""

from __future__ import annotations

import re
import shutil
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from posixpath import dirname, join, normpath

from hack.site.links import FENCE, links

HERE = Path(__file__).resolve().parent
PAGES = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/*/README.md", "charts/*/README.md", "hack/cluster/README.md",
)  # fmt: skip
HOME = "README.md"
"""The first page of the site: it has the whole width, as its tabs lead to all others."""
BLOCK = re.compile(r"^([-*] |\d+\. |\|)")


def pages(root: Path) -> dict[str, str]:
    """The text of each page by its path below `root`."""
    found = sorted(path for pattern in PAGES for path in root.glob(pattern))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in found}


def stage(root: Path, folder: Path) -> None:
    """Write the pages, and the files that they link to, below `folder`."""
    texts = pages(root)
    boosts = tomllib.loads((HERE / "boosts.toml").read_text())
    for path, text in texts.items():
        boost = next((factor for pattern, factor in boosts.items() if fnmatchcase(path, pattern)), 1)
        width = "hide: [navigation, toc]\n" if path == HOME else ""
        _write(folder / path, f"---\nsearch: {{boost: {boost}}}\n{width}---\n{prepared(path, text, set(texts))}")
        for link in links(text):
            target = normpath(join(dirname(path), link.target.partition("#")[0]))
            if not link.foreign and target not in texts and (root / target).is_file():
                (folder / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / target, folder / target)


def prepared(path: str, text: str, known: set[str]) -> str:
    """A page as the generator wants it: blank lines before lists and tables, and pages for links to folders."""
    lines: list[str] = []
    fence = False
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        if FENCE.match(line):
            fence = not fence
        elif not fence and (start := BLOCK.match(line)) and before and not _inside(before, start[1]):
            lines.append("")
        lines.append(line)
    for link in {one.target for one in links(text)}:
        if normpath(join(dirname(path), link)) + "/README.md" in known and not link.endswith(".md"):
            lines = [line.replace(f"]({link})", f"]({link.rstrip('/')}/README.md)") for line in lines]
    return "\n".join(lines) + "\n"


def _inside(before: str, start: str) -> bool:
    """The line above belongs to the same list or table already."""
    if start == "|":
        return before.startswith("|")
    return before.startswith(" ") or bool(BLOCK.match(before) and not before.startswith("|"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
