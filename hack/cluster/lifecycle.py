"""`up` and `down`: start the holder and wait for it, end it and wait until nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hack.cluster import holder, network, nodes
from hack.cluster.options import Options, Ready
from hack.cluster.paths import REPO, ClusterError
from hack.cluster.proc import alive, tail

UP_LIMIT, DOWN_LIMIT = 300.0, 240.0


def up(options: Options) -> Ready:
    """Start the cluster of that state folder, or find it running, and return its facts. Raises ClusterError with the reason."""
    running = Ready.load(options.state)
    if running is not None and alive(running.holder):
        return running
    down(options.state)
    _check_state(options.state)
    if options.nodes:
        nodes.check(options)
    options.state.mkdir(parents=True, exist_ok=True, mode=0o755)
    (options.state / "error").unlink(missing_ok=True)
    (options.state / "options.json").write_text(options.to_json())
    shutil.rmtree(options.state / "logs", ignore_errors=True)
    (options.state / "logs").mkdir()
    command = [sys.executable, str(Path(__file__).resolve().parent), "hold", "--state", str(options.state)]
    with (options.state / "logs" / "holder.log").open("ab") as log:
        subprocess.run(command, cwd=REPO, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, timeout=UP_LIMIT)
    return _await(options)


def down(state: Path) -> bool:
    """End the cluster of that state folder; True when there was one. Also cleans after a holder that was killed."""
    pid = _holder(state)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        _wait_gone(pid)
    reaper = _reaper(state)
    if reaper is not None:
        _wait_gone(reaper)
    leftover = (state / "options.json").exists()
    if leftover:
        _clean_after_a_kill(state)
    return pid is not None or leftover


def _clean_after_a_kill(state: Path) -> None:
    """Holder and reaper were both killed: do what the reaper would have done, but leave the machine to a cluster that came later."""
    options = Options.from_json((state / "options.json").read_text())
    if options.nodes:
        try:
            with network.claim():
                holder.clean(options)
                return
        except ClusterError:
            pass
    holder.remove_state(state)


def _await(options: Options) -> Ready:
    started = time.monotonic()
    error = options.state / "error"
    while time.monotonic() - started < UP_LIMIT + options.wait:
        ready = Ready.load(options.state)
        if ready is not None:
            return ready
        if _holder(options.state) is None:
            words = error.read_text().strip() if error.exists() else tail(options.state / "logs" / "holder.log")
            raise ClusterError(f"the cluster did not come up: {words}")
        time.sleep(0.05)
    pid = _holder(options.state)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    raise ClusterError(f"the cluster did not come up within {UP_LIMIT:.0f} s; its logs lie in {options.state / 'logs'}")


def _holder(state: Path) -> int | None:
    return _living(state / "holder.pid")


def _reaper(state: Path) -> int | None:
    return _living(state / "reaper.pid")


def _living(file: Path) -> int | None:
    try:
        pid, started = file.read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if alive(int(pid), started) else None


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + DOWN_LIMIT
    while alive(pid):
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"process {pid} of the cluster did not end within {DOWN_LIMIT:.0f} s; look at logs/holder.log in its state folder"
            )
        time.sleep(0.05)


def _check_state(state: Path) -> None:
    foreign = [entry.name for entry in state.iterdir() if entry.name not in ("logs", "error")] if state.exists() else []
    if foreign:
        raise ClusterError(
            f"{state} holds files that are not a cluster's ({', '.join(sorted(foreign)[:5])}); give --state an empty or new folder"
        )
