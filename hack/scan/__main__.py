"""`python -m hack.scan`: checkov over the chart's objects, those of a job, and the Dockerfile; part of `make lint`.

What it finds is an error, unless exceptions.toml says why it is meant to be so. An exception that nothing needs is an error too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hack.environment import output, programs

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
DIGEST = "sha256:" + "0" * 64
"""Stands for the digests that a release writes into the values."""
CHARTS = {
    "chart.yaml": (),
    "chart-narrow.yaml": ("--set=watchNamespaces={a,b}", "--set=crds.enabled=false"),
    "chart-metrics.yaml": ("--set=metrics.service.enabled=true", "--set=metrics.podMonitor.enabled=true"),
}
"""A rendered file, and the settings of helm that it comes from."""


@dataclass(frozen=True)
class Finding:
    """A check that failed, of an object in a scanned file."""

    check: str
    name: str
    place: str


@dataclass(frozen=True)
class Excused:
    """Findings of one check at places of a pattern (`FILE:KIND.NAMESPACE.NAME`), and why they stay."""

    check: str
    at: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        return finding.check == self.check and fnmatchcase(finding.place, self.at)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        collect(Path(folder))
        found, passed = scan(Path(folder))
    wrong = judge(found, exceptions())
    print("\n".join(wrong) if wrong else f"checkov: {passed} checks passed, {len(found)} excused in hack/scan/exceptions.toml")
    return 1 if wrong else 0


def collect(folder: Path) -> None:
    """Put what is scanned into that folder."""
    digests = [f"--set={image}.digest={DIGEST}" for image in ("image", "runtimeImage")]
    for name, settings in CHARTS.items():
        (folder / name).write_text(output("helm", "template", "psjob", "charts/psjob", "--namespace=psjob-system", *digests, *settings))
    image = f"registry.example/psjob-runtime@{DIGEST}"
    (folder / "job.yaml").write_text(output("psjob", "render", str(HERE / "job.yaml"), f"--runtime-image={image}"))
    shutil.copy(ROOT / "Dockerfile", folder)


def scan(folder: Path) -> tuple[list[Finding], int]:
    """What checkov finds in the files of that folder, and how many checks passed."""
    words = ("--framework", "kubernetes", "dockerfile", "--compact", "--quiet", "--skip-download", "--output=json")
    command = [str(programs("checkov") / "checkov"), "--directory", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    try:
        reports = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise SystemExit(f"checkov ended with {done.returncode} and no report: {(done.stdout + done.stderr).strip()[-2000:]}") from error
    reports = reports if isinstance(reports, list) else [reports]
    unread = any(report["summary"]["parsing_errors"] for report in reports)
    if unread or {report["check_type"] for report in reports} != {"kubernetes", "dockerfile"}:
        raise SystemExit(f"checkov could not read all that it was given: {[report['summary'] for report in reports]}")
    found = [
        Finding(failed["check_id"], failed["check_name"], f"{failed['file_path'].lstrip('/')}:{failed['resource']}")
        for report in reports
        for failed in report["results"]["failed_checks"]
    ]
    return found, sum(report["summary"]["passed"] for report in reports)


def judge(found: Iterable[Finding], excused: Iterable[Excused]) -> list[str]:
    """A sentence for each finding without an exception, and for each exception without a finding."""
    found, excused = list(found), list(excused)
    bare = [one for one in found if not any(exception.covers(one) for exception in excused)]
    idle = [exception for exception in excused if not any(exception.covers(one) for one in found)]
    return [f"{one.place}: {one.check} {one.name}" for one in bare] + [
        f"hack/scan/exceptions.toml: {exception.check} at {exception.at} excuses nothing; remove it" for exception in idle
    ]


def exceptions() -> list[Excused]:
    """Those of exceptions.toml."""
    return [Excused(**entry) for entry in tomllib.loads((HERE / "exceptions.toml").read_text())["exception"]]


if __name__ == "__main__":
    sys.exit(main())
