"""Links and anchors of Markdown: pure text to text. Anchors are those that GitHub makes of headings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from posixpath import dirname, join, normpath

FENCE = re.compile(r"^ {0,3}(```+|~~~+)")
HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)? *$")
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)|!\[[^\]]*\]\(([^()\s]+)\)")
NAMED = re.compile(r"""<a (?:id|name)=["']([^"']+)["']""")
FOREIGN = re.compile(r"^[a-z][a-z0-9+.-]*:")


@dataclass(frozen=True)
class Link:
    """A link as a page writes it, and the number of its line."""

    target: str
    line: int

    @property
    def foreign(self) -> bool:
        """It leaves the repository."""
        return bool(FOREIGN.match(self.target))


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines outside of fenced blocks, with their numbers from 1."""
    fence = ""
    for number, line in enumerate(page.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip().startswith(fence):
            fence = ""
        elif not fence:
            yield number, line


def links(page: str) -> list[Link]:
    """Those in prose; inline code holds none."""
    found = []
    for number, line in prose(page):
        text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", lambda code: "`" * len(code[0]), line)
        found += [Link(one[1] or one[2], number) for one in LINK.finditer(text)]
    return found


def anchors(page: str) -> set[str]:
    """What a link may name after `#`: one for each heading, and those that the page names itself."""
    found: set[str] = set()
    for _, line in prose(page):
        found.update(NAMED.findall(line))
        if heading := HEADING.match(line):
            base = slug(heading[1])
            found.add(next(name for name in _names(base) if name not in found))
    return found


def slug(heading: str) -> str:
    """GitHub's anchor of a heading: lower case, no punctuation, a hyphen for each space."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def broken(pages: Mapping[str, str], files: set[str]) -> list[str]:
    """A sentence for each link of `pages` (text by path) that leads nowhere. `files` are all paths that exist, folders too."""
    known = {path: anchors(text) for path, text in pages.items()}
    wrong = []
    for path, text in pages.items():
        for link in links(text):
            if link.foreign:
                continue
            target, _, anchor = link.target.partition("#")
            place = normpath(join(dirname(path), target)) if target else path
            if place not in files:
                wrong.append(f"{path}:{link.line}: {link.target}: there is no {place}")
            elif anchor and place in known and anchor not in known[place]:
                wrong.append(f"{path}:{link.line}: {link.target}: {place} has no heading #{anchor}")
    return wrong


def _names(base: str) -> Iterator[str]:
    yield base
    number = 0
    while True:
        number += 1
        yield f"{base}-{number}"
