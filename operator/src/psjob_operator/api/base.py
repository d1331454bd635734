"""The base of every model of the manifest."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel


class Model(BaseModel):
    """Frozen; snake_case in Python, camelCase in a manifest; what it does not know is refused; types are never bent.

    The text under a field is its description in the CRD, in `kubectl explain` and in docs/api.md.
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
        """This object as it stands in a manifest: camelCase, plain JSON types, absent where None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
