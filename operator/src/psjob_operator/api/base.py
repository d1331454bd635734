"""The base of every model of the manifest, and the amounts in it: quantities of Kubernetes such as 500m."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)((?P<unit>[KMGTPE]i|[numkMGTPE])|(?P<exponent>[eE][+-]?[0-9]+))?", re.ASCII
)
"""As in apimachinery's resource.ParseQuantity."""
UNITS = {"": Decimal(1), "m": Decimal("0.001"), **{letter: Decimal(1000 ** (i + 1)) for i, letter in enumerate("kMGTPE")}}
UNITS |= {f"{letter}i": Decimal(1024 ** (i + 1)) for i, letter in enumerate("KMGTPE")}


class Model(BaseModel):
    """Frozen; snake_case in Python, camelCase in a manifest; what it does not know is refused; types are never bent.

    The text under a field is its description in the CRD, in `kubectl explain` and in docs/manifest.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        # The API server prunes a null of a field that is not nullable and puts the default there; so do we.
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None or not cls._knows(key)}
        return data

    @classmethod
    def _knows(cls, key: Any) -> bool:
        return any(key in (name, field.alias) for name, field in cls.model_fields.items())

    def to_manifest(self) -> dict[str, Any]:
        """This object as in a manifest: camelCase, plain JSON types, absent where None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


@dataclass(frozen=True)
class NumberOrWord:
    """Marks a whole number or a text; which ones, a rule says."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_number_or_word)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"x-kubernetes-int-or-string": True}


def _number_or_word(value: Any) -> int | str:
    if isinstance(value, int | str) and not isinstance(value, bool):
        return value
    raise PydanticCustomError("number_or_word", "must be of type integer or string")


@dataclass(frozen=True)
class OpenEnum:
    """Marks a Literal of `words` that is read leniently: the schema lists them, and any other word is kept unchanged."""

    words: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.str_schema()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "enum": list(self.words)}


def without(raw: Mapping[str, Any], paths: Iterable[tuple[int | str, ...]]) -> dict[str, Any]:
    """A copy of `raw` without what stands at these paths; where nothing stands (a field is missing), without what would hold it."""
    made = deepcopy(dict(raw))
    # Of a list the last go first, since those after an item that goes move up.
    for path in sorted(
        {_there(made, path) for path in paths},
        key=lambda path: [(str(key), 0) if isinstance(key, str) else ("", key) for key in path],
        reverse=True,
    ):
        holder: Any = made
        for key in path[:-1]:
            holder = holder[key]
        if path:
            del holder[path[-1]]
        else:
            made.clear()
    return made


def _there(raw: Any, path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The part of `path` at which something stands."""
    for depth, key in enumerate(path):
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return path[:depth]
    return path


def quantity(value: Any) -> Decimal | None:
    """`value` as a number of its base unit (cores, bytes, pieces). None for what is no quantity, or is written with a sign or an exponent,
    or in millionths or less."""
    found = QUANTITY.fullmatch(str(value)) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    if found is None or found["sign"] or found["exponent"] or (found["unit"] or "") not in UNITS:
        return None
    return Decimal(found["number"]) * UNITS[found["unit"] or ""]
