"""The commands of a page, as a reader would type them: pure text to text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

HEADING = re.compile(r"^(#+) +(.*?)\s*$")


def commands(page: str, title: str) -> list[str]:
    """The commands in the `sh` blocks below the heading `title`, in order. A command that continues after a backslash is one.

    Raises LookupError if there is no such heading, or no command below it.
    """
    found = [command for block in blocks(page, title) for command in _split(block)]
    if not found:
        raise LookupError(f"there is no command below the heading {title!r}")
    return found


def blocks(page: str, title: str) -> Iterator[str]:
    """The `sh` blocks below the heading `title` and the smaller headings in it."""
    fence: str | None = None
    within: int | None = None
    lines: list[str] = []
    for line in page.splitlines():
        heading = HEADING.match(line) if fence is None else None
        if heading:
            level = len(heading[1])
            if within is not None and level <= within:
                return
            if heading[2] == title:
                within = level
        elif line.startswith("```"):
            if fence is None:
                fence, lines = line[3:], []
            else:
                if fence == "sh" and within is not None:
                    yield "\n".join(lines)
                fence = None
        else:
            lines.append(line)


def script(typed: Sequence[str], marks: str) -> str:
    """A script for bash that runs these in one shell, ends at the first that fails, and adds the time to the file `marks` after each."""
    mark = f'printf "%s\\n" "$EPOCHREALTIME" >> {shlex.quote(marks)}'
    return "\n".join(["set -e", *(f"{command}\n{mark}" for command in typed), ""])


def _split(block: str) -> list[str]:
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
