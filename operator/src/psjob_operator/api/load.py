"""Reads a manifest from text, and says in which line of it a problem lies.

YAML is read safely: no type but the plain ones, few aliases, no key twice. A problem's path, such as spec.shards.replicas, leads to a line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.parser import ParserError
from yaml.reader import ReaderError
from yaml.resolver import Resolver
from yaml.scanner import ScannerError

from psjob_operator.api.field_rule import Problem
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.validate import every_problem

LARGEST_TEXT = 1024 * 1024
MOST_ALIASES = 100
MERGE = "tag:yaml.org,2002:merge"
MOST_NODES = 100_000
"""Values in a manifest with every alias written out; LARGEST_SPEC has room for half of them."""


def load_job(text: str | bytes) -> tuple[PSTrainingJob | None, list[Problem]]:
    """The one job that `text` (YAML or JSON, UTF-8) holds, or every problem found; never an exception."""
    raw, problems = load_document(text, "PSTrainingJob")
    return (None, problems) if problems else every_problem(raw)


def load_document(text: str | bytes, kind: str) -> tuple[Any, list[Problem]]:
    """The one document that `text` holds, as plain values, or every problem found; never an exception. `kind`: what it should be."""
    documents, problems = load_documents(text)
    if problems:
        return None, problems
    if len(documents) != 1:
        if not documents:
            return None, [Problem("", None, f"the manifest is empty: it holds no {kind}", "psjob init writes one")]
        return None, [
            Problem("", None, f"the manifest holds {len(documents)} documents, not one {kind}", "keep other objects in other files")
        ]
    return documents[0].value, []


def load_documents(text: str | bytes) -> tuple[list[Document], list[Problem]]:
    """Every document of `text` that is not empty, or every problem found; never an exception."""
    if len(text) > LARGEST_TEXT:
        return [], [Problem("", None, f"the manifest is larger than the limit of {LARGEST_TEXT} bytes", "keep scripts and data out of it")]
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            return [], [Problem("", None, f"the manifest is not UTF-8 (byte {error.start})", "save it as UTF-8")]
    try:
        return [document for document in _read(text) if document.value is not None], []
    except yaml.YAMLError as error:
        return [], [Problem("", None, f"the manifest is not YAML: {_one_line(error)}", "correct that line")]
    except _Expands as error:
        return [], [Problem("", None, str(error), "write out what you mean instead of aliases (*name)")]
    except RecursionError:
        return [], [Problem("", None, "the manifest is nested too deep", "it needs no more than some twenty levels")]
    except ValueError as error:
        return [], [Problem("", None, f"the manifest cannot be read: {error}", "correct that value")]


@dataclass(frozen=True)
class Document:
    """One document of a file."""

    value: Any
    """Its plain values."""
    node: yaml.Node
    """Where they stand in the text."""

    def line(self, path: str) -> int:
        """The line, from 1, of the value at `path` (such as spec.shards.replicas); of what it would stand in where it is absent."""
        return line_of(self.node, path)


def _read(text: str) -> list[Document]:
    """Read by libyaml, in a fifth of the time. What that refuses is read again in Python: by the same rules, errors with the same words."""
    if _Quick is not None:
        with contextlib.suppress(ReaderError, ScannerError, ParserError):
            return list(_documents(_Quick(text)))
    return list(_documents(_Strict(text)))


def _documents(loader: Any) -> Iterator[Document]:
    try:
        while loader.check_node():
            node: Any = loader.get_node()
            yield Document(loader.construct_document(node), node)
    finally:
        loader.dispose()


class _Expands(Exception):
    """Aliases stand for more than anyone means."""


class _Rules(Composer, SafeConstructor, Resolver):
    """Safe, and: a key given twice is an error as for kubectl, times stay text, aliases are few and stand for little."""

    _aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # type: ignore[attr-defined]  # of the parser
            self._aliases += 1
            if self._aliases > MOST_ALIASES:
                raise yaml.constructor.ConstructorError(None, None, f"more than {MOST_ALIASES} aliases", parent and parent.start_mark)
        return super().compose_node(parent, index)

    def compose_document(self) -> Any:
        node: Any = super().compose_document()
        if (size := _size(node, {})) > MOST_NODES:
            raise _Expands(f"the manifest holds {size} values with every alias written out, at most {MOST_NODES} are taken")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} already set in map", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Rules.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Strict(_Rules, yaml.SafeLoader):
    """Reads in Python."""


_Quick: Callable[[str], Any] | None = None
if yaml.__with_libyaml__:
    from yaml.cyaml import CParser  # type: ignore[attr-defined]  # the stubs do not name it

    class _ByLibrary(_Rules, CParser):
        """Reads by libyaml."""

        def __init__(self, stream: str) -> None:
            CParser.__init__(self, stream)
            Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    _Quick = _ByLibrary


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """How many nodes `node` stands for with every alias written out; each is counted once and remembered in `known`."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise _Expands(f"line {node.start_mark.line + 1}: an alias stands inside the value that it names")
        return size
    known[id(node)] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    size = 1 + sum(_size(part, known) for part in parts)
    known[id(node)] = size
    return size


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + " ".join(str(getattr(error, "problem", None) or error).split())


def line_of(node: yaml.Node, path: str) -> int:
    """The line, from 1, of the key or item that `path` names below `node`; of the last part of the way that is there."""
    mark, rest = node.start_mark, path
    while rest:
        found = _item(node, rest) if isinstance(node, yaml.SequenceNode) else _entry(node, rest)
        if found is None:
            break
        mark, node, rest = found
    return int(mark.line) + 1


def _item(node: yaml.SequenceNode, path: str) -> tuple[yaml.Mark, yaml.Node, str] | None:
    number, closed, rest = path.removeprefix("[").partition("]")
    if not (path.startswith("[") and closed and number.isdigit() and int(number) < len(node.value)):
        return None
    item = node.value[int(number)]
    return item.start_mark, item, rest.removeprefix(".")


def _entry(node: yaml.Node, path: str) -> tuple[yaml.Mark, yaml.Node, str] | None:
    """The entry of a mapping that `path` begins with: names may hold dots, so the longest one counts."""
    found = None
    longest = -1
    for key, value in _entries(node):
        rest = _below(path, key.value) if isinstance(key, yaml.ScalarNode) else None
        if rest is not None and len(key.value) > longest:
            found, longest = (key.start_mark, value, rest), len(key.value)
    return found


def _entries(node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    """Those of a mapping, merged ones (<<) last; nothing of a scalar."""
    if not isinstance(node, yaml.MappingNode):
        return []
    merged = [value for key, value in node.value if key.tag == MERGE]
    sources = [source for value in merged for source in (value.value if isinstance(value, yaml.SequenceNode) else [value])]
    own = [(key, value) for key, value in node.value if key.tag != MERGE]
    return own + [entry for source in sources for entry in _entries(source)]


def _below(path: str, name: str) -> str | None:
    """What follows `name` in `path`; None where the path does not begin with it."""
    for written in (name, f"[{name}]"):
        rest = path[len(written) :]
        if path.startswith(written) and (not rest or rest[0] in ".["):
            return rest.removeprefix(".")
    return None
