"""What no file of the repository may hold."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.sources import ROOT, holding


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry_host() -> None:
    names = ["files.python+hosted.org", "pypi+.org", "registry.npm+js.org", "proxy.golang+.org", "deb.debian+.org", "static.crates+.io"]
    hosts = [name.replace("+", "") for name in names]  # split here, so that this file does not name them
    places = [re.escape(host) for host in hosts] + [r"(?<![\w.~])/" + "root/", r"(?<![\w.~-])/" + r"work/(main|shared)"]
    assert not holding("|".join(places), tracked())
