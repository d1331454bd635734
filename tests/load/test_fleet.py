"""A fleet of jobs beside a bare client: a small one in every run, for what can be counted; whole ones in the soak, with their goals.

On a machine that others use, times say little. So the small fleet is judged by requests, and by processor time beside the API server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.fleet.__main__ import measure
from bench.fleet.table import cpu_per_pod, requests_per_pod, share_of_bare, table

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("plane_programs")]


def asked(run: Mapping[str, Any], phase: str) -> dict[str, int]:
    return dict(run["phases"][phase]["requests"])


@pytest.mark.serial
@pytest.mark.timeout(300)
def test_ten_jobs_cost_what_they_must_and_no_request_more(tmp_path: Path) -> None:
    run = measure(jobs=10, nodes=5, idle=5, no_bare=True, folder=tmp_path, timeout=120)
    said = table(run)
    assert asked(run, "idle") == {}, said
    begun = asked(run, "burst")
    assert begun.pop("patch pstrainingjobs/status") <= 2 * 10 + 2, said
    around = {"create services": 10, "create configmaps": 10, "create secrets": 10, "create networkpolicies": 20}
    assert begun == {"create pods": 100, "create events": 10, **around}, said
    assert run["lose"]["superfluous"] == 0, said
    lost = asked(run, "lose")
    assert lost["create pods"] == 10 and lost["patch pstrainingjobs/status"] <= 2 * 10 + 2, said
    assert requests_per_pod(run) <= 2.5, said
    assert cpu_per_pod(run) <= 0.6 * cpu_per_pod(run, "kube-apiserver"), said


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.timeout(1800)
def test_a_hundred_jobs_beside_a_bare_client(tmp_path: Path) -> None:
    run = measure(folder=tmp_path)
    print(table(run))
    assert cpu_per_pod(run) <= 3.5
    assert requests_per_pod(run) <= 2.3
    assert asked(run, "idle") == {} and run["lose"]["superfluous"] == 0
    assert run["rss"]["burst"] <= 120
    # Missed on two cores: docs/performance/scale.md says by how much and why.
    assert share_of_bare(run) >= 0.40
    assert run["burst"]["allStatusRunning"] <= 1.6 * run["bare"]["allRunning"]
    assert run["lose"]["toNewPod"]["p50"] <= 0.5 and run["lose"]["toNewPod"]["p99"] <= 1.5


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.timeout(3600)
def test_a_thousand_jobs_cost_a_pod_what_a_hundred_do(tmp_path: Path) -> None:
    few = measure(idle=0, no_bare=True, folder=tmp_path / "few")
    many = measure(jobs=1000, idle=0, no_bare=True, new_job=True, timeout=1800, folder=tmp_path / "many")
    print(table(few), table(many), sep="\n")
    assert cpu_per_pod(many) <= 1.3 * cpu_per_pod(few)
    assert many["rss"]["burst"] <= 400
    assert many["newJob"]["toPods"]["max"] <= 2


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.timeout(3600)
def test_pods_of_others_cost_nothing(tmp_path: Path) -> None:
    alone = measure(jobs=20, idle=0, no_bare=True, folder=tmp_path / "alone")
    among = measure(jobs=20, idle=0, no_bare=True, foreign=10_000, timeout=1200, folder=tmp_path / "among")
    assert cpu_per_pod(among) <= 1.3 * cpu_per_pod(alone)
    assert among["rss"]["burst"] <= 1.1 * alone["rss"]["burst"]


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.timeout(3600)
def test_one_job_of_four_thousand_workers_gets_a_lost_one_back(tmp_path: Path) -> None:
    run = measure(jobs=1, shards=64, workers=4000, idle=0, no_bare=True, timeout=1800, folder=tmp_path)
    print(table(run))
    assert run["lose"]["toNewPod"]["max"] <= 3
