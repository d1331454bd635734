"""The chart's alerts, evaluated by Prometheus' engine over series: they fire when somebody should look, and else stay silent."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from hack.cluster.paths import Unavailable
from hack.promtool import promtool
from tests.live.alert_cases import CASES, Case
from tests.support.chart import ROOT, of_kind

RUNBOOK = ROOT / "docs" / "runbook.md"


def rules() -> list[dict[str, object]]:
    (found,) = of_kind("PrometheusRule", "metrics.prometheusRule.enabled=true")
    return list(found["spec"]["groups"])


def alerts() -> dict[str, dict[str, str]]:
    return {rule["alert"]: rule["annotations"] for group in rules() for rule in group["rules"]}  # type: ignore[attr-defined]


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_alerts_fire_and_stay_silent(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules()}))
    told = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [one(case) for case in CASES]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(told, width=1000))
    try:
        tool = promtool()
    except Unavailable as error:
        pytest.skip(str(error))
    done = subprocess.run([tool, "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def one(case: Case) -> dict[str, object]:
    """A case as promtool reads it."""
    firing = f'count(ALERTS{{alertstate="firing",alertname="{case.alert}"}}) or vector(0)'
    wanted = {"expr": firing, "eval_time": f"{case.minute}m", "exp_samples": [{"labels": "{}", "value": case.firing}]}
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    return {"name": f"{case.alert}: {case.name}", "interval": "1m", "input_series": series, "promql_expr_test": [wanted]}


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    assert len(CASES) >= 24
    for name in alerts():
        assert {bool(case.firing) for case in CASES if case.alert == name} == {True, False}, name
    assert {case.alert for case in CASES} == set(alerts())


def test_each_alert_has_a_section_of_the_runbook_to_which_it_links() -> None:
    sections = re.findall(r"(?m)^## (\w+)$", RUNBOOK.read_text())
    assert sections == list(alerts())
    for name, told in alerts().items():
        assert told["runbook_url"].endswith(f"/runbook/#{name.lower()}"), told
