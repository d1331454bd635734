"""Where a value stands in a manifest's text: a path of a problem, such as spec.ps.shards, to a line."""

from __future__ import annotations

import yaml

MERGE = "tag:yaml.org,2002:merge"


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
