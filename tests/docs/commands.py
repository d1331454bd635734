"""Lines of a shell taken apart, and what reads each program's part: the parser of psjob, or the help of the program itself."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import typer

from psjob_client.cli.main import cli
from tests.docs import ROOT
from tests.e2e.kube import tool
from tests.support.typed import built

COMMAND = built(cli)
REFUSED: Any = typer.BadParameter.__base__
"""What the parser raises for words that it does not take."""
PREFIX = ("for", "do", "then", "env")


def simple(text: str) -> Iterator[list[str]]:
    """The simple commands of a block: without comments, redirections, settings of variables and words of the shell."""
    joined = re.sub(r"\\\n\s*", "", text).replace("<run>", "run").replace("$(", " ; ").replace(")", " ) ")
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) - set("|;&()"):
                if found := stripped(words):
                    yield found
                words = []
            else:
                words.append(word)


def stripped(words: list[str]) -> list[str]:
    """Without what stands before a program, and redirections behind it."""
    words = list(itertools.takewhile(lambda word: set(word) - set("<>"), words))
    if words[:1] == ["for"] or words[:1] == ["export"]:
        return []
    while words and (words[0] in PREFIX or words[0] == "done" or re.fullmatch(r"[A-Za-z_]+=.*", words[0])):
        words = words[1:]
    return words


def psjob_takes(words: list[str]) -> None:
    """The command exists, and its parser takes these words. AssertionError with what it says."""
    command: Any = COMMAND
    context = typer.Context(COMMAND, info_name="psjob")
    name = "psjob"
    while words and hasattr(command, "commands"):
        name = f"{name} {words[0]}"
        assert words[0] in command.commands, f"there is no command {name}"
        command, words = command.commands[words[0]], words[1:]
    if name == "psjob convert":  # what follows a launcher is the launcher's
        words = [*itertools.takewhile(lambda word: word not in ("torchrun", "accelerate"), words)]
    try:
        command.make_context(name, list(words), parent=context)
    except REFUSED as refused:
        if "does not exist" not in (says := refused.format_message()):  # a file of the reader's
            raise AssertionError(f"{name}: {says}") from None


@functools.cache
def help_of(*words: str) -> str:
    """What the program says of itself."""
    done = subprocess.run([tool(words[0]), *words[1:], "--help"], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    if words[0] == "kubectl":  # its global options stand apart
        return done.stdout + subprocess.run([tool("kubectl"), "options"], capture_output=True, text=True, timeout=60, check=True).stdout
    return done.stdout


def flags(words: list[str]) -> list[str]:
    """Options, long without their values, and short ones by their first letter."""
    found = []
    for word in words:
        if word == "--":
            break
        if re.match(r"--[a-z]", word):
            found.append(word.partition("=")[0])
        elif re.match(r"-[A-Za-z]", word):
            found.append(word[:2])
    return found


def has(program: list[str], words: list[str]) -> None:
    """The program's own help knows the command and each of its options."""
    text = help_of(*program)
    assert "Usage" in text or "usage" in text, f"{' '.join(program)} is no command"
    for flag in flags(words):
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text), f"{' '.join(program)} has no option {flag}"
