"""What a Python source says to people: its public docstrings, and each string that reads as a sentence.

Exceptions, events, conditions, log lines, help of options and descriptions of fields are strings of the second kind. No list of helpers
is kept: a string counts by its words, not by the function that takes it.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

LEAST = 4
"""Words of a string that may be a sentence."""
NEUTRAL = "X"
"""Stands where a message has a value."""
PLACE = re.compile(r"%\(\w+\)[-+ 0-9.]*[sdrfgix]|%[-+ 0-9.]*[sdrfgix]\b|\{\w*(?:[!:][^{}]*)?\}")
CODE = re.compile(
    r"&&|\|\||==|</|/>|<[a-z]+(?: [a-z-]+=|>)|=>|\{\{|\bself\.|\(\?[:!<=]|\\[wdsb]|;\s*\n|\bfunction\b.*\{|^#!"
    r"|^\s*(?:import|from|set|exec) \S+.*\n",
    re.MULTILINE,
)
"""What stands in CEL, markup, templates, scripts and style sheets, and in no sentence."""
LISTING = re.compile(r"^\s*(?:import [\w.]+(?: as \w+)?$|from [\w.]+ import )|\"\w+\": |\{\"", re.MULTILINE)
"""What only a paragraph of Python or of the keys of a JSON object has."""
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
SECTIONS = ("Args", "Returns", "Raises", "Yields", "Example")
SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):\s*$")
ITEM = re.compile(r"^\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*: ")
"""How an argument, an exception or a key of a list begins."""
MARKUP = str.maketrans({"<": "‹", ">": "›", "*": "·", "[": "(", "]": ")"})


@dataclass(frozen=True)
class Line:
    """A line of text, and the line of the source that it is of."""

    number: int
    text: str


@dataclass(frozen=True)
class Said:
    """A docstring or a message, line by line. An empty line ends a paragraph."""

    docstring: bool
    lines: tuple[Line, ...]


def extract(source: str) -> list[Said]:
    """The docstrings of a source that are public, and its messages, in the order of their lines. Raises SyntaxError."""
    tree = ast.parse(source)
    found = [Said(True, tuple(_prose(str(node.value), node.lineno))) for node in _docstrings(tree.body, public=True)]
    found += [Said(False, lines) for lines in _messages(tree)]
    return sorted((one for one in found if one.lines), key=lambda one: one.lines[0].number)


def _docstrings(body: list[ast.stmt], public: bool) -> Iterator[ast.Constant]:
    """The docstring of a body, of its public definitions, and of the public names that are assigned in it."""
    named = public
    for place, one in enumerate(body):
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
            if public and (place == 0 or named):
                yield one.value
        elif isinstance(one, ast.ClassDef):
            yield from _docstrings(one.body, public and not one.name.startswith("_"))
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and public and not one.name.startswith("_"):
            yield from _docstrings(one.body[:1], True)
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        named = any(isinstance(name, ast.Name) and not name.id.startswith("_") for name in targets)


def _prose(text: str, first_number: int, section: str = "") -> Iterator[Line]:
    """The lines of a text that begins there, as paragraphs: each argument is one, and examples are left out."""
    first, _, rest = text.partition("\n")
    lines = [first.strip(), *textwrap.dedent(rest).splitlines()]
    code, listed = False, False
    for place, line in enumerate(lines):
        number = first_number + place
        if place == 0 or not lines[place - 1].strip():
            listed = LISTING.search("\n".join(itertools.takewhile(str.strip, lines[place:]))) is not None
        if listed:
            continue
        if begun := SECTION.match(line):
            section = begun[1]
            yield Line(number, "")
            continue
        if line and not line.startswith(" ") and section in SECTIONS:
            section, code = "", False
        if section == "Example" or line.lstrip().startswith((">>>", "...", "$ ")) or code:
            code = code or line.lstrip().startswith("$ ")
            continue
        body = line.strip()
        if ITEM.match(body) and section:
            yield Line(number, "")
            body = body.split(": ", 1)[1]
        elif body.startswith(("- ", "* ")):
            yield Line(number, "")
            body = body[2:]
        yield Line(number, _plain(body))


def _messages(node: ast.AST) -> Iterator[tuple[Line, ...]]:
    """The strings below a node that read as sentences; of an f-string, with a neutral word where a value stands."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.keyword) and node.arg == "cel":
        return
    text = ""
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(one.value) if isinstance(one, ast.Constant) else NEUTRAL for one in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = PLACE.sub(NEUTRAL, node.value)
    if text and reads(text):
        yield tuple(_prose(text.strip("\n"), node.lineno, "list" if "\n" in text.strip() else ""))
    for one in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(one, ast.Constant)):
            yield from _messages(one)


def reads(text: str) -> bool:
    """The string has words enough for a sentence, and nothing that only code has."""
    return len(WORD.findall(text)) >= LEAST and text.strip().count(" ") >= LEAST - 1 and not CODE.search(text)


def _plain(text: str) -> str:
    """Without what markdown would read: a comparison is no tag, a product no emphasis, and a dash no list."""
    return text.lstrip("-#+=| ").translate(MARKUP).replace("``", "`")
