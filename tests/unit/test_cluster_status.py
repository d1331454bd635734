"""The status patch: what differs and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob_operator.api.status import Condition, JobStatus, ShardStatus
from psjob_operator.cluster.status_writer import difference, merge_patch, tells_news
from tests.unit.cluster_statuses import merged

VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


@given(OBJECTS, OBJECTS)
def test_the_patch_turns_the_old_into_the_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert merged(old, merge_patch(old, new)) == new


@given(OBJECTS)
def test_no_difference_is_no_patch(value: dict[str, Any]) -> None:
    assert merge_patch(value, value) == {}


def _status(**more: Any) -> JobStatus:
    at = "2026-01-01T00:00:00Z"
    ready = Condition(type="Ready", status="False", reason="Starting", message="2 of 4", last_transition_time=at)
    return JobStatus(phase="Pending", run="u", conditions=(ready,), shards=(ShardStatus(index=0, attempt=1),), **more)


def test_a_field_of_a_newer_operator_stays() -> None:
    stored = {**_status().to_manifest(), "standby": {"index": 3}}
    assert difference(stored, _status()) == {}


def test_a_field_that_is_no_longer_said_goes() -> None:
    stored = {**_status().to_manifest(), "workersReady": "1/2"}
    assert difference(stored, _status()) == {"workersReady": None}


def said(status: str, reason: str) -> dict[str, str]:
    return {"type": "Ready", "status": status, "reason": reason, "message": "words"}


@pytest.mark.parametrize(
    ("change", "at_once"),
    [
        ({"workersReady": "3/4"}, False),
        ({"conditions": [said("False", "Unschedulable")]}, False),
        ({"conditions": [said("True", "Running")]}, True),
        ({"conditions": [said("False", "Starting"), {"type": "Reconciling", "status": "True", "reason": "Starting"}]}, True),
        ({"phase": "Running"}, True),
        ({"restarts": {"total": 1}}, True),
    ],
)
def test_what_is_written_at_once(change: dict[str, Any], at_once: bool) -> None:
    assert tells_news({"phase": "Pending", "conditions": [said("False", "Starting")]}, change) is at_once
