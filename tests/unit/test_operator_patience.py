"""How long the watches try on, and what an operator is told that cannot stand for election."""

from __future__ import annotations

import itertools

import pytest

from psjob_operator.__main__ import app
from psjob_operator.cluster import client
from psjob_operator.cluster.client import JOBS, PODS, Path
from psjob_operator.cluster.watch import Patience
from tests.typed import CliRunner


def test_an_outage_is_waited_for_and_a_refusal_is_not() -> None:
    patience = Patience()
    pauses = list(itertools.islice(patience, 1000))
    assert pauses[:5] == [1, 2, 3, 5, 5] and max(pauses) == 5 and sum(pauses) > 600, "ten minutes and more, and soon back"
    assert list(itertools.islice(patience, 3)) == [1, 2, 3], "each request begins anew"
    patience.refused.add((PODS, ""))
    assert sum(patience) < 60


def test_one_namespace_of_two_that_refuses_us_ends_nothing() -> None:
    patience = Patience(2)
    patience.refused.add((JOBS, "a"))
    assert sum(itertools.islice(patience, 1000)) > 600
    patience.refused.add((JOBS, "b"))
    assert sum(patience) < 60


def test_a_lease_without_a_namespace_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(client, "NAMESPACE_FILE", Path(f"{tmp_path}/none"))
    done = CliRunner().invoke(app, ["run", "--lease=psjob"])
    assert done.exit_code == 2 and "--lease psjob: give --lease-namespace too" in done.output
