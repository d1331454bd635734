"""Flux's postBuild.substitute replaces ${VAR} anywhere in a manifest: no manifest that people copy from here holds one."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("examples", "client/src/psjob_client/templates")


def test_no_manifest_to_copy_holds_what_flux_replaces() -> None:
    files = [file for place in PLACES for file in (ROOT / place).rglob("*") if file.is_file() and ".yaml" in file.suffixes]
    jobs = [file for file in files if "kind: PSTrainingJob" in file.read_text()]
    assert len(jobs) >= 8
    assert not [str(file.relative_to(ROOT)) for file in jobs if "${" in file.read_text()]


def test_the_page_says_what_to_write_instead() -> None:
    page = (ROOT / "docs/operations.md").read_text() + "".join(file.read_text() for file in ROOT.glob("docs/gitops.md"))
    assert "postBuild.substitute" in page and "$(VAR)" in page
