"""`psjob doctor` on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from psjob_client.cli import main
from tests.typed import CliRunner
from tests.unit.api_manifest import GOOD, changed

WORKER = "spec.workers.template.spec.containers.0"


def test_the_command_looks_at_this_machine_and_at_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(changed(GOOD, {f"{WORKER}.command": ["no-such-program"]})))
    done = CliRunner().invoke(main.cli, ["doctor", "job.yaml", "-o", "json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and told["problem"] is True
    (command,) = [row for row in told["findings"] if row["about"] == "job: command"]
    assert "no-such-program" in command["figure"]
    assert {"python", "psjob", "torch", "cores", "memory", "/dev/shm", "open files", "ports", "run folder", "cache", "GPU"} <= {
        row["about"] for row in told["findings"]
    }
    done = CliRunner().invoke(main.cli, ["doctor", "--kubeconfig", str(tmp_path / "none")])
    assert done.exit_code == 1 and done.stdout.startswith("PROBLEM  API server") and "1 problem, 0 warnings" in done.stdout
