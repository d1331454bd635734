"""What a pod says about its progress is cut to size before anyone looks at it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_operator.cluster import progress
from psjob_operator.contract import STATUS_BYTES


@pytest.mark.parametrize(
    "raw",
    [None, b"", b"[1]", b"3", b"{", b'{"a":' * 5000, b"x" * (STATUS_BYTES + 1), b"\xff\xfe{}", b"[" * 100_000],
    ids=["nothing", "empty", "list", "number", "cut", "deep", "long", "not utf-8", "deeper"],
)
def test_what_is_no_object_of_bounded_size_is_nothing(raw: bytes | None) -> None:
    assert progress.parse(raw) is None


def test_numbers_must_be_finite_and_strings_are_cut_and_made_printable() -> None:
    raw = json.dumps(
        {"loss": float("nan"), "rate": 1e400, "step": 12, "huge": 2**70, "text": "a\x1b[31m" + "b" * 400, "deep": {"a": [{"b": 1}]}}
    )
    found = progress.parse(raw.encode())
    assert found is not None
    assert found["loss"] is None and found["rate"] is None and found["huge"] is None
    assert found["step"] == 12
    assert found["deep"] == {"a": [{"b": 1}]}
    assert "\x1b" not in found["text"] and len(found["text"]) <= progress.TEXT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@settings(max_examples=20)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_the_result_is_plain_json_whatever_came(value: dict[str, Any]) -> None:
    found = progress.parse(json.dumps(value).encode())
    assert found is None or json.dumps(found, allow_nan=False)
