"""One limit of a field or object (FieldRule), and what is said of a manifest that breaks it (Problem).

The API server and `validate` tell a limit in the same words: a FieldRule has both the CEL and the check in Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from psjob_operator.printable import printable

Json = Any
LONGEST_VALUE = 80


@dataclass(frozen=True)
class FieldRule:
    """One limit of one field or object."""

    at: str
    """Path of the value that it judges; `[]` stands for every item. Empty: the whole object."""
    check: Callable[[Json], bool]
    """True where the value is fine. Asked only of values of the right type."""
    limit: str
    remedy: str
    cel: str = ""
    obstacle: str = ""
    """Why no CEL says it: then the API server takes the manifest, and the operator refuses it."""
    about: str = ""
    """Path, below `at`, of the field to name."""
    bounds: tuple[float, float] | None = None
    """The least and the largest number, which the schema has too."""
    shape: Mapping[str, int] | None = None
    """What the schema says in place of CEL, in the API server's own words."""

    @property
    def at_admission(self) -> bool:
        """The API server says it; else the operator does, and `obstacle` says why."""
        return bool(self.cel or self.shape)

    @property
    def message(self) -> str:
        """The words that both sides say."""
        return f"{self.limit}; {self.remedy}" if self.remedy else self.limit


def breaches(table: tuple[FieldRule, ...], value: Json) -> Iterator[tuple[str, Json, FieldRule]]:
    """(path, value, rule) for each row of `table` that `value` breaks, in the table's order."""
    for rule in table:
        for path, part in found(value, rule.at):
            if not rule.check(part):
                yield _join(path, rule.about), _named(part, rule.about), rule


def found(value: Json, at: str) -> Iterator[tuple[str, Json]]:
    """Each (path, value) that `at` names in `value`; nothing where a part of the way is absent."""
    places: list[tuple[str, Json]] = [("", value)]
    for step in re.findall(r"[^.\[\]]+|\[\]", at):
        if step == "[]":
            places = [(f"{path}[{i}]", item) for path, items in places if isinstance(items, list) for i, item in enumerate(items)]
        else:
            places = [(_join(path, step), part[step]) for path, part in places if isinstance(part, Mapping) and part.get(step) is not None]
    yield from places


def _join(path: str, below: str) -> str:
    return f"{path}.{below}" if path and below else path or below


def _named(value: Json, about: str) -> Json:
    return next((part for _, part in found(value, about)), None) if about else value


def options_of(rule: str, options: str, names: Mapping[str, tuple[str, ...]]) -> str:
    """CEL: each key of the map `options` is one of `names` of the word `rule`; a word without names has none."""
    known = " || ".join(f"{rule} in {words!r} && name in {list(own)!r}" for own, words in _by_options(names).items())
    return f"{options}.all(name, {known})"


def option_words(names: Mapping[str, tuple[str, ...]]) -> str:
    """The names that each word has, for people; words with equal ones together."""
    return "; ".join(f"{', '.join(own)} of {' and '.join(words)}" for own, words in _by_options(names).items())


def _by_options(names: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for word, own in names.items():
        if own:
            found.setdefault(tuple(own), []).append(word)
    return found


def between(at: str, low: float, high: float, remedy: str) -> FieldRule:
    """A number of a range."""
    return FieldRule(
        at, lambda n: low <= n <= high, f"must be {low}..{high}", remedy, cel=f"self >= {low} && self <= {high}", bounds=(low, high)
    )


def between_or(at: str, low: int, high: int, word: str, remedy: str) -> FieldRule:
    """A whole number of a range, or a word."""
    return FieldRule(
        at,
        lambda given: given == word if isinstance(given, str) else low <= given <= high,
        f"must be {low}..{high} or {word}",
        remedy,
        cel=f"type(self) == int ? self >= {low} && self <= {high} : self == '{word}'",
    )


def matching(at: str, pattern: str, limit: str, remedy: str) -> FieldRule:
    """A text of a pattern."""
    # `\Z`, since Python's `$` also matches before a last newline and CEL's does not.
    exact = re.compile(pattern.removesuffix("$") + r"\Z", re.ASCII)
    return FieldRule(at, lambda text: exact.match(text) is not None, limit, remedy, cel=f"self.matches('{pattern}')")


def sized(at: str, low: int, high: int, remedy: str) -> FieldRule:
    """Limits of a list's length; the schema has the upper one too, from which CEL's cost is estimated."""
    cel = f"self.size() >= {low} && self.size() <= {high}"
    return FieldRule(at, lambda items: low <= len(items) <= high, f"must have {low}..{high} items", remedy, cel=cel)


@dataclass(frozen=True)
class Problem:
    """What is wrong, where, and what to do. `str()` is one line, in the form and words of the API server."""

    field: str
    """Path, such as spec.shards.replicas; empty for the document itself."""
    value: Any
    """What stands there; None where nothing does."""
    limit: str
    remedy: str = ""
    admitted: bool = False
    """The API server takes the manifest all the same: `psjob validate` and the operator say it."""

    def __str__(self) -> str:
        """`spec.shards.replicas: Invalid value: 0: must be 1..256; …`."""
        where = f"{self.field}: " if self.field else ""
        value = f"Invalid value: {shown(self.value)}: " if self.value is not None else ""
        return printable(f"{where}{value}{self.limit}{f'; {self.remedy}' if self.remedy else ''}")


def shown(value: Any) -> str:
    """The value on one line, cut where it is long; of lists and objects only the kind, as the API server does."""
    if isinstance(value, dict):
        return '"object"'
    if isinstance(value, (list, tuple)):
        return '"array"'
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def field_path(loc: Iterable[int | str]) -> str:
    """If a field lies, as `a.b[0].c`, from pydantic's steps to it."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f"{'.' if path else ''}{step}"
    return path
