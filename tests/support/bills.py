"""What is asked of a bill of materials, whatever it is of."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any


def assert_bill(told: dict[str, Any], files: Iterable[str]) -> None:
    """It is CycloneDX, and each of those files is listed once."""
    from cyclonedx.schema import SchemaVersion  # seconds of imports, which most runs do not need
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(told)) is None
    parts = [told["metadata"]["component"], *told["components"]]
    owned = Counter(place["location"] for part in parts for place in part.get("evidence", {}).get("occurrences", ()))
    assert owned == dict.fromkeys(files, 1)
    for part in parts:
        assert "version" in part or "scope" in part, part["name"]
