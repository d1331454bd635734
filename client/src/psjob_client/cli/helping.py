"""Help texts as they are printed: each command with its whole sentence, and examples that can be copied."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

STARTS = ("psjob ", "kubectl ")
"""Of a line that is an example."""
GOES_ON = " \\"
"""At the end of a line, for a shell."""


class Helped(TyperCommand):
    """A command whose epilog holds examples, a paragraph each."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_epilog(self.epilog, formatter)


class HelpedGroup(TyperGroup):
    """Commands that are listed with the first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, first_sentence(command.help or "")) for name, command in found if command is not None and not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_epilog(self.epilog, formatter)


def first_sentence(text: str) -> str:
    """Up to its first full stop or semicolon, without it."""
    flat = " ".join(text.split())
    return min((flat.partition(mark)[0] for mark in (". ", "; ")), key=len).rstrip(".")


def write_epilog(epilog: str | None, formatter: Any) -> None:
    """Paragraphs, of which examples are broken only where a shell reads on."""
    if not epilog:
        return
    formatter.write_paragraph()
    with formatter.indentation():
        for number, paragraph in enumerate(inspect.cleandoc(epilog).split("\n\n")):
            line = paragraph.strip()
            if number:
                formatter.write_paragraph()
            if line.startswith(STARTS):
                for each in broken(line, formatter.width - formatter.current_indent):
                    formatter.write(f"{'':>{formatter.current_indent}}{each}\n")
            else:
                formatter.write_text(paragraph)


def broken(command: str, width: int) -> list[str]:
    """Lines of a command of this width at most, if its words allow it; each but the last ends with a backslash."""
    lines, line = list[str](), ""
    for word in _words(command):
        longer = f"{line} {word}" if line else word
        if line.strip() and len(longer) + len(GOES_ON) > width:
            lines.append(line + GOES_ON)
            line = f"    {word}"
        else:
            line = longer
    return [*lines, line]


def _words(command: str) -> Sequence[str]:
    """Words with their quotes, so that none is broken within."""
    lexer = shlex.shlex(command, posix=False, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)
