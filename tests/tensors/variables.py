"""What a script's variable looks like in a record."""

from __future__ import annotations

from typing import Any

from psjob.resume import record


def packed(state: Any) -> Any:
    """As a record gives it back."""
    return record.unpack(record.pack(record.ResumeRecord(None, 0, {}, {"variables": state}, []))).stateful["variables"]
