"""A shard writes to its checkpoints and its termination message alone: it starts, trains and commits where all else is read-only."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from psjob import contract
from psjob.checkpoint import manifest
from tests.live.live_shards import eventually
from tests.live.shard_processes import processes, pushing

BOOT = """
import os, sys
os.execvp("unshare", ["unshare", "--mount", "bash", "-c", sys.argv[1], "-", sys.argv[2], sys.executable, "-m", "psjob.shard"])
"""
READ_ONLY = """
set -eu
mount --make-rprivate /
mount --bind "$1" "$1"
for folder in / /tmp "$HOME" "$PWD"; do
  mount -o remount,bind,ro "$(findmnt -nT "$folder" -o TARGET | tail -1)"
  if touch "$folder/psjob-probe"; then echo "$folder can be written" >&2; exit 9; fi
done 2>/dev/null
shift
exec "$@"
"""
"""As a pod's: the folder with the checkpoints is a volume of its own, and /dev/shm too."""


@pytest.mark.nodes
def test_a_shard_trains_and_commits_in_a_read_only_image(tmp_path: Path) -> None:
    lacking = [word for word in ("unshare", "findmnt", "mount") if shutil.which(word) is None]
    if os.geteuid() != 0 or lacking or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace needs root, unshare, mount and findmnt")
    with processes(tmp_path, shards=1) as run:
        shard = run.start(0, program=("-c", BOOT, READ_ONLY, str(tmp_path)))
        assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200 or shard.poll() is not None, 60)
        assert shard.poll() is None, run.log(0)

        def step() -> int:
            found = manifest.newest(run.run, None)[0] if run.run.exists() else None
            return found.step if found is not None else 0

        with pushing(run):
            assert eventually(lambda: step() > 5 or shard.poll() is not None, 60)
        assert shard.poll() is None, run.log(0)
        shard.terminate()
        shard.wait(30)
        assert "Read-only" not in run.log(0)
